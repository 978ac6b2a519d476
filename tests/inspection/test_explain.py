"""The explanation's numbers are the model's: made again from their parts they agree, and they end in its own output."""

from __future__ import annotations

import math

import pytest
import torch

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.inspection.explain import explain, find_token
from metaphrase.inspection.modules import attention_modules, projections

SOURCE = "The animal didn't cross the street because it was too tired ."
TARGET = "Das Tier überquerte die Straße nicht , weil es zu müde war ."


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("layer", [0, 1])
def test_each_step_follows_from_the_one_before(model, word_tokenizer, kind, layer):
    told = explain(model, word_tokenizer, SOURCE, 7, layer, 1, kind=kind, target=TARGET)
    a = told.arrays
    near = {"atol": 1e-5, "rtol": 1e-5}
    assert torch.allclose(a["xq"] @ a["Wq"] + a["bq"], a["q"], **near)
    assert torch.allclose(a["xk"] @ a["Wk"] + a["bk"], a["k"], **near)
    assert torch.allclose(a["xk"] @ a["Wv"] + a["bv"], a["v"], **near)
    assert torch.allclose(a["scores"] * told.scaling, a["scaled"], **near)
    if model.config.model_type != "t5":
        assert told.scaling == pytest.approx(1 / math.sqrt(a["q"].shape[1]))
    logits = a["scaled"] + a.get("bias", torch.zeros(1))
    again = logits.masked_fill(a["visible"] == 0, -torch.inf).softmax(-1)
    assert torch.allclose(again, a["weights"], **near)
    assert torch.allclose(a["weights"] @ a["v"], a["z"], **near)
    assert torch.equal(a["heads"][:, a["z"].shape[1] :][:, : a["z"].shape[1]], a["z"])  # head 2 of 2
    assert torch.allclose(a["heads"] @ a["Wo"] + a["bo"], a["out"], **near)
    assert a["weights"].sum() == pytest.approx(1, abs=1e-5)
    assert int(a["visible"].sum()) == (8 if kind == "decoder" else a["visible"].shape[1])
    assert told.attention.maps.of(kind)[layer, 1, 7].tolist() == a["weights"][0].tolist()


def test_the_end_is_the_modules_own_output(ours, word_tokenizer):
    """Not one number of the last row passes through our code: it is what the attention module returned."""
    seen = []
    module = attention_modules(ours)["encoder"][1]
    handle = module.register_forward_hook(lambda _, args, output: seen.append(output[0][0, 7]))
    told = explain(ours, word_tokenizer, SOURCE, "it", 1, 0, target=TARGET)
    handle.remove()
    assert torch.allclose(told.arrays["out"][0], seen[-1], atol=1e-6)
    assert told.token == 7


def test_the_first_layer_starts_from_embedding_and_position(ours, word_tokenizer):
    arrays = explain(ours, word_tokenizer, SOURCE, "it", 0, 0, target=TARGET).arrays
    assert torch.allclose(arrays["token"] + arrays["position"], arrays["xq"], atol=1e-5)
    embedding = ours.model.shared.weight[word_tokenizer.convert_tokens_to_ids("it")] * 4  # sqrt(16)
    assert torch.allclose(arrays["token"][0], embedding, atol=1e-5)
    assert "token" not in explain(ours, word_tokenizer, SOURCE, "it", 1, 0, target=TARGET).arrays


def test_a_large_output_matrix_is_cut_and_says_so(ours, word_tokenizer, monkeypatch):
    monkeypatch.setattr("metaphrase.inspection.explain.WHOLE", 10)
    told = explain(ours, word_tokenizer, SOURCE, "it", 0, 0, target=TARGET)
    assert told.arrays["Wo"].shape == (16, 16)
    monkeypatch.setattr("metaphrase.inspection.explain.COLUMNS", 3)
    told = explain(ours, word_tokenizer, SOURCE, "it", 0, 0, target=TARGET)
    assert told.arrays["Wo"].shape == (16, 3) and told.arrays["out"].shape == (1, 3)


def test_outline_places_every_array(ours, word_tokenizer):
    told = explain(ours, word_tokenizer, SOURCE, "it", 0, 0, target=TARGET)
    outline, numbers = told.outline(), told.numbers()
    for name, array in told.arrays.items():
        place = outline["places"][name]
        found = numbers[place["offset"] : place["offset"] + array.numel()].reshape(place["shape"])
        assert found.tolist() == array.tolist()
    assert outline["reads"] == "it" and outline["writes"] is None
    told = explain(ours, word_tokenizer, SOURCE, "Tier", 0, 0, kind="cross", target=TARGET)
    assert (told.outline()["reads"], told.outline()["writes"]) == ("Das", "Tier")


def test_no_hook_stays(ours, word_tokenizer):
    def hooks() -> int:
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in ours.modules())

    explain(ours, word_tokenizer, SOURCE, "it", 0, 0, target=TARGET)  # the library keeps hooks of its own from here on
    before = hooks()
    explain(ours, word_tokenizer, SOURCE, "Tier", 1, 0, kind="cross", target=TARGET)
    with pytest.raises(MetaphraseError):
        explain(ours, word_tokenizer, SOURCE, "zebra", 0, 0, target=TARGET)
    assert hooks() == before
    assert not projections(attention_modules(ours)["encoder"][0]).query._forward_hooks


def test_mistakes_are_told(ours, word_tokenizer):
    with pytest.raises(MetaphraseError, match="no layer 3"):
        explain(ours, word_tokenizer, SOURCE, "it", 2, 0)
    with pytest.raises(MetaphraseError, match="no head 3"):
        explain(ours, word_tokenizer, SOURCE, "it", 0, 2)
    with pytest.raises(MetaphraseError, match=r"No asking token reads 'zebra'.*animal"):
        explain(ours, word_tokenizer, SOURCE, "zebra", 0, 0, target=TARGET)
    with pytest.raises(MetaphraseError, match="no token 99"):
        explain(ours, word_tokenizer, SOURCE, 99, 0, 0, target=TARGET)
    with pytest.raises(MetaphraseError, match="'sideways'"):
        explain(ours, word_tokenizer, SOURCE, "it", 0, 0, kind="sideways")


def test_a_word_of_several_pieces_is_found_by_its_word(ours, byte_tokenizer):
    from metaphrase.inspection.words import read_pieces

    class Sides:
        def sides(self, kind):
            pieces = read_pieces(byte_tokenizer, byte_tokenizer("a cab")["input_ids"])
            return pieces, pieces

    assert find_token(Sides(), "encoder", "cab") == 2
