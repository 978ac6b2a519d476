"""What is saved is what loads: every value, every tie, every flag; and vocabularies that change size."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSeq2SeqLM

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.embeddings import sinusoidal_positions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration, MetaphraseModel

from .tiny import TYINGS, batch, tiny_model, worst

MATRICES = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")


def matrices(model) -> list[torch.Tensor]:
    return [model.get_submodule(name).weight for name in MATRICES]


def groups(model) -> set[frozenset[str]]:
    """Which of the three matrices are one."""
    by_storage: dict[int, set[str]] = {}
    for name, weight in zip(MATRICES, matrices(model), strict=True):
        by_storage.setdefault(weight.data_ptr(), set()).add(name)
    return {frozenset(names) for names in by_storage.values()}


def expected_groups(share: bool, tie: bool) -> set[frozenset[str]]:
    encoder, decoder, head = MATRICES
    sets = [{encoder}, {decoder}, {head}]
    if share:
        sets = [{encoder, decoder}, {head}]
    if tie:
        sets = [names | {head} if decoder in names else names for names in sets if names != {head}]
    return {frozenset(names) for names in sets}


def step(model, inputs) -> None:
    """One update that moves every parameter."""
    model.train()
    model(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()
    model.eval()


@pytest.mark.parametrize("name", TYINGS)
def test_TIE_SAVE(name, tmp_path):
    share, tie = TYINGS[name]
    model = tiny_model(share_encoder_decoder_embeddings=share, tie_word_embeddings=tie)
    inputs = batch()
    assert groups(model) == expected_groups(share, tie)
    step(model, inputs)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    of_vocabulary = [key for key, tensor in stored.items() if tensor.shape[0] == 40]
    assert len(of_vocabulary) == len(groups(model)), of_vocabulary  # each shared matrix once
    flags = json.loads((tmp_path / "config.json").read_text())
    assert (flags["share_encoder_decoder_embeddings"], flags["tie_word_embeddings"]) == (share, tie)
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    for again in (loaded, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
        assert groups(again) == expected_groups(share, tie)
        assert (again.config.share_encoder_decoder_embeddings, again.config.tie_word_embeddings) == (share, tie)
        assert not any(parameter.is_meta for parameter in again.parameters())
    step(model, inputs)
    step(loaded, inputs)
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert groups(loaded) == expected_groups(share, tie)
    fresh = MetaphraseForConditionalGeneration(MetaphraseConfig.from_pretrained(tmp_path)).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(**inputs).logits, model(**inputs).logits)
    assert groups(fresh) == expected_groups(share, tie)


@pytest.mark.parametrize("name", TYINGS)
def test_TIE_SAVE_base_model(name, tmp_path):
    """The base model's file loads into the base model, and its weights into the whole."""
    share, tie = TYINGS[name]
    model = tiny_model(share_encoder_decoder_embeddings=share, tie_word_embeddings=tie)
    model.model.save_pretrained(tmp_path)
    base, info = MetaphraseModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    inputs = batch()
    assert torch.equal(base(**inputs).last_hidden_state, model.model(**inputs).last_hidden_state)
    assert (base.encoder.embed_tokens.weight is base.decoder.embed_tokens.weight) is share
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(**inputs)[0], base(**inputs)[0])
    whole, info = MetaphraseForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == (set() if tie else {"lm_head.weight"})
    assert torch.equal(whole.model(**inputs)[0], base(**inputs)[0])


@pytest.mark.parametrize("route", ["class", "auto", "base"])
def test_LOAD_REINIT(route, tmp_path):
    """Every value comes back bit by bit; nothing is drawn anew after loading."""
    cls = MetaphraseModel if route == "base" else MetaphraseForConditionalGeneration
    model = cls(tiny_model(position_embedding_type="learned", normalize_before=True).config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "layer_norm.weight" in name
            parameter.fill_(2.0 if norm else 0.25 if name.endswith("bias") else 0.5)
    model.save_pretrained(tmp_path)
    loader = {"class": cls, "auto": AutoModelForSeq2SeqLM, "base": AutoModel}[route]
    loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is cls and not any(info.values())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("tie", [True, False])
def test_POS_META(tie, tmp_path):
    """Positions are computed, so that no loading can lose them: 20 reloads over stale memory."""
    model = tiny_model(d_model=4, tie_word_embeddings=tie)
    model.save_pretrained(tmp_path)
    assert not [key for key in load_file(tmp_path / "model.safetensors") if "positions" in key]
    inputs = batch()
    expected, table = model(**inputs).logits, sinusoidal_positions(torch.arange(9), 4)
    for _ in range(20):
        stale = [torch.full((64, 64), 7.7) for _ in range(32)]
        del stale
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        zeros = torch.zeros(1, 9, 4)
        assert torch.equal(loaded.model.encoder.place(zeros, torch.arange(9).unsqueeze(0))[0], table)
        assert torch.equal(loaded(**inputs).logits, expected)
    half = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(half(**inputs).logits, model.to(torch.bfloat16)(**inputs).logits)


@pytest.mark.parametrize("name", TYINGS)
@pytest.mark.parametrize("size", [47, 33, 48])
def test_resized_vocabulary(name, size, tmp_path):
    """All three matrices take the new size, old rows and ties stay, and the result saves and loads."""
    share, tie = TYINGS[name]
    model = tiny_model(share_encoder_decoder_embeddings=share, tie_word_embeddings=tie)
    before = [weight.detach().clone() for weight in matrices(model)]
    inputs = batch(vocab=33)
    old = model(**inputs).logits.detach()  # a living graph would hold on to the old sizes
    model.resize_token_embeddings(size, pad_to_multiple_of=8 if size == 48 else None)
    assert model.config.vocab_size == size
    kept = min(size, 40)
    for weight, first in zip(matrices(model), before, strict=True):
        assert weight.shape == (size, 24) and torch.equal(weight[:kept], first[:kept])
    assert groups(model) == expected_groups(share, tie)
    new = model(**inputs).logits
    assert new.shape[-1] == size and worst(new[..., :kept], old[..., :kept]) < 1e-5
    model.save_pretrained(tmp_path)
    loaded, info = MetaphraseForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and torch.equal(loaded(**inputs).logits, new)
    step(model, inputs)
    assert model.generate(inputs["input_ids"], max_new_tokens=3).shape[0] == 3


def test_resizing_the_base_model_resizes_both_stacks():
    base = MetaphraseModel(tiny_model(share_encoder_decoder_embeddings=False).config)
    base.decoder.embed_tokens.weight.requires_grad_(False)
    base.resize_token_embeddings(44)
    assert base.encoder.embed_tokens.num_embeddings == base.decoder.embed_tokens.num_embeddings == 44
    assert base.encoder.embed_tokens.weight.requires_grad and not base.decoder.embed_tokens.weight.requires_grad


def test_first_values_follow_the_docstring():
    """Matrices from N(0, init_std), biases 0, layer norms 1 and 0."""
    torch.manual_seed(0)
    model = MetaphraseForConditionalGeneration(
        MetaphraseConfig(
            vocab_size=500,
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            init_std=0.05,
            normalize_before=True,
            position_embedding_type="learned",
        )
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.05) and abs(parameter.mean()) < 0.003, name
        else:
            assert set(parameter.tolist()) == {1.0 if name.endswith("norm.weight") else 0.0}, name
