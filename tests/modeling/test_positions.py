"""Positions: the formula, padding on either side, and what happens at the end of a learned table."""

from __future__ import annotations

import math

import pytest
import torch

from metaphrase.modeling.embeddings import count_positions, sinusoidal_positions

from .tiny import ids, lengths_mask, tiny_model, worst

LEARNED = {"position_embedding_type": "learned", "max_position_embeddings": 8}


@pytest.mark.parametrize("d_model", [1, 2, 3, 4, 15, 512])
def test_sinusoids_equal_the_formula(d_model):
    positions = [0, 1, 2, 3, 50, 999, 5000]
    table = sinusoidal_positions(torch.tensor(positions), d_model)
    assert table.shape == (len(positions), d_model) and table.dtype == torch.float32
    for position, row in zip(positions, table.tolist(), strict=True):
        for i, value in enumerate(row):
            angle = position / 10000 ** (2 * (i // 2) / d_model)
            exact = math.sin(angle) if i % 2 == 0 else math.cos(angle)
            assert value == pytest.approx(exact, abs=1e-6 + 3e-7 * position)


def test_POS_META_values():
    table = sinusoidal_positions(torch.arange(4), 4)
    expected = [[0, 1, 0, 1], [0.841471, 0.540302, 0.01, 0.99995]]
    assert worst(table[:2], torch.tensor(expected)) < 1e-5
    assert worst(table[3], torch.tensor([0.14112, -0.989992, 0.029996, 0.99955])) < 1e-5


def test_positions_are_counted_over_real_tokens():
    device = torch.device("cpu")
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert count_positions(mask, 5, 0, device).tolist() == [[0, 1, 2, 2, 2], [0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert count_positions(mask, 2, 3, device).tolist() == [[2, 2], [1, 2], [3, 4]]
    assert count_positions(None, 2, 3, device).tolist() == [[3, 4]]
    for dtype in (torch.bool, torch.float32, torch.bfloat16):
        assert torch.equal(count_positions(mask.to(dtype), 5, 0, device), count_positions(mask, 5, 0, device))


@pytest.mark.parametrize("kind", [{}, LEARNED], ids=["sinusoidal", "learned"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_POS_LEFT(kind, backend):
    """A left-padded target prompt and a left-padded source: same logits, and the same next ids."""
    model = tiny_model(**(kind and {**LEARNED, "max_position_embeddings": 32}))
    model.set_attn_implementation(backend)
    source = ids([5, 8])
    shifted = torch.full((2, 8), 0)
    shifted[0, 3:], shifted[1] = source[0, :5], source[1]
    source_mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    prompts = torch.tensor([[0, 0, 1, 7, 8], [1, 4, 5, 6, 7]])
    prompt_mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    padded = {
        "input_ids": shifted,
        "attention_mask": source_mask,
        "decoder_input_ids": prompts,
        "decoder_attention_mask": prompt_mask,
    }
    plain = {"input_ids": source[:1, :5], "decoder_input_ids": prompts[:1, 2:]}
    with torch.no_grad():
        assert worst(model(**padded).logits[0, 2:], model(**plain).logits[0]) < 1e-5
    lengths = {"max_new_tokens": 4, "min_new_tokens": 4, "no_repeat_ngram_size": 1}
    for how in (
        {},
        {"num_beams": 3},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
    ):
        together, alone = model.generate(**padded, **lengths, **how), model.generate(**plain, **lengths, **how)
        assert together[0, -4:].tolist() == alone[0, -4:].tolist()
        assert len(set(alone[0, -4:].tolist())) == 4


def test_POS_LONG_learned():
    """8 is the limit: 8 works, 9 is an error that names both, and the model works on after it."""
    model = tiny_model(**LEARNED)
    eight, nine = ids([8]), ids([9])
    before = model(input_ids=eight, decoder_input_ids=eight).logits
    for inputs in (
        {"input_ids": nine, "decoder_input_ids": eight},
        {"input_ids": eight, "decoder_input_ids": nine},
    ):
        with pytest.raises(ValueError, match=r"9 tokens.*max_position_embeddings 8"):
            model(**inputs)
    assert torch.equal(model(input_ids=eight, decoder_input_ids=eight).logits, before)


@pytest.mark.parametrize(
    "cache", [{}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}]
)
def test_POS_LONG_generation_ends_where_the_table_ends(cache, caplog):
    """The last token is never read, so that 8 positions give 8 new tokens after the start."""
    model = tiny_model(**LEARNED)
    model.generation_config.eos_token_id = None
    eight = ids([8])
    assert model.generate(eight, **cache).shape == (1, 9)
    assert model.generate(eight, max_new_tokens=8, **cache).shape == (1, 9)
    assert model.generate(eight, max_new_tokens=5, **cache).shape == (1, 6)
    assert model.generate(eight, max_new_tokens=20, **cache).shape == (1, 9)
    assert model.generate(eight, max_length=20, num_beams=2, **cache).shape == (1, 9)
    prompt = torch.tensor([[1, 5, 6, 7, 8, 9, 10, 11]])
    assert model.generate(eight, decoder_input_ids=prompt, max_new_tokens=20, **cache).shape == (1, 9)
    with pytest.raises(ValueError):
        model.generate(eight, decoder_input_ids=ids([9]), max_new_tokens=2, **cache)
    model(input_ids=eight, decoder_input_ids=eight)


def test_POS_LONG_sinusoidal_has_no_end():
    """Past `max_position_embeddings` the values are the formula's, and a long source's first tokens do not care."""
    model = tiny_model(max_position_embeddings=8)
    long = ids([30])
    states = model.model.encoder.place(torch.zeros(1, 30, 24), torch.arange(30).unsqueeze(0))
    assert torch.equal(states[0], sinusoidal_positions(torch.arange(30), 24))
    assert model(input_ids=long, decoder_input_ids=long).logits.shape == (1, 30, 40)
    model.generation_config.eos_token_id = None
    assert model.generate(ids([4]), max_new_tokens=20).shape == (1, 21)


@pytest.mark.parametrize("kind", [{}, LEARNED], ids=["sinusoidal", "learned"])
def test_given_positions_are_used(kind):
    model = tiny_model(**kind)
    inputs = {"input_ids": ids([4]), "decoder_input_ids": ids([5])}
    counted = model(**inputs).logits
    assert worst(model(**inputs, decoder_position_ids=torch.arange(5).unsqueeze(0)).logits, counted) == 0
    assert worst(model(**inputs, decoder_position_ids=torch.arange(1, 6).unsqueeze(0)).logits, counted) > 1e-2


def test_positions_are_added_in_float32_precision_at_any_length():
    """In bfloat16 only the sum is rounded, not the position on the way to it."""
    model = tiny_model().to(torch.bfloat16)
    positions = torch.tensor([[0, 257, 999]])
    placed = model.model.encoder.place(torch.zeros(1, 3, 24, dtype=torch.bfloat16), positions)
    assert worst(placed[0], sinusoidal_positions(positions[0], 24).to(torch.bfloat16)) == 0


def test_mask_lengths_helper():
    assert lengths_mask([3, 1]).tolist() == [[1, 1, 1], [1, 0, 0]]
