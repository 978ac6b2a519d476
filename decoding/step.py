"""The fast encoder pass and the fast decoder step: plain calls of torch on fused weights, no modules, no hooks.

Their slow twin is the model's own forward; tests compare them.

B sources · K beams of a source · S source positions · n places filled · H heads · d_k, d_v head sizes

The cache of a layer is [B·H, n, d_k + d_v]: each step appends one place for each beam. Beams are never moved about in
it: a beam that goes on from another one is told by `ancestry`, [B, 1, K, n], which places are its own past:

    2 beams, 3 steps          step 1   step 2   step 3         0 = may be attended to
    beam 1                     0  x     0  x     0  x          x = the lowest number, which softmax makes 0
    beam 2, a child of 1       0  x     0  x     x  0

A place that is nobody's past any more (`x` for all) is taken out whenever the cache gets more room. Beams of a source
soon have most of their past in common, so few places are left: about one a step, and not K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from metaphrase.decoding.weights import Affine, LayerWeights, ModelWeights, StackWeights

FIRST_ROOM = 16
"""Steps for which one beam's cache has room at first; it doubles when it is full."""
ROOM_FOR_BEAMS = 8
"""Steps after which the cache of several beams gets rid of dead places, and gets room for as many again."""
FEW_HEADS = 32
"""Up to so many heads in a batch, the fused kernel is faster for several queries a head than two batched products."""


@dataclass(slots=True)
class LayerCache:
    """What one decoder layer remembers."""

    past: torch.Tensor
    """Keys and values of the targets, [B·H, capacity, d_k + d_v]."""
    source: torch.Tensor
    """Keys and values of the sources, [B·H, S, d_k + d_v]: once a source, however many beams ask it."""


@dataclass(slots=True)
class DecoderState:
    """Everything that a decoder remembers of a batch between two steps."""

    layers: list[LayerCache]
    source_mask: torch.Tensor | None
    """[B, 1, 1, S], added to scores; None where nothing is padding."""
    ancestry: torch.Tensor | None
    """[B, 1, K, capacity], added to scores; None for one beam."""
    positions: torch.Tensor
    """Position vectors of the first steps, [steps, d_model]."""
    beams: int
    heads: int
    steps: int = 0
    filled: int = 0
    """Places of the cache that are in use."""
    capacity: int = 0
    watch_source: bool = False
    """Whether the last layer's attention over the source is kept, for a coverage penalty."""
    attention: torch.Tensor | None = None
    """Where it is: the last step's, averaged over heads, [B, K, S]."""


def encode(weights: StackWeights, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The encoder's output, [B, S] -> [B, S, d_model]."""
    batch, length = input_ids.shape
    position_ids = torch.arange(length, device=input_ids.device)
    if bool((attention_mask.diff(dim=1) > 0).any()):  # padding that is not on the right shifts positions
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)
    positions = weights.embed_positions(position_ids, length)
    embeds = F.embedding(input_ids, weights.embedding)
    hidden = (embeds * weights.embed_scale + positions.to(embeds)).flatten(0, 1)
    mask = additive_mask(attention_mask, hidden.dtype)
    before = weights.last_norm is not None
    d_k = weights.d_k
    for layer in weights.layers:
        asked = _norm(hidden, layer.norm, weights) if before else hidden
        mixed = _linear(asked, layer.qkv).view(batch, length, weights.heads, -1).transpose(1, 2)
        query, keys, values = mixed[..., :d_k], mixed[..., d_k : 2 * d_k], mixed[..., 2 * d_k :]
        context = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)
        hidden = _linear(context.transpose(1, 2).reshape(batch * length, -1), layer.out).add_(hidden)
        hidden = hidden if before else _norm(hidden, layer.norm, weights)
        hidden = _feed_forward(hidden, layer, weights, before)
    hidden = _norm(hidden, weights.last_norm, weights) if before else hidden
    return hidden.view(batch, length, -1)


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
    decoder, (batch, length, _) = weights.decoder, encoded.shape
    rows, size = batch * decoder.heads, decoder.d_k + decoder.d_v
    layers = []
    for layer in decoder.layers:
        source = _linear(encoded.flatten(0, 1), layer.cross_kv).view(batch, length, decoder.heads, size)
        layers.append(LayerCache(encoded.new_empty(rows, 0, size), source.transpose(1, 2).reshape(rows, length, size)))
    mask = additive_mask(attention_mask, encoded.dtype)
    ancestry = encoded.new_empty(batch, 1, beams, 0) if beams > 1 else None
    return DecoderState(layers, mask, ancestry, encoded.new_empty(0), beams, decoder.heads, watch_source=watch_source)


def decode_step(weights: StackWeights, state: DecoderState, tokens: torch.Tensor) -> torch.Tensor:
    """Feeds each beam its next token, [B, K] -> last hidden states [B x K, d_model].

    On the first step, when all beams of a source are the same, `tokens` may be [B, 1], and so is the result.
    """
    if state.filled == state.capacity:
        _make_room(state)
    if state.steps == state.positions.shape[0]:
        _place_further(weights, state)
    beams, heads, d_k = tokens.shape[1], weights.heads, weights.d_k
    first = state.filled
    end = first + state.beams
    ancestry = None if state.ancestry is None else state.ancestry[:, :, :beams, :end]
    hidden = F.embedding(tokens.reshape(-1), weights.embedding)
    hidden = torch.add(state.positions[state.steps], hidden, alpha=weights.embed_scale)
    before = weights.last_norm is not None
    for layer, cache in zip(weights.layers, state.layers, strict=True):
        asked = _norm(hidden, layer.norm, weights) if before else hidden
        mixed = _linear(asked, layer.qkv).view(-1, beams, heads, 2 * d_k + weights.d_v).transpose(1, 2)
        cache.past.view(-1, heads, state.capacity, d_k + weights.d_v)[:, :, first:end] = mixed[..., d_k:]
        context = _attend(mixed[..., :d_k], cache.past[:, :end], ancestry)
        hidden = _linear(context, layer.out).add_(hidden)
        hidden = hidden if before else _norm(hidden, layer.norm, weights)
        asked = _norm(hidden, layer.cross_norm, weights) if before else hidden
        query = _linear(asked, layer.cross_query).view(-1, beams, heads, d_k).transpose(1, 2)
        context = _attend(query, cache.source, state.source_mask)
        hidden = _linear(context, layer.cross_out).add_(hidden)
        hidden = hidden if before else _norm(hidden, layer.cross_norm, weights)
        hidden = _feed_forward(hidden, layer, weights, before)
    if state.watch_source:
        scores = query @ cache.source[..., :d_k].unflatten(0, (-1, heads)).transpose(2, 3)
        state.attention = (scores if state.source_mask is None else scores + state.source_mask).softmax(-1).mean(1)
    state.steps += 1
    state.filled = end
    return _norm(hidden, weights.last_norm, weights) if before else hidden


def follow(state: DecoderState, parents: torch.Tensor) -> None:
    """Says from which beam each beam goes on.

    Args:
        parents: rows of the batch flattened to B x K, [B x K].
    """
    if state.ancestry is None:
        return
    ancestry = state.ancestry.flatten(0, 2)
    ancestry[:, : state.filled] = ancestry[:, : state.filled].index_select(0, parents)


def keep(state: DecoderState, rows: torch.Tensor) -> None:
    """Drops all sources but those in `rows`, [fewer than B]."""
    for cache in state.layers:
        for name in ("past", "source"):
            by_source = getattr(cache, name).unflatten(0, (-1, state.heads))
            setattr(cache, name, by_source.index_select(0, rows).flatten(0, 1))
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


def _make_room(state: DecoderState) -> None:
    """Room for further steps. Of several beams, only the places stay that are still somebody's past."""
    if state.ancestry is None:
        state.capacity = max(FIRST_ROOM, 2 * state.filled)
        for cache in state.layers:
            cache.past = _with_room(cache.past, state.capacity)
        return
    if state.filled:
        _drop_dead_places(state)
    state.capacity = state.filled + ROOM_FOR_BEAMS * state.beams
    for cache in state.layers:
        cache.past = _with_room(cache.past, state.capacity)
    # A step's own place is open to each beam, the places of its sisters are not.
    own = torch.eye(state.beams, dtype=state.ancestry.dtype, device=state.ancestry.device)
    own = ((1 - own) * torch.finfo(own.dtype).min).repeat(1, ROOM_FOR_BEAMS)
    own = own.expand(state.ancestry.shape[0], 1, -1, -1)
    state.ancestry = torch.cat([state.ancestry[..., : state.filled], own], dim=-1)


def _drop_dead_places(state: DecoderState) -> None:
    """Moves each source's living places to the front, in their order. Sources with fewer keep some dead ones."""
    alive = (state.ancestry[..., : state.filled] == 0).any(2).squeeze(1)
    most = int(alive.sum(1).max())
    chosen = alive.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    state.ancestry = state.ancestry.gather(3, chosen[:, None, None].expand(-1, -1, state.beams, -1))
    rows = chosen.repeat_interleave(state.heads, 0)
    rows = rows + torch.arange(len(rows), device=rows.device)[:, None] * state.capacity
    for cache in state.layers:
        cache.past = cache.past.flatten(0, 1).index_select(0, rows.view(-1)).view(*rows.shape, -1)
    state.filled = most


def _with_room(past: torch.Tensor, capacity: int) -> torch.Tensor:
    longer = past.new_empty(past.shape[0], capacity, past.shape[2])
    longer[:, : past.shape[1]] = past
    return longer


def _place_further(weights: StackWeights, state: DecoderState) -> None:
    """Position vectors for twice as many steps; learned positions may end before that."""
    steps = max(FIRST_ROOM, 2 * state.steps)
    table = getattr(weights.embed_positions, "num_embeddings", steps)
    steps = max(min(steps, table), state.steps + 1)  # past the table, embed_positions says what is wrong
    source = state.layers[0].source
    state.positions = weights.embed_positions(torch.arange(steps, device=source.device), steps).to(source.dtype)


def _attend(query: torch.Tensor, keys_values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Equation 1 for queries that are scaled already.

    Args:
        query: [B, H, K, d_k].
        keys_values: [B·H, n, d_k + d_v].
        mask: [B, 1, K or 1, n], added to the scores.

    Returns:
        [B x K, H x d_v].
    """
    batch, heads, beams, d_k = query.shape
    keys, values = keys_values[..., :d_k], keys_values[..., d_k:]
    if beams > 1 and batch * heads <= FEW_HEADS:
        keys, values = keys.unflatten(0, (batch, heads)), values.unflatten(0, (batch, heads))
        context = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)
        return context.transpose(1, 2).reshape(batch * beams, -1)
    scores = torch.bmm(query.reshape(batch * heads, beams, d_k), keys.transpose(1, 2))
    if mask is not None:
        scores.view(batch, heads, beams, -1).add_(mask)
    context = torch.bmm(scores.softmax(-1), values)
    if beams == 1:
        return context.view(batch, -1)
    return context.view(batch, heads, beams, -1).transpose(1, 2).reshape(batch * beams, -1)


def _feed_forward(hidden: torch.Tensor, layer: LayerWeights, weights: StackWeights, before: bool) -> torch.Tensor:
    """Equation 2, with its residual connection and layer norm."""
    asked = _norm(hidden, layer.final_norm, weights) if before else hidden
    hidden = _linear(layer.activation(_linear(asked, layer.fc1)), layer.fc2).add_(hidden)
    return hidden if before else _norm(hidden, layer.final_norm, weights)


def _linear(states: torch.Tensor, affine: Affine) -> torch.Tensor:
    """[N, in] -> [N, out]"""
    return torch.addmm(affine[0], states, affine[1])


def _norm(states: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor], weights: StackWeights) -> torch.Tensor:
    return torch.layer_norm(states, norm[0].shape, *norm, weights.epsilon)  # what F.layer_norm calls in the end
