from __future__ import annotations

import pytest

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.batches import is_blank, length_sorted_batches
from metaphrase.decoding.translate import translate


def test_batches_hold_every_index_once_and_stay_within_their_size():
    lengths = [3, 9, 1, 4, 30, 4, 4, 2]
    batches = length_sorted_batches(lengths, tokens=20, copies=2)
    assert sorted(index for batch in batches for index in batch) == list(range(8))
    assert batches[0] == [4]  # longer than a batch may be: alone
    assert all(len(batch) * 2 * max(lengths[i] for i in batch) <= 20 for batch in batches[1:])
    assert len(batches) < 7


@pytest.mark.parametrize("text", ["", "   ", "\u200b", "\n\t", "\u3000\ufeff"])
def test_blank(text):
    assert is_blank(text) and not is_blank(text + "a")


def test_blank_texts_give_blank_outputs_and_the_others_are_as_alone(model, tokenizer):
    texts = ["w5 w9 w7", "", "   ", "\u200b", "w30"]  # DATA-EMPTY
    outputs = translate(model, tokenizer, texts, num_beams=2)
    assert len(outputs) == 5 and outputs[1:4] == ["", "", ""]
    assert outputs[0] == translate(model, tokenizer, texts[:1], num_beams=2)[0] != ""
    assert outputs[4] == translate(model, tokenizer, texts[4:], num_beams=2)[0] != ""


def test_nothing_to_translate(model, tokenizer):
    assert translate(model, tokenizer, []) == []
    assert translate(model, tokenizer, ["", " "]) == ["", ""]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_order_and_batch_size_change_nothing(model, tokenizer, texts, num_beams):
    alone = [translate(model, tokenizer, [text], num_beams=num_beams)[0] for text in texts]
    assert len(set(alone)) > 6
    for batch_tokens in (1, 60, 4096):
        assert translate(model, tokenizer, texts, num_beams=num_beams, batch_tokens=batch_tokens) == alone
    assert translate(model, tokenizer, texts[::-1], num_beams=num_beams) == alone[::-1]


def test_the_model_keeps_its_mode(model, tokenizer):
    assert not model.training
    translate(model, tokenizer, ["w5"], num_beams=1)
    assert not model.training
    model.train()
    try:
        translate(model, tokenizer, ["w5"], num_beams=1)
        assert model.training
    finally:
        model.eval()


def test_limit(model, tokenizer, texts):
    outputs = translate(model, tokenizer, texts, num_beams=1, max_length=3)
    assert max(len(output.split()) for output in outputs) == 3


def test_a_single_string_is_refused(model, tokenizer):
    with pytest.raises(MetaphraseError, match="list of strings"):
        translate(model, tokenizer, "w5 w6")
