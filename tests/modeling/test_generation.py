"""Generation: where it starts, where it ends, and the attention it gives away."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

from .tiny import batch, ids, lengths_mask, tiny_config, tiny_model, worst

BACKENDS = ["eager", "sdpa"]


def endless(**overrides):
    """A model that never says `</s>`."""
    model = tiny_model(**overrides)
    model.generation_config.eos_token_id = None
    return model


# GEN-START


@pytest.mark.parametrize("start", [1, 7])
def test_GEN_START(start, tmp_path):
    """The first id is the one that training starts with; a forced one comes second, also after a reload."""
    model = tiny_model(decoder_start_token_id=start)
    assert model.can_generate()
    source, labels = ids([5, 3]), ids([4, 2])
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    generated = model.generate(source, max_new_tokens=4)
    assert generated[:, 0].eq(start).all() and shifted[:, 0].eq(start).all()
    model.generation_config.forced_bos_token_id = 9
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert (stored["decoder_start_token_id"], stored["forced_bos_token_id"]) == (start, 9)
    assert "forced_bos_token_id" not in json.loads((tmp_path / "config.json").read_text())
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generate(source, max_new_tokens=4)
    assert again[:, 0].eq(start).all() and again[:, 1].eq(9).all()


def test_GEN_START_without_a_start_is_refused():
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        tiny_config(decoder_start_token_id=None)


def test_special_ids_reach_the_generation_settings():
    model = tiny_model(pad_token_id=3, bos_token_id=4, eos_token_id=5, decoder_start_token_id=6)
    settings = model.generation_config
    assert (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id) == (3, 4, 5)
    assert settings.decoder_start_token_id == 6


# GEN-LEN


@pytest.mark.parametrize("num_beams", [1, 3])
def test_GEN_LEN(num_beams):
    """Start + 3; 3; and, with no limit, start + source + 50 (section 6.1)."""
    model, source = endless(), ids([15])
    assert model.generate(source, max_new_tokens=3, num_beams=num_beams).shape[1] == 4
    assert model.generate(source, max_length=3, num_beams=num_beams).shape[1] == 3
    assert model.generate(source, num_beams=num_beams).shape[1] == 1 + 15 + 50
    assert model.generate(ids([2]), num_beams=num_beams).shape[1] == 1 + 2 + 50
    own = GenerationConfig(max_new_tokens=5, decoder_start_token_id=1, pad_token_id=0)
    assert model.generate(source, generation_config=own, num_beams=num_beams).shape[1] == 6


def test_GEN_LEN_the_limit_belongs_to_one_call():
    """A limit worked out for one source is not kept for the next."""
    model = endless()
    for length in (4, 9, 1):
        assert model.generate(ids([length])).shape[1] == 1 + length + 50
    assert model.generation_config.max_new_tokens is None and model.generation_config.max_length is None


def test_GEN_LEN_a_saved_limit_holds(tmp_path):
    model = endless()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generate(ids([4])).shape[1] == 8


def test_every_way_of_searching_starts_and_ends():
    model = tiny_model()
    inputs = {"input_ids": ids([5, 3]), "attention_mask": lengths_mask([5, 3])}
    for how in (
        {"do_sample": True, "top_k": 5},
        {"do_sample": True, "num_beams": 2},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.6, "early_stopping": True},
        {"num_beams": 2, "use_cache": False},
    ):
        torch.manual_seed(0)
        output = model.generate(**inputs, max_new_tokens=6, **how)
        assert output[:, 0].eq(1).all() and output.shape[1] <= 7


def test_assisted_generation_gives_the_greedy_ids():
    """A second model, or the source itself, proposes; the cache is cut back where a proposal is refused."""
    model, source = endless(), ids([9])
    expected = model.generate(source, max_new_tokens=8)
    assert torch.equal(model.generate(source, max_new_tokens=8, assistant_model=endless(seed=5)), expected)
    assert torch.equal(model.generate(source, max_new_tokens=8, prompt_lookup_num_tokens=2), expected)


def test_beam_search_finds_more_than_greedy_search():
    """The best of 40 beams over two steps is the best of all 40² continuations."""
    model = endless()
    source = ids([5])
    output = model.generate(
        source, num_beams=40, max_new_tokens=2, length_penalty=0.0, return_dict_in_generate=True, output_scores=True
    )
    first = model(input_ids=source, decoder_input_ids=torch.tensor([[1]])).logits[0, -1].log_softmax(-1)
    pairs = torch.tensor([[1, token] for token in range(40)])
    second = model(input_ids=source.expand(40, -1), decoder_input_ids=pairs).logits[:, -1].log_softmax(-1)
    best = (first.unsqueeze(1) + second).flatten().argmax().item()
    assert output.sequences[0].tolist() == [1, best // 40, best % 40]
    assert output.sequences_scores[0].item() == pytest.approx((first.unsqueeze(1) + second).max().item(), abs=1e-5)


# ATT-SHAPE


def attention_inputs():
    """B 2, S 5 with row 2 padded to 3, T 4."""
    return batch([5, 3], [4, 4])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ATT_SHAPE_forward(backend):
    model = tiny_model(decoder_attention_heads=2, encoder_attention_heads=4)
    model.set_attn_implementation(backend)
    inputs = attention_inputs()
    outputs = model(**inputs, output_attentions=True)
    assert [tuple(a.shape) for a in outputs.encoder_attentions] == [(2, 4, 5, 5)] * 2
    assert [tuple(a.shape) for a in outputs.decoder_attentions] == [(2, 2, 4, 4)] * 3
    assert [tuple(a.shape) for a in outputs.cross_attentions] == [(2, 2, 4, 5)] * 3
    for maps in (outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions):
        for layer in maps:
            assert worst(layer.sum(-1), torch.ones(layer.shape[:-1])) < 1e-5
    for layer in (*outputs.cross_attentions, *outputs.encoder_attentions):
        assert (layer[1, ..., 3:] == 0).all()
    for layer in outputs.decoder_attentions:
        assert (layer.triu(1) == 0).all()
    assert worst(outputs.logits, model(**inputs).logits) < 1e-5
    assert model.config._attn_implementation == backend  # asking for weights leaves no trace


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ATT_SHAPE_generate(backend, how):
    """3 beams, 6 steps: at each step, for each layer, (6, H, 1, S)."""
    model = endless()
    model.set_attn_implementation(backend)
    inputs = attention_inputs()
    output = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        num_beams=3,
        max_new_tokens=6,
        output_attentions=True,
        return_dict_in_generate=True,
        **how,
    )
    assert [len(step) for step in output.cross_attentions] == [3] * 6
    assert {tuple(layer.shape) for step in output.cross_attentions for layer in step} == {(6, 2, 1, 5)}
    assert all((layer[3:, ..., 3:] == 0).all() for step in output.cross_attentions for layer in step)
    widths = [layer[0].shape[-1] for layer in output.decoder_attentions]
    assert widths == ([6] * 6 if how else [1, 2, 3, 4, 5, 6])  # a static cache has its full length from the start
    assert [tuple(layer.shape) for layer in output.encoder_attentions] == [(2, 4, 5, 5)] * 2
    plain = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], num_beams=3, max_new_tokens=6)
    assert torch.equal(output.sequences, plain)


def test_weights_are_those_that_were_used():
    """Context = weights x values, under sdpa as well."""
    model = tiny_model()
    model.set_attn_implementation("sdpa")
    captured = {}
    attention = model.model.decoder.layers[1].encoder_attn
    attention.v_proj.register_forward_hook(lambda _, __, output: captured.update(values=output))
    attention.out_proj.register_forward_pre_hook(lambda _, args: captured.update(context=args[0]))
    weights = model(**attention_inputs(), output_attentions=True).cross_attentions[1]
    values = attention.split_heads(captured["values"])
    assert worst((weights @ values).transpose(1, 2).flatten(2), captured["context"]) < 1e-6


def test_asking_for_weights_while_training_gives_the_same_gradients():
    model = tiny_model().train()
    inputs = attention_inputs()
    grads = []
    for ask in (False, True):
        model.zero_grad()
        model(**inputs, labels=inputs["decoder_input_ids"], output_attentions=ask).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    assert max(worst(first, second) for first, second in zip(*grads, strict=True)) < 1e-5


def test_one_copy_of_the_modeling_files_is_loaded():
    assert not {"modeling", "configuration"} & {Path(name).name for name in sys.modules if "." not in name}
    assert MetaphraseForConditionalGeneration.__module__ == "metaphrase.modeling.modeling_metaphrase"
