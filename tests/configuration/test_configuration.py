"""A configuration keeps what it is given, and refuses what cannot be by field, value and what would be right."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import AutoConfig, PreTrainedConfig

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

WRONG = [
    ({"vocab_size": 0}, ["vocab_size", "0", "above 0"]),
    ({"vocab_size": "40"}, ["vocab_size", "'40'", "whole number"]),
    ({"d_model": 10, "encoder_attention_heads": 3}, ["d_model 10", "encoder_attention_heads 3", "divisible"]),
    (
        {"d_model": 10, "encoder_attention_heads": 5, "decoder_attention_heads": 4},
        ["d_model 10", "decoder_attention_heads 4"],
    ),
    ({"d_model": 10, "encoder_attention_heads": 3, "qk_head_dim": 4}, ["d_model 10", "qk_head_dim and v_head_dim"]),
    ({"d_model": 512.0}, ["d_model", "512.0", "whole number"]),
    ({"d_model": True}, ["d_model", "True"]),
    ({"d_model": -8}, ["d_model", "-8"]),
    ({"hidden_size": 0}, ["d_model", "0"]),
    ({"encoder_layers": 0}, ["encoder_layers", "0"]),
    ({"decoder_layers": -1}, ["decoder_layers", "-1"]),
    ({"encoder_attention_heads": 0}, ["encoder_attention_heads", "0"]),
    ({"decoder_ffn_dim": 2.5}, ["decoder_ffn_dim", "2.5"]),
    ({"max_position_embeddings": 0}, ["max_position_embeddings", "0"]),
    ({"qk_head_dim": 0}, ["qk_head_dim", "0", "None"]),
    ({"v_head_dim": "8"}, ["v_head_dim", "'8'"]),
    ({"dropout": 1.0}, ["dropout", "1.0", "not including 1"]),
    ({"dropout": -0.1}, ["dropout", "-0.1"]),
    ({"dropout": float("nan")}, ["dropout", "nan"]),
    ({"dropout": None}, ["dropout", "None"]),
    ({"attention_dropout": 2}, ["attention_dropout", "2"]),
    ({"activation_dropout": "0.1"}, ["activation_dropout", "'0.1'"]),
    ({"label_smoothing": 1.1}, ["label_smoothing", "1.1"]),
    ({"init_std": 0}, ["init_std", "0", "above 0"]),
    ({"layer_norm_eps": -1e-5}, ["layer_norm_eps", "-1e-05"]),
    ({"position_embedding_type": "rotary"}, ["position_embedding_type", "'rotary'", "sinusoidal or learned"]),
    ({"normalize_before": "yes"}, ["normalize_before", "'yes'", "True or False"]),
    ({"scale_embedding": 1}, ["scale_embedding", "1", "True or False"]),
    ({"tie_word_embeddings": None}, ["tie_word_embeddings", "None"]),
    ({"share_encoder_decoder_embeddings": 0}, ["share_encoder_decoder_embeddings", "0"]),
    ({"vocab_size": 40, "pad_token_id": 40}, ["pad_token_id", "40", "below vocab_size 40"]),
    ({"vocab_size": 40, "eos_token_id": [2, 41]}, ["eos_token_id", "41", "below vocab_size 40"]),
    ({"bos_token_id": -1}, ["bos_token_id", "-1"]),
    ({"decoder_start_token_id": 37000}, ["decoder_start_token_id", "37000"]),
    ({"decoder_start_token_id": None}, ["decoder_start_token_id", "None", "bos_token_id 1"]),
    ({"d_modle": 64}, ["d_modle", "d_model"]),
    ({"attention_droput": 0.1}, ["attention_droput", "attention_dropout"]),
]


@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[str(fields) for fields, _ in WRONG])
def test_a_wrong_value_is_named(fields, said):
    with pytest.raises(ValueError) as caught:
        MetaphraseConfig(**fields)
    message = str(caught.value)
    assert all(words in message for words in said), message
    assert type(caught.value) is ValueError and "\n" not in message and message.endswith((".", "?"))


def test_an_unknown_activation_is_named_when_the_model_is_built():
    config = MetaphraseConfig(vocab_size=8, d_model=8, activation_function="rellu")
    with pytest.raises(ValueError, match=r"activation_function is 'rellu'.*relu"):
        MetaphraseForConditionalGeneration(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"d_model": 10, "encoder_attention_heads": 3, "decoder_attention_heads": 4, "qk_head_dim": 2, "v_head_dim": 3},
        {"d_model": 15, "encoder_attention_heads": 5, "decoder_attention_heads": 3},
        {"dropout": 0, "label_smoothing": 0.999},
        {"eos_token_id": [2, 5]},
        {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None},
        {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3},
    ],
    ids=str,
)
def test_unusual_but_right(fields):
    config = MetaphraseConfig(**fields)
    for name, value in fields.items():
        assert getattr(config, name) == value


def test_every_field_survives_a_file(tmp_path):
    """Each field at another value than its default."""
    others = {
        "vocab_size": 99, "d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 3, "encoder_ffn_dim": 7, "decoder_ffn_dim": 9, "qk_head_dim": 5, "v_head_dim": 3,
        "dropout": 0.2, "attention_dropout": 0.01, "activation_dropout": 0.02, "activation_function": "gelu",
        "normalize_before": True, "position_embedding_type": "learned", "max_position_embeddings": 77,
        "scale_embedding": False, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False,
        "label_smoothing": 0.3, "init_std": 0.5, "layer_norm_eps": 1e-6, "pad_token_id": 5, "bos_token_id": 6,
        "eos_token_id": [7, 8], "decoder_start_token_id": 9,
    }  # fmt: skip
    assert list(others) == MetaphraseConfig.field_names()
    assert all(value != getattr(MetaphraseConfig(), name) for name, value in others.items())
    config = MetaphraseConfig(**others)
    config.save_pretrained(tmp_path)
    for again in (
        MetaphraseConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        MetaphraseConfig.from_dict(json.loads((tmp_path / "config.json").read_text())),
        copy.deepcopy(config),
    ):
        assert type(again) is MetaphraseConfig
        assert {name: getattr(again, name) for name in others} == others
        assert again.to_json_string() == config.to_json_string()
    changed = MetaphraseConfig.from_pretrained(tmp_path, dropout=0.4, d_model=48)
    assert (changed.dropout, changed.d_model, changed.vocab_size) == (0.4, 48, 99)


def test_the_file_names_the_code_for_every_auto_class(tmp_path):
    MetaphraseConfig().save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert set(stored["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"}
    assert stored["model_type"] == "metaphrase"


def test_generation_settings_do_not_get_into_the_configuration(tmp_path):
    config = MetaphraseConfig(num_beams=4, length_penalty=0.6)
    config.save_pretrained(tmp_path)
    assert not {"num_beams", "length_penalty"} & set(json.loads((tmp_path / "config.json").read_text()))


def test_what_a_file_has_beyond_our_fields_is_kept(tmp_path):
    """A later version's field, or what somebody put there, however like a field of ours it looks."""
    config = MetaphraseConfig(rotary_base=10000, sep_token_id=9)
    config.layer_norm_epsilon = 0.5
    config.save_pretrained(tmp_path)
    again = MetaphraseConfig.from_pretrained(tmp_path)
    assert (again.rotary_base, again.sep_token_id, again.layer_norm_epsilon) == (10000, 9, 0.5)


def test_it_is_what_caches_ask_for():
    config = MetaphraseConfig(encoder_layers=2, decoder_layers=5, encoder_attention_heads=4, decoder_attention_heads=2)
    assert isinstance(config, PreTrainedConfig) and config.is_encoder_decoder
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (512, 2, 4)
    assert config.get_text_config(decoder=True).num_hidden_layers == 5
