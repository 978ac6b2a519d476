"""EXP-CT2: the engine gives the model's own greedy ids, and what it cannot express is named."""

from __future__ import annotations

import copy

import pytest
import torch

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.errors import MetaphraseError
from metaphrase.conversion.to_ctranslate2 import convert, make_spec, refuse_inexpressible, save
from metaphrase.decoding.ctranslate2_engine import converted
from metaphrase.decoding.engines import make_engine
from metaphrase.decoding.options import SearchOptions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

from ..decoding.conftest import make_model, make_sources, make_tokenizer

ctranslate2 = pytest.importorskip("ctranslate2", reason="the engine is an extra: pip install ctranslate2")

SHAPES = {
    "post-norm relu": {},
    "pre-norm gelu": {"normalize_before": True, "activation_function": "gelu"},
    "untied, learned": {
        "tie_word_embeddings": False,
        "share_encoder_decoder_embeddings": False,
        "position_embedding_type": "learned",
        "max_position_embeddings": 80,
        "scale_embedding": False,
    },
    "unlike stacks": {"encoder_layers": 1, "decoder_attention_heads": 2, "activation_function": "silu"},
}


def make(**fields) -> MetaphraseForConditionalGeneration:
    """Untaught: for what does not depend on outputs."""
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return MetaphraseForConditionalGeneration(MetaphraseConfig(**{"vocab_size": 43, **sizes, **heads, **fields})).eval()


def sources_of(count: int = 20) -> list[list[int]]:
    ids, mask = make_sources(count, seed=1)
    return [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_ids_are_the_models(shape):
    model, sources = make_model(0, layer_norm_eps=1e-3, **SHAPES[shape]), sources_of()
    options = SearchOptions(num_beams=1, max_length=25)
    prompts = [[1]] * len(sources)
    ours = [best[0].tokens for best in make_engine("fast", [model], options)(sources, prompts)]
    theirs = [best[0].tokens for best in make_engine("ctranslate2", [model], options)(sources, prompts)]
    assert theirs == ours
    assert len({tuple(output) for output in ours}) > 10


@pytest.mark.parametrize("num_beams", [2, 5])
def test_beam_ids_are_those_of_stopping_early(num_beams):
    """And not of the library's rule: on some source the two differ, so the comparison can fail."""
    model, sources, prompts = make_model(3, layer_norm_eps=1e-3), sources_of(200), [[1]] * 200

    def ids(engine: str, **more) -> list[list[int]]:
        options = SearchOptions(num_beams=num_beams, max_length=40, **more)
        return [best[0].tokens for best in make_engine(engine, [model], options)(sources, prompts)]

    theirs = ids("ctranslate2")
    assert theirs == ids("ctranslate2", early_stopping=True) == ids("fast", early_stopping=True)
    assert theirs != ids("fast")


def test_a_model_is_converted_once_for_its_weights():
    model = copy.deepcopy(make())
    first = converted(model, "float32")
    assert converted(model, "float32") is first and converted(model, "int8") is not first
    source = [[str(token) for token in sources_of(1)[0]]]
    before = first.score_batch(source, [["5", "6"]])[0].log_probs
    with torch.no_grad():
        model.model.shared.weight.mul_(3)
    second = converted(model, "float32")
    assert second is not first and second.score_batch(source, [["5", "6"]])[0].log_probs != before


@pytest.mark.parametrize("quantization", ["int8", "float16"])
def test_small_weights_give_almost_the_same(quantization):
    model, sources = make_model(0, layer_norm_eps=1e-3), sources_of()
    options = SearchOptions(num_beams=1, max_length=2)
    prompts = [[1]] * len(sources)
    ours = [best[0].tokens for best in make_engine("fast", [model], options)(sources, prompts)]
    theirs = [best[0].tokens for best in make_engine(f"ctranslate2-{quantization}", [model], options)(sources, prompts)]
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 15


def test_the_folder_keeps_vocabulary_and_special_tokens(tmp_path):
    from transformers import AutoTokenizer

    model = make()  # three more than the tokenizer has
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    folder = convert(tmp_path / "model", tmp_path / "engine")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    translator = ctranslate2.Translator(str(folder), intra_threads=1)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("w5 w9 w7")["input_ids"])
    assert pieces == ["w5", "w9", "w7", "</s>"]  # the end of the source, once
    found = translator.translate_batch([pieces], beam_size=1, max_decoding_length=12)[0].hypotheses[0]
    inputs = tokenizer(["w5 w9 w7"], return_tensors="pt")
    slow = model.generate(**inputs, num_beams=1, max_new_tokens=12)[0, 1:].tolist()
    names = [f"<unused {token}>" if token > 39 else tokenizer.convert_ids_to_tokens(token) for token in slow]
    assert found == [name for name in names if name != "</s>"]
    with pytest.raises(MetaphraseError, match="in use"):
        convert(tmp_path / "model", folder)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"activation_function": "mish"}, "activation_function 'mish'"),
        ({"qk_head_dim": 16}, "qk_head_dim 16"),
        ({"v_head_dim": 4}, "v_head_dim 4"),
        ({"eos_token_id": [2, 3]}, "eos_token_id"),
    ],
)
def test_what_the_engine_lacks_is_named(fields, word):
    with pytest.raises(MetaphraseError, match=word):
        refuse_inexpressible(make(**fields))


def test_generation_settings_that_would_be_lost_are_named(tmp_path):
    model = copy.deepcopy(make())
    model.generation_config.forced_bos_token_id = 9
    with pytest.raises(MetaphraseError, match="forced_bos_token_id 9"):
        save(model, [str(i) for i in range(43)], tmp_path)
    with pytest.raises(MetaphraseError, match="quantization is 'int4'"):
        save(make(), [str(i) for i in range(43)], tmp_path, "int4")


@pytest.mark.parametrize("option", [{"length_norm": "gnmt"}, {"coverage_penalty": 0.2}, {"early_stopping": "never"}])
def test_search_options_that_the_engine_lacks_are_named(option):
    with pytest.raises(MetaphraseError, match=next(iter(option))):
        make_engine("ctranslate2", [make()], SearchOptions(**option))


@pytest.mark.parametrize("quantization", ["float32", "float16", "int8"])
def test_the_model_stays_as_it_was(tmp_path, quantization):
    model = make()
    before = copy.deepcopy(model.state_dict())
    save(model, [str(i) for i in range(43)], tmp_path, quantization)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_description_is_complete():
    make_spec(make()).encoder.validate()
