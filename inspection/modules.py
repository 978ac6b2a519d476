"""Where a model keeps its attention: the same view of ours, Marian, BART, M2M100 and T5.

Modules are found by the field's names (`self_attn`, `encoder_attn`, `q_proj` …), so that other models of the same build
work too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn
from transformers import PreTrainedModel

from metaphrase.configuration.errors import MetaphraseError

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Projections:
    """The four linear maps of one attention module: the paper's W^Q, W^K, W^V and W^O of all heads side by side."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model itself, where it was wrapped by `torch.compile`.

    Raises:
        MetaphraseError: if it is no encoder-decoder of the transformers library.
    """
    inner = getattr(model, "_orig_mod", model)
    config = getattr(inner, "config", None)
    if not isinstance(inner, PreTrainedModel) or not getattr(config, "is_encoder_decoder", False):
        raise MetaphraseError(
            f"Attention can be shown for encoder-decoder models of the transformers library, and {type(inner).__name__}"
            " is none; give a metaphrase, Marian, BART, M2M100 or T5 model with its output layer."
        )
    return inner


def attention_modules(model: nn.Module) -> dict[Kind, list[nn.Module]]:
    """The attention modules of each kind, a layer each, from the first layer on.

    Raises:
        MetaphraseError: if the model names its parts otherwise.
    """
    inner = unwrapped(model)
    encoder, decoder = inner.get_encoder(), inner.get_decoder()
    try:
        if hasattr(encoder, "block"):
            return {
                "encoder": [block.layer[0].SelfAttention for block in encoder.block],
                "decoder": [block.layer[0].SelfAttention for block in decoder.block],
                "cross": [block.layer[1].EncDecAttention for block in decoder.block],
            }
        return {
            "encoder": [layer.self_attn for layer in encoder.layers],
            "decoder": [layer.self_attn for layer in decoder.layers],
            "cross": [layer.encoder_attn for layer in decoder.layers],
        }
    except AttributeError as error:
        raise MetaphraseError(
            f"{type(inner).__name__} has no `layers` with `self_attn` and `encoder_attn` ({error}); attention can be"
            " shown for models built like metaphrase, Marian, BART, M2M100 or T5."
        ) from None


def projections(module: nn.Module) -> Projections:
    """The linear maps of an attention module."""
    names = ("q_proj", "k_proj", "v_proj", "out_proj") if hasattr(module, "q_proj") else ("q", "k", "v", "o")
    return Projections(*(getattr(module, name) for name in names))


def head_count(module: nn.Module) -> int:
    """How many heads an attention module has."""
    return int(getattr(module, "num_heads", None) or module.n_heads)


@contextmanager
def eager_attention_of(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Give the model in evaluation mode with attention that keeps its weights; put everything back afterwards.

    Fused kernels never hold the weights. Only the pass inside this context runs without them: decoding stays fast.
    """
    inner = unwrapped(model)
    configs = {id(part.config): part.config for part in inner.modules() if isinstance(part, PreTrainedModel)}
    before = [(config, config._attn_implementation) for config in configs.values()]
    training = [(part, part.training) for part in inner.modules()]
    try:
        inner.eval()
        inner.set_attn_implementation("eager")
        yield inner
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        for part, mode in training:
            part.training = mode
