"""Every row of Table 3: what it is, how many parameters it has by formula, and that it computes and learns."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.presets import PRESETS, SMALL, TABLE_3
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

_spec = importlib.util.spec_from_file_location("make_table3", Path(__file__).parents[2] / "docs" / "make_table3.py")
make_table3 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_table3)

# What the paper's table prints in each row beyond the base model (N, d_model, d_ff, h, d_k, d_v, P_drop, epsilon_ls).
BASE = (6, 512, 2048, 8, 64, 64, 0.1, 0.1)
ROWS = {
    "base": {},
    "A-h1": {3: 1, 4: 512, 5: 512},
    "A-h4": {3: 4, 4: 128, 5: 128},
    "A-h16": {3: 16, 4: 32, 5: 32},
    "A-h32": {3: 32, 4: 16, 5: 16},
    "B-dk16": {4: 16},
    "B-dk32": {4: 32},
    "C-N2": {0: 2},
    "C-N4": {0: 4},
    "C-N8": {0: 8},
    "C-d256": {1: 256, 4: 32, 5: 32},
    "C-d1024": {1: 1024, 4: 128, 5: 128},
    "C-ff1024": {2: 1024},
    "C-ff4096": {2: 4096},
    "D-drop0.0": {6: 0.0},
    "D-drop0.2": {6: 0.2},
    "D-ls0.0": {7: 0.0},
    "D-ls0.2": {7: 0.2},
    "E-learned": {},
    "big": {1: 1024, 2: 4096, 3: 16, 6: 0.3},
}
# Worked out by hand: 6 x (encoder's 3,152,384 + decoder's 4,204,032) + 37,000 x 512, and
# 6 x (12,596,224 + 16,796,672) + 37,000 x 1,024
COUNTS = {"base": 63_082_496, "big": 214_245_376}


def test_every_row_is_there():
    assert set(TABLE_3) == set(ROWS) == set(make_table3.PAPER)
    assert not set(TABLE_3) & set(SMALL)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_the_paper_says(name):
    config = MetaphraseConfig.from_preset(name)
    expected = [ROWS[name].get(column, value) for column, value in enumerate(BASE)]
    for stack in ("encoder", "decoder"):
        heads = getattr(config, f"{stack}_attention_heads")
        layers, inner = getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_ffn_dim")
        sizes = [layers, config.d_model, inner, heads, *config.head_dims(heads)]
        assert [*sizes, config.dropout, config.label_smoothing] == expected
    assert config.position_embedding_type == ("learned" if name == "E-learned" else "sinusoidal")
    assert (config.normalize_before, config.activation_function, config.scale_embedding) == (False, "relu", True)
    assert config.share_encoder_decoder_embeddings and config.tie_word_embeddings


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_by_formula(name):
    config = MetaphraseConfig.from_preset(name)
    with torch.device("meta"):
        model = MetaphraseForConditionalGeneration(config)
    formula = make_table3.parameters(config)
    assert model.num_parameters() == sum(p.numel() for p in model.parameters()) == formula
    assert formula == COUNTS.get(name, formula)
    paper = make_table3.PAPER.get(name, (None,))[0]
    assert paper is None or abs(formula / 1e6 / paper - 1) < 0.07


@pytest.mark.parametrize(
    "others",
    [
        {"normalize_before": True},
        {"tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False},
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
        {"position_embedding_type": "learned", "max_position_embeddings": 77},
        {"encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2},
        {"qk_head_dim": 5, "v_head_dim": 9},
    ],
    ids=str,
)
def test_formulas_off_the_beaten_track(others):
    sizes = {"vocab_size": 60, "d_model": 24, "encoder_attention_heads": 3, "decoder_attention_heads": 6}
    config = MetaphraseConfig(**{**sizes, "encoder_ffn_dim": 20, "decoder_ffn_dim": 28, "encoder_layers": 2, **others})
    model = MetaphraseForConditionalGeneration(config).eval()
    assert sum(p.numel() for p in model.parameters()) == make_table3.parameters(config)
    model.set_attn_implementation("eager")
    source, target = torch.full((1, 11), 5), torch.full((1, 7), 6)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=source, decoder_input_ids=target)
    assert counter.get_total_flops() == make_table3.forward_flops(config, 11, 7)


def test_the_page_is_up_to_date():
    assert make_table3.TARGET.read_text(encoding="utf-8") == make_table3.page(), "run: python docs/make_table3.py"


@pytest.mark.parametrize(
    "name",  # the (D) rows have base's sizes
    [pytest.param(name, marks=pytest.mark.slow) if name.startswith("D-") else name for name in PRESETS],
)
def test_forward_and_backward(name):
    """At a vocabulary of 64, and in bfloat16 for the wide ones: a finite loss near ln 64, a gradient everywhere."""
    config = MetaphraseConfig.from_preset(name, vocab_size=64, max_position_embeddings=16)
    with torch.device("meta"):
        model = MetaphraseForConditionalGeneration(config)
    model = model.to(torch.bfloat16 if config.d_model == 1024 else torch.float32).to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.fill_(1)
            else:
                parameter.uniform_(-0.03, 0.03)
    model.train()
    inputs = {"input_ids": torch.tensor([[5, 6, 2], [7, 2, 0]]), "labels": torch.tensor([[8, 9, 2], [10, 2, -100]])}
    loss = model(**inputs, attention_mask=inputs["input_ids"].ne(0)).loss
    loss.backward()
    assert 2.0 < loss.item() < 7.0
    for parameter_name, parameter in model.named_parameters():
        if "positions" not in parameter_name:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
            # softmax does not see what is added to all scores alike
            assert parameter_name.endswith("k_proj.bias") or parameter.grad.any(), parameter_name


def test_unknown_names():
    with pytest.raises(ValueError, match=r"no preset 'bsae' \(did you mean 'base'\?\).*big"):
        MetaphraseConfig.from_preset("bsae")
    with pytest.raises(ValueError, match=r"no field 'encoder_layer' \(did you mean 'encoder_layers'\?\)"):
        MetaphraseConfig.from_preset("base", encoder_layer=2)
    assert MetaphraseConfig.from_preset("base", encoder_layers=2, vocab_size=100).encoder_layers == 2
