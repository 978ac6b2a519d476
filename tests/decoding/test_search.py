"""The fast step against the model's own forward, and the fast search against `generate`."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.custom import fast_search
from metaphrase.decoding.step import decode_step, encode, follow, keep, start
from metaphrase.decoding.weights import read_weights

from .conftest import VOCABULARY, make_model, make_sources

SHAPES = {
    "paper": {},
    "pre-norm": {"normalize_before": True, "activation_function": "gelu", "decoder_attention_heads": 2},
    "untied": {
        "position_embedding_type": "learned",
        "max_position_embeddings": 64,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "qk_head_dim": 8,
        "v_head_dim": 12,
        "scale_embedding": False,
    },
}
SOURCES = 10


@pytest.fixture(scope="module", params=SHAPES)
def model(request):
    return make_model(0, **SHAPES[request.param])


def left_padded(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = mask.argsort(dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


@torch.inference_mode()
def test_encode_equals_the_encoder(model):
    weights = read_weights(model)
    for ids, mask in (make_sources(SOURCES), left_padded(*make_sources(SOURCES))):
        slow = model.model.encoder(ids, mask).last_hidden_state
        assert (encode(weights.encoder, ids, mask) - slow)[mask == 1].abs().max() < 1e-5


@torch.inference_mode()
def test_decode_step_equals_the_decoder(model):
    """Twenty steps (past the first room of the cache) of beams that follow one another, one source dropped."""
    weights, beams = read_weights(model), 3
    ids, mask = make_sources(SOURCES)
    encoded = model.model.encoder(ids, mask).last_hidden_state
    state = start(weights, encoded, mask, beams)
    so_far = torch.full((SOURCES, 1, 1), 1)
    torch.manual_seed(0)
    for step in range(20):
        fast = decode_step(weights.decoder, state, so_far[:, :, -1])
        rows = so_far.shape[1]
        slow = model.model.decoder(
            so_far.flatten(0, 1),
            encoder_hidden_states=encoded.repeat_interleave(rows, 0),
            encoder_attention_mask=mask.repeat_interleave(rows, 0),
        ).last_hidden_state[:, -1]
        assert (fast - slow).abs().max() < 1e-5
        parents = torch.randint(rows, (len(ids), beams))
        follow(state, (parents + torch.arange(len(ids))[:, None] * beams).view(-1))
        so_far = so_far.gather(1, parents[:, :, None].expand(-1, -1, step + 1))
        so_far = torch.cat([so_far, torch.randint(4, VOCABULARY, (len(ids), beams, 1))], dim=2)
        if step == 5:
            stay = torch.tensor([row for row in range(SOURCES) if row != 4])
            keep(state, stay)
            ids, mask, encoded, so_far = ids[stay], mask[stay], encoded[stay], so_far[stay]


def both(model, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = make_sources(SOURCES, seed=settings.pop("data", 1))
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 20, **settings}
    return model.generate(**inputs), model.generate(**inputs, custom_generate=fast_search)


def same(pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return pair[0].shape == pair[1].shape and torch.equal(*pair)


@pytest.mark.parametrize("max_new_tokens", [1, 4, 20])
def test_greedy(model, max_new_tokens):
    assert same(both(model, max_new_tokens=max_new_tokens))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"length_penalty": 2.0},
        {"length_penalty": 0.0, "early_stopping": "never"},
        {"length_penalty": -1.0, "early_stopping": True},
        {"length_penalty": 1.5, "early_stopping": "never", "max_new_tokens": 9},
        {"early_stopping": True, "num_return_sequences": 3},
        {"max_new_tokens": 1},
        {"max_new_tokens": 5, "num_return_sequences": 4},
        {"eos_token_id": [2, 7]},
        {"eos_token_id": None, "max_new_tokens": 8},
        {"pad_token_id": 3},
        {"num_beams": 2},
    ],
    ids=str,
)
def test_beam(model, settings):
    assert same(both(model, **{"num_beams": 4, **settings}))


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 9},
        {"no_repeat_ngram_size": 1},
        {"forced_bos_token_id": 9},
        {"forced_eos_token_id": 2, "max_new_tokens": 4},
        {"repetition_penalty": 3.0},
        {"suppress_tokens": [13, 24, 30]},
        {"encoder_no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_processors(num_beams, settings):
    model = make_model(0)
    plain, _ = both(model, num_beams=num_beams)
    slow, fast = both(model, num_beams=num_beams, **settings)
    assert same((slow, fast))
    assert not same((plain, slow))


class FavourOneWordARow(LogitsProcessor):
    """Depends on a row's place in the batch: finished rows may not leave it."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[torch.arange(len(scores)), 4 + torch.arange(len(scores)) % 30] += 2.0
        return scores


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_processor_that_counts_rows_sees_all_of_them(num_beams):
    processors = LogitsProcessorList([FavourOneWordARow()])
    assert same(both(make_model(0), num_beams=num_beams, logits_processor=processors))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_decoder_prompts(model, num_beams):
    prompts = torch.randint(4, VOCABULARY, (SOURCES, 3), generator=torch.Generator().manual_seed(0))
    assert same(both(model, num_beams=num_beams, decoder_input_ids=prompts))
    padded, mask = prompts.clone(), torch.ones_like(prompts)
    padded[: SOURCES // 2, :2], mask[: SOURCES // 2, :2] = 0, 0
    start = torch.ones(SOURCES, 1, dtype=torch.long)
    padded, mask = torch.cat([padded[:, :2], start, padded[:, 2:]], 1), torch.cat([mask[:, :2], start, mask[:, 2:]], 1)
    padded[SOURCES // 2 :, 0] = 1
    assert same(both(model, num_beams=num_beams, decoder_input_ids=padded, decoder_attention_mask=mask))


def test_scores_of_the_n_best():
    model = make_model(0)
    settings = {"num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True}
    ids, mask = make_sources(SOURCES)
    slow = model.generate(input_ids=ids, attention_mask=mask, output_scores=True, **settings)
    fast = model.generate(input_ids=ids, attention_mask=mask, custom_generate=fast_search, **settings)
    assert torch.equal(slow.sequences, fast.sequences)
    assert (slow.sequences_scores - fast.sequences_scores).abs().max() < 1e-5
    assert fast.sequences_scores.unique().numel() > SOURCES


@pytest.mark.parametrize("num_beams", [1, 4])
def test_batch_mates_change_nothing(model, num_beams):
    ids, mask = make_sources(SOURCES)
    settings = {"num_beams": num_beams, "max_new_tokens": 20, "custom_generate": fast_search}
    together = model.generate(input_ids=ids, attention_mask=mask, **settings)
    for row in range(SOURCES):
        length = int(mask[row].sum())
        alone = model.generate(input_ids=ids[row : row + 1, :length], **settings)[0]
        assert together[row, : len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"max_time": 5.0}, "MaxTimeCriteria"),
        ({"num_beams": 3, "do_sample": True}, "num_beams is 3"),
    ],
    ids=str,
)
def test_what_the_search_does_not_know_is_named(settings, word):
    ids, mask = make_sources(2)
    with pytest.raises(MetaphraseError, match=word):
        make_model(0).generate(input_ids=ids, attention_mask=mask, custom_generate=fast_search, **settings)


def test_a_model_with_other_layers_is_refused():
    model = copy.deepcopy(make_model(0))
    model.model.decoder.layers[0].fc1 = torch.nn.Sequential(model.model.decoder.layers[0].fc1)
    with pytest.raises(MetaphraseError, match=r"fc1 is Sequential"):
        read_weights(model)


@torch.inference_mode()
def test_learned_positions_end_with_a_sentence():
    model = make_model(0, **SHAPES["untied"])
    ids, mask = make_sources(2)
    settings = {"input_ids": ids, "attention_mask": mask, "eos_token_id": None}
    assert model.generate(**settings, max_new_tokens=64, custom_generate=fast_search).shape[1] == 65
