"""A model's weights as the fast search wants them: built once a call, nothing copied that need not be.

Rows of a fused projection, H heads of sizes d_k and d_v:

    self-attention   [ q of all heads, times 1/sqrt(d_k) | k and v of head 1 | k and v of head 2 | … ]
    cross-attention  [ q of all heads, times 1/sqrt(d_k) ]   and   [ k and v of head 1 | k and v of head 2 | … ]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from metaphrase.configuration.errors import MetaphraseError

Affine = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias."""


@dataclass(slots=True)
class LayerWeights:
    """One layer of either stack; an encoder's has no cross-attention."""

    qkv: Affine
    out: Affine
    norm: Affine
    fc1: Affine
    fc2: Affine
    final_norm: Affine
    activation: Callable[[torch.Tensor], torch.Tensor]
    cross_query: Affine | None = None
    cross_kv: Affine | None = None
    cross_out: Affine | None = None
    cross_norm: Affine | None = None


@dataclass(slots=True)
class StackWeights:
    """The encoder or the decoder."""

    layers: list[LayerWeights]
    embedding: torch.Tensor
    embed_scale: float
    embed_positions: Callable[[torch.Tensor, int], torch.Tensor]
    last_norm: Affine | None
    """None in a post-norm model, whose layers normalise before they add."""
    heads: int
    d_k: int
    d_v: int
    epsilon: float


@dataclass(slots=True)
class ModelWeights:
    """Both stacks and the output projection."""

    encoder: StackWeights
    decoder: StackWeights
    vocabulary: torch.Tensor
    """[d_model, V], laid out so: few rows are multiplied with it up to 1.5 times as fast as with [V, d_model]."""


def read_weights(model: PreTrainedModel) -> ModelWeights:
    """Gathers the weights of a metaphrase model. They are a picture of this moment: training on does not change them.

    Raises:
        MetaphraseError: the model is of another kind, or a layer is not the plain one that the search computes
            (adapters, quantisation, weights that lie elsewhere).
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
    if kind != "metaphrase" or not hasattr(model, "lm_head"):
        raise MetaphraseError(
            f"the fast search reads a MetaphraseForConditionalGeneration, and this is {type(model).__name__} "
            f"({kind}); use engine 'generate'"
        )
    for name, module in model.named_modules():
        projection = name.endswith(("_proj", "fc1", "fc2", "lm_head"))
        if projection and (type(module) is not nn.Linear or module.weight.is_meta or module._forward_hooks):
            raise MetaphraseError(
                f"the fast search computes plain linear layers in memory, and {name} is {type(module).__name__}; "
                "use engine 'generate'"
            )
    with torch.no_grad():
        encoder, decoder = model.model.encoder, model.model.decoder
        return ModelWeights(_read_stack(encoder), _read_stack(decoder), model.lm_head.weight.detach().t().contiguous())


def _read_stack(stack: nn.Module) -> StackWeights:
    config = stack.config
    attention = stack.layers[0].self_attn
    d_k, d_v = config.head_dims(attention.num_heads)
    return StackWeights(
        layers=[_read_layer(layer) for layer in stack.layers],
        embedding=stack.embed_tokens.weight.detach(),
        embed_scale=stack.embed_scale,
        embed_positions=stack.embed_positions,
        last_norm=_affine(stack.layer_norm) if config.normalize_before else None,
        heads=attention.num_heads,
        d_k=d_k,
        d_v=d_v,
        epsilon=config.layer_norm_eps,
    )


def _read_layer(layer: nn.Module) -> LayerWeights:
    weights = LayerWeights(
        qkv=_stack_rows(_query(layer.self_attn), _keys_and_values(layer.self_attn)),
        out=_affine(layer.self_attn.out_proj),
        norm=_affine(layer.self_attn_layer_norm),
        fc1=_affine(layer.fc1),
        fc2=_affine(layer.fc2),
        final_norm=_affine(layer.final_layer_norm),
        activation=torch.relu_ if isinstance(layer.activation_fn, nn.ReLU) else layer.activation_fn,
    )
    if hasattr(layer, "encoder_attn"):
        weights.cross_query = _query(layer.encoder_attn)
        weights.cross_kv = _keys_and_values(layer.encoder_attn)
        weights.cross_out = _affine(layer.encoder_attn.out_proj)
        weights.cross_norm = _affine(layer.encoder_attn_layer_norm)
    return weights


def _affine(module: nn.Linear | nn.LayerNorm) -> Affine:
    return module.weight.detach(), None if module.bias is None else module.bias.detach()


def _query(attention: nn.Module) -> Affine:
    weight, bias = _affine(attention.q_proj)
    return weight * attention.scaling, bias * attention.scaling


def _keys_and_values(attention: nn.Module) -> Affine:
    """Rows ordered head by head, so that a head's keys and values lie side by side and are stored in one go."""
    parts = []
    for key, value in zip(_affine(attention.k_proj), _affine(attention.v_proj), strict=True):
        by_head = [part.unflatten(0, (attention.num_heads, -1)) for part in (key, value)]
        parts.append(torch.cat(by_head, dim=1).flatten(0, 1))
    return parts[0], parts[1]


def _stack_rows(first: Affine, second: Affine) -> Affine:
    return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])
