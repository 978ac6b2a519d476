"""Each fast path of the search beside its slow twin."""

from __future__ import annotations

import pytest
import torch

from metaphrase.decoding import scorers, step
from metaphrase.decoding.step import decode_step, follow, start
from metaphrase.decoding.weights import MOST_ROWS_PACKED, read_weights

from .conftest import VOCABULARY, make_sources


@pytest.mark.parametrize("size", [40, 128, 130, 4000, 10_007])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_best_tokens_are_argmax(rows: int, size: int) -> None:
    scores = torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * 5
    scores[:, : size // 3] = -torch.inf
    scores[0, -1] = 100.0  # in the rest that fills no block
    assert torch.equal(scorers.best_tokens(scores), scores.argmax(-1))


@pytest.mark.parametrize("size", [40, 64, 500, 4000, 10_007])
@pytest.mark.parametrize(("beams", "count"), [(1, 2), (1, 10), (5, 10), (12, 24)])
def test_best_continuations_are_those_of_the_whole(beams: int, count: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size + beams)
    log_probs = (torch.randn(3, beams, size, generator=generator) * 5).log_softmax(-1)
    log_probs[:, :, 1 : size // 2] = -torch.inf
    log_probs[0, -1, -1] = 1.0
    scores = -torch.rand(3, beams, generator=generator)
    totals, parents, tokens = scorers.best_continuations(log_probs, scores, count)
    slow, places = (log_probs + scores[:, :, None]).flatten(1).topk(count)
    assert torch.equal(totals, slow)
    assert torch.equal(parents * size + tokens, places)


@pytest.mark.parametrize("rows", [1, 2, MOST_ROWS_PACKED, MOST_ROWS_PACKED + 1])
@torch.inference_mode()
def test_the_packed_projection_is_the_plain_one(model, rows: int) -> None:
    weights = read_weights(model)
    hidden = torch.randn(rows, weights.vocabulary.shape[0])
    assert (weights.project(hidden) - hidden @ weights.vocabulary).abs().max() < 1e-5
    assert (weights.packed is not None) == (2 <= rows <= MOST_ROWS_PACKED and torch.backends.mkldnn.is_available())


@pytest.mark.parametrize("few", [0, 10_000])
@torch.inference_mode()
def test_both_ways_to_attend_are_the_decoders(model, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "FEW_HEADS", few)
    beams = 3
    ids, mask = make_sources(5)
    encoded = model.model.encoder(ids, mask).last_hidden_state
    state = start(read_weights(model), encoded, mask, beams)
    tokens = torch.randint(4, VOCABULARY, (5, beams), generator=torch.Generator().manual_seed(1))
    decode_step(read_weights(model).decoder, state, torch.ones(5, 1, dtype=torch.long))
    follow(state, torch.arange(5).repeat_interleave(beams) * beams)
    fast = decode_step(read_weights(model).decoder, state, tokens)
    slow = model.model.decoder(
        torch.stack([torch.ones_like(tokens), tokens], -1).flatten(0, 1),
        encoder_hidden_states=encoded.repeat_interleave(beams, 0),
        encoder_attention_mask=mask.repeat_interleave(beams, 0),
    ).last_hidden_state[:, -1]
    assert (fast - slow).abs().max() < 1e-5


@torch.inference_mode()
def test_places_that_are_nobodys_past_leave_the_cache(model) -> None:
    """All beams go on from the first one at each step: of 40 steps' 160 places, one a step stays."""
    beams, steps = 4, 40
    weights = read_weights(model)
    ids, mask = make_sources(2)
    encoded = model.model.encoder(ids, mask).last_hidden_state
    state = start(weights, encoded, mask, beams)
    so_far = torch.ones(2, 1, 1, dtype=torch.long)
    for number in range(steps):
        hidden = decode_step(weights.decoder, state, so_far[:, :, -1])
        follow(state, torch.arange(2).repeat_interleave(beams) * beams)
        past = so_far[:, :1].expand(-1, beams, -1)
        so_far = torch.cat([past, torch.full((2, beams, 1), 4 + number % 30) + torch.arange(beams)[:, None]], dim=2)
    assert state.capacity <= steps + (step.ROOM_FOR_BEAMS + 1) * beams
    slow = model.model.decoder(
        so_far[:, 0, :-1], encoder_hidden_states=encoded, encoder_attention_mask=mask
    ).last_hidden_state[:, -1]
    assert (hidden.view(2, beams, -1)[:, 0] - slow).abs().max() < 1e-4
