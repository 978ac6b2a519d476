"""The fast encoder pass and the fast decoder step: plain calls of torch on fused weights, no modules, no hooks.

Their slow twin is the model's own forward; tests compare them.

B sources · K beams of a source · S source positions · n = K x steps taken · H heads · d_k, d_v head sizes

The cache of a layer is [B, H, n, d_k + d_v]: each step appends one place for each beam. Beams are never moved about in
it: a beam that goes on from another one is told by `ancestry`, [B, 1, K, n], which places are its own past:

    2 beams, 3 steps          step 1   step 2   step 3         0 = may be attended to
    beam 1                     0  x     0  x     0  x          x = the lowest number, which softmax makes 0
    beam 2, a child of 1       0  x     0  x     x  0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from metaphrase.decoding.weights import Affine, ModelWeights, StackWeights

FIRST_CAPACITY = 16
"""Steps for which a cache has room at first; it doubles when it is full."""


@dataclass(slots=True)
class LayerCache:
    """What one decoder layer remembers."""

    past: torch.Tensor
    """Keys and values of the targets, [B, H, capacity x K, d_k + d_v]."""
    source: torch.Tensor
    """Keys and values of the sources, [B, H, S, d_k + d_v]: once a source, however many beams ask it."""


@dataclass(slots=True)
class DecoderState:
    """Everything that a decoder remembers of a batch between two steps."""

    layers: list[LayerCache]
    source_mask: torch.Tensor | None
    """[B, 1, 1, S], added to scores; None where nothing is padding."""
    ancestry: torch.Tensor | None
    """[B, 1, K, capacity x K], added to scores; None for one beam."""
    positions: torch.Tensor
    """Position vectors of the steps for which there is room, [capacity, d_model]."""
    beams: int
    steps: int = 0
    watch_source: bool = False
    """Whether the last layer's attention over the source is kept, for a coverage penalty."""
    attention: torch.Tensor | None = None
    """Where it is: the last step's, averaged over heads, [B, K, S]."""


def encode(weights: StackWeights, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The encoder's output, [B, S] -> [B, S, d_model]."""
    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
    if bool((attention_mask.diff(dim=1) > 0).any()):  # padding that is not on the right shifts positions
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)
    positions = weights.embed_positions(position_ids, input_ids.shape[1])
    embeds = F.embedding(input_ids, weights.embedding)
    hidden = embeds * weights.embed_scale + positions.to(embeds)
    mask = additive_mask(attention_mask, hidden.dtype)
    before = weights.last_norm is not None
    query_size = weights.heads * weights.d_k
    for layer in weights.layers:
        asked = _norm(hidden, layer.norm, weights) if before else hidden
        fused = F.linear(asked, *layer.qkv)
        query = fused[..., :query_size].unflatten(-1, (weights.heads, weights.d_k)).transpose(1, 2)
        keys_values = fused[..., query_size:].unflatten(-1, (weights.heads, -1)).transpose(1, 2)
        hidden = hidden + F.linear(_attend(query, keys_values, mask, weights.d_k), *layer.out)
        hidden = hidden if before else _norm(hidden, layer.norm, weights)
        hidden = _feed_forward(hidden, layer, weights, before)
    return _norm(hidden, weights.last_norm, weights) if before else hidden


def start(
    weights: ModelWeights,
    encoded: torch.Tensor,
    attention_mask: torch.Tensor,
    beams: int,
    watch_source: bool = False,
) -> DecoderState:
    """The state before the first step: the sources' keys and values are computed, the targets' have room.

    Args:
        encoded: the encoder's output, [B, S, d_model].
        attention_mask: [B, S], 0 at padding.
        beams: K.
        watch_source: keep the last layer's attention over the source.
    """
    decoder = weights.decoder
    layers = []
    for layer in decoder.layers:
        source = F.linear(encoded, *layer.cross_kv).unflatten(-1, (decoder.heads, -1)).transpose(1, 2).contiguous()
        past = source.new_empty(encoded.shape[0], decoder.heads, 0, decoder.d_k + decoder.d_v)
        layers.append(LayerCache(past, source))
    mask = additive_mask(attention_mask, encoded.dtype)
    ancestry = encoded.new_empty(encoded.shape[0], 1, beams, 0) if beams > 1 else None
    return DecoderState(layers, mask, ancestry, encoded.new_empty(0), beams, watch_source=watch_source)


def decode_step(weights: StackWeights, state: DecoderState, tokens: torch.Tensor) -> torch.Tensor:
    """Feeds each beam its next token, [B, K] -> last hidden states [B x K, d_model].

    On the first step, when all beams of a source are the same, `tokens` may be [B, 1], and so is the result.
    """
    if state.steps == state.positions.shape[0]:
        _make_room(weights, state)
    beams = tokens.shape[1]
    first = state.steps * state.beams
    end = first + state.beams
    ancestry = None if state.ancestry is None else state.ancestry[:, :, :beams, :end]
    hidden = F.embedding(tokens.reshape(-1), weights.embedding)
    hidden = torch.add(state.positions[state.steps], hidden, alpha=weights.embed_scale)
    heads, d_k = weights.heads, weights.d_k
    before = weights.last_norm is not None
    for layer, cache in zip(weights.layers, state.layers, strict=True):
        asked = _norm(hidden, layer.norm, weights) if before else hidden
        fused = F.linear(asked, *layer.qkv)
        query = fused[:, : heads * d_k].view(-1, beams, heads, d_k).transpose(1, 2)
        cache.past[:, :, first:end] = fused[:, heads * d_k :].view(-1, beams, heads, d_k + weights.d_v).transpose(1, 2)
        hidden = hidden + F.linear(_attend(query, cache.past[:, :, :end], ancestry, d_k).flatten(0, 1), *layer.out)
        hidden = hidden if before else _norm(hidden, layer.norm, weights)
        asked = _norm(hidden, layer.cross_norm, weights) if before else hidden
        query = F.linear(asked, *layer.cross_query).view(-1, beams, heads, d_k).transpose(1, 2)
        hidden = hidden + F.linear(_attend(query, cache.source, state.source_mask, d_k).flatten(0, 1), *layer.cross_out)
        hidden = hidden if before else _norm(hidden, layer.cross_norm, weights)
        hidden = _feed_forward(hidden, layer, weights, before)
    if state.watch_source:
        scores = query @ cache.source[..., :d_k].transpose(2, 3)
        state.attention = (scores if state.source_mask is None else scores + state.source_mask).softmax(-1).mean(1)
    state.steps += 1
    return _norm(hidden, weights.last_norm, weights) if before else hidden


def follow(state: DecoderState, parents: torch.Tensor) -> None:
    """Says from which beam each beam goes on.

    Args:
        parents: rows of the batch flattened to B x K, [B x K].
    """
    if state.ancestry is None:
        return
    filled = state.steps * state.beams
    ancestry = state.ancestry.flatten(0, 2)
    ancestry[:, :filled] = ancestry[:, :filled].index_select(0, parents)


def keep(state: DecoderState, rows: torch.Tensor) -> None:
    """Drops all sources but those in `rows`, [fewer than B]."""
    for cache in state.layers:
        cache.past, cache.source = cache.past.index_select(0, rows), cache.source.index_select(0, rows)
    if state.source_mask is not None:
        state.source_mask = state.source_mask.index_select(0, rows)
    if state.ancestry is not None:
        state.ancestry = state.ancestry.index_select(0, rows)


def additive_mask(attention_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """[B, S], 0 at padding -> [B, 1, 1, S], 0 where one may attend, the lowest number elsewhere; None: no padding."""
    if bool(attention_mask.all()):
        return None
    mask = torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device)
    return mask.masked_fill_(attention_mask == 0, torch.finfo(dtype).min)[:, None, None, :]


def _make_room(weights: StackWeights, state: DecoderState) -> None:
    """Doubles the number of steps for which there is room; learned positions may end before that."""
    steps = max(FIRST_CAPACITY, 2 * state.steps)
    table = getattr(weights.embed_positions, "num_embeddings", steps)
    steps = max(min(steps, table), state.steps + 1)  # past the table, embed_positions says what is wrong
    device = state.layers[0].source.device
    positions = weights.embed_positions(torch.arange(steps, device=device), steps)
    state.positions = positions.to(state.layers[0].source.dtype)
    filled, places = state.steps * state.beams, steps * state.beams
    for cache in state.layers:
        batch, heads, _, size = cache.past.shape
        past = cache.past.new_empty(batch, heads, places, size)
        past[:, :, :filled] = cache.past[:, :, :filled]
        cache.past = past
    if state.ancestry is not None:
        # A step's own place is open to each beam, the places of its sisters are not.
        own = torch.eye(state.beams, dtype=state.ancestry.dtype, device=device)
        own = (1 - own) * torch.finfo(own.dtype).min
        ancestry = own.repeat(1, steps).expand(state.ancestry.shape[0], 1, -1, -1).contiguous()
        ancestry[..., :filled] = state.ancestry[..., :filled]
        state.ancestry = ancestry


def _attend(query: torch.Tensor, keys_values: torch.Tensor, mask: torch.Tensor | None, d_k: int) -> torch.Tensor:
    """Equation 1 for queries that are scaled already: [B, H, T, d_k], [B, H, S, d_k + d_v] -> [B, T, H x d_v]."""
    keys, values = keys_values[..., :d_k], keys_values[..., d_k:]
    if query.shape[2] == 1 and mask is None and keys.shape[2] > 8 and query.device.type == "cpu":
        # One query for each head: two batched products take half the time of the fused kernel.
        context = (query @ keys.transpose(2, 3)).softmax(-1) @ values
    else:
        context = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)
    return context.transpose(1, 2).flatten(2)


def _feed_forward(hidden: torch.Tensor, layer, weights: StackWeights, before: bool) -> torch.Tensor:
    """Equation 2, with its residual connection and layer norm."""
    asked = _norm(hidden, layer.final_norm, weights) if before else hidden
    hidden = hidden + F.linear(layer.activation(F.linear(asked, *layer.fc1)), *layer.fc2)
    return hidden if before else _norm(hidden, layer.final_norm, weights)


def _norm(states: torch.Tensor, norm: Affine, weights: StackWeights) -> torch.Tensor:
    return torch.layer_norm(states, norm[0].shape, *norm, weights.epsilon)  # what F.layer_norm calls in the end
