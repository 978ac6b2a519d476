"""A model's weights as the fast search wants them, built once a call.

Every matrix lies as [in, out]: a product with few rows is then up to 1.9 times as fast as with nn.Linear's [out, in].
Columns of a fused projection, H heads of sizes d_k and d_v, q times 1/sqrt(d_k):

    self-attention   [ q k v of head 1 | q k v of head 2 | … ]
    cross-attention  [ q of head 1 | q of head 2 | … ]   and   [ k v of head 1 | k v of head 2 | … ]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from metaphrase.configuration.errors import MetaphraseError

Affine = tuple[torch.Tensor, torch.Tensor]
"""Bias [out] and weight [in, out], in the order in which torch.addmm takes them; weight and bias of a norm."""


MOST_ROWS_PACKED = 24
"""From 2 to so many rows, oneDNN's product with packed weights takes down to half the time of the plain one."""


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
    """[d_model, V]."""
    packed: torch.Tensor | None = None
    """The same as oneDNN wants it, made when first needed."""

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the vocabulary, [N, d_model] -> [N, V]."""
        if not 2 <= hidden.shape[0] <= MOST_ROWS_PACKED or not _can_pack(self.vocabulary):
            return hidden @ self.vocabulary
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.vocabulary.t().contiguous(), 8)
        return torch.ops.mkldnn._linear_pointwise(hidden, self.packed, None, "none", [], "")


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


def _can_pack(weight: torch.Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _read_stack(stack: nn.Module) -> StackWeights:
    config = stack.config
    attention = stack.layers[0].self_attn
    d_k, d_v = config.head_dims(attention.num_heads)
    return StackWeights(
        layers=[_read_layer(layer) for layer in stack.layers],
        embedding=stack.embed_tokens.weight.detach(),
        embed_scale=stack.embed_scale,
        embed_positions=stack.embed_positions,
        last_norm=_rows(stack.layer_norm) if config.normalize_before else None,
        heads=attention.num_heads,
        d_k=d_k,
        d_v=d_v,
        epsilon=config.layer_norm_eps,
    )


def _read_layer(layer: nn.Module) -> LayerWeights:
    own = layer.self_attn
    weights = LayerWeights(
        qkv=_head_by_head(own.num_heads, _query(own), _rows(own.k_proj), _rows(own.v_proj)),
        out=_transposed(_rows(own.out_proj)),
        norm=_rows(layer.self_attn_layer_norm),
        fc1=_transposed(_rows(layer.fc1)),
        fc2=_transposed(_rows(layer.fc2)),
        final_norm=_rows(layer.final_layer_norm),
        activation=torch.relu_ if isinstance(layer.activation_fn, nn.ReLU) else layer.activation_fn,
    )
    if hasattr(layer, "encoder_attn"):
        asking = layer.encoder_attn
        weights.cross_query = _transposed(_query(asking))
        weights.cross_kv = _head_by_head(asking.num_heads, _rows(asking.k_proj), _rows(asking.v_proj))
        weights.cross_out = _transposed(_rows(asking.out_proj))
        weights.cross_norm = _rows(layer.encoder_attn_layer_norm)
    return weights


Rows = tuple[torch.Tensor, torch.Tensor]
"""Weight [out, in] and bias [out], as a module has them."""


def _rows(module: nn.Linear | nn.LayerNorm) -> Rows:
    return module.weight.detach(), module.bias.detach()


def _query(attention: nn.Module) -> Rows:
    weight, bias = _rows(attention.q_proj)
    return weight * attention.scaling, bias * attention.scaling


def _head_by_head(heads: int, *parts: Rows) -> Affine:
    """Several projections as one: all of the first head, then all of the second, …"""
    weight, bias = (
        torch.cat([part.unflatten(0, (heads, -1)) for part in kind], dim=1).flatten(0, 1)
        for kind in zip(*parts, strict=True)
    )
    return _transposed((weight, bias))


def _transposed(rows: Rows) -> Affine:
    return rows[1], rows[0].t().contiguous()
