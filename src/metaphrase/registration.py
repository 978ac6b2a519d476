"""Makes the Auto classes of transformers know `metaphrase`, without importing transformers before it is wanted.

`import metaphrase` costs milliseconds: it only leaves a note at the import system (`wrapt`'s post-import hooks). When
transformers' Auto classes are imported, by whomever, the three lines of `_register_config` and `_register_models` run;
when its pipelines are, the task name of `decoding/pipeline.py` is made known.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType

import wrapt

MODEL_TYPE = "metaphrase"
AUTO_CONFIG = "transformers.models.auto.configuration_auto"
AUTO_MODELS = "transformers.models.auto.modeling_auto"
OUR_CONFIG = "metaphrase.configuration.configuration_metaphrase"
OUR_MODELS = "metaphrase.modeling.modeling_metaphrase"
PIPELINES = "transformers.pipelines"
OUR_PIPELINE = "metaphrase.decoding.pipeline"
_warned: set[str] = set()


def register() -> None:
    """Registers with the Auto classes as soon as they are there. Calling it again changes nothing."""
    for name in (AUTO_CONFIG, OUR_CONFIG):
        wrapt.register_post_import_hook(_register_config, name)
    for name in (AUTO_MODELS, OUR_MODELS):
        wrapt.register_post_import_hook(_register_models, name)
    wrapt.register_post_import_hook(_register_pipeline, PIPELINES)


def _register_config(_: ModuleType) -> None:
    auto, ours = _both(AUTO_CONFIG, "AutoConfig", OUR_CONFIG, "MetaphraseConfig")
    if auto is None or ours is None:
        return
    if _is_free(auto.CONFIG_MAPPING, MODEL_TYPE, ours.MetaphraseConfig, "AutoConfig"):
        auto.AutoConfig.register(MODEL_TYPE, ours.MetaphraseConfig, exist_ok=True)


def _register_models(_: ModuleType) -> None:
    auto, ours = _both(AUTO_MODELS, "AutoModelForSeq2SeqLM", OUR_MODELS, "MetaphraseForConditionalGeneration")
    if auto is None or ours is None:
        return
    config = ours.MetaphraseForConditionalGeneration.config_class
    if _is_free(auto.MODEL_MAPPING, config, ours.MetaphraseModel, "AutoModel"):
        auto.AutoModel.register(config, ours.MetaphraseModel, exist_ok=True)
    model = ours.MetaphraseForConditionalGeneration
    if _is_free(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, config, model, "AutoModelForSeq2SeqLM"):
        auto.AutoModelForSeq2SeqLM.register(config, model, exist_ok=True)


def _register_pipeline(_: ModuleType) -> None:
    importlib.import_module(OUR_PIPELINE)  # it registers itself; where it brought the library's in, it is on its way


def _both(
    auto_name: str, auto_class: str, our_name: str, our_class: str
) -> tuple[ModuleType | None, ModuleType | None]:
    """The library's module and ours, as far as they are ready.

    Ours is imported when the library's is there. While ours is itself being imported (its own imports may be what
    brought the library's in) it is left alone: the hook on its name runs when it is done.
    """
    auto = sys.modules.get(auto_name)
    if auto is None or not hasattr(auto, auto_class):
        return None, None
    ours = sys.modules.get(our_name)
    if ours is None:
        ours = importlib.import_module(our_name)
    return auto, ours if hasattr(ours, our_class) else None


def _is_free(mapping: object, key: object, ours: type, auto_class: str) -> bool:
    """Whether `key` is free for our class; warns once where a foreign class has it already."""
    theirs = mapping[key] if key in mapping else None  # noqa: SIM401 (the library's mapping has no safe `get`)
    if theirs is None or theirs is ours:
        return theirs is None
    if isinstance(theirs, type) and _name(theirs) == _name(ours):
        return True  # our own class from an earlier import of the package: the newest is the one in use
    their_name = _name(theirs) if isinstance(theirs, type) else str(theirs)
    if auto_class in _warned:
        return False
    _warned.add(auto_class)
    warnings.warn(
        f'model_type "{MODEL_TYPE}" is already taken in {auto_class} by {their_name}, which stays; load models of '
        f"this package with {_name(ours)} itself",
        UserWarning,
        stacklevel=2,
    )
    return False


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
