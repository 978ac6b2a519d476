"""metaphrase: the encoder-decoder Transformer of "Attention Is All You Need", from raw parallel text to a shared model.

Importing it is cheap and makes the Auto classes of transformers know the model type `metaphrase`; the names below are
imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .registration import register as _register

if TYPE_CHECKING:
    from .configuration.configuration_metaphrase import MetaphraseConfig
    from .configuration.errors import MetaphraseError
    from .configuration.options import RunOptions
    from .decoding.pipeline import TranslationPipeline
    from .decoding.translate import translate
    from .modeling.modeling_metaphrase import MetaphraseForConditionalGeneration, MetaphraseModel
    from .recipes import read_recipe
    from .training.data.token_batches import PairCollator, TokenBatchSampler, token_dataloader
    from .training.evaluate import score
    from .training.publish import publish
    from .training.publish_callback import PublishCallback
    from .training.run import train

__version__ = "0.1.0"

_HOMES = {
    "MetaphraseConfig": "configuration.configuration_metaphrase",
    "MetaphraseError": "configuration.errors",
    "MetaphraseForConditionalGeneration": "modeling.modeling_metaphrase",
    "MetaphraseModel": "modeling.modeling_metaphrase",
    "PairCollator": "training.data.token_batches",
    "PublishCallback": "training.publish_callback",
    "RunOptions": "configuration.options",
    "TokenBatchSampler": "training.data.token_batches",
    "TranslationPipeline": "decoding.pipeline",
    "publish": "training.publish",
    "read_recipe": "recipes",
    "score": "training.evaluate",
    "token_dataloader": "training.data.token_batches",
    "train": "training.run",
    "translate": "decoding.translate",
}

__all__ = [
    "MetaphraseConfig",
    "MetaphraseError",
    "MetaphraseForConditionalGeneration",
    "MetaphraseModel",
    "PairCollator",
    "PublishCallback",
    "RunOptions",
    "TokenBatchSampler",
    "TranslationPipeline",
    "publish",
    "read_recipe",
    "score",
    "token_dataloader",
    "train",
    "translate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"metaphrase.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_register()
