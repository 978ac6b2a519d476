"""Pieces, words, and weights between words."""

from __future__ import annotations

import pytest
import torch

from metaphrase.inspection.words import merge_words, read_pieces


def read(tokenizer, text):
    return read_pieces(tokenizer, tokenizer(text)["input_ids"])


def test_words_of_whole_word_tokens(word_tokenizer):
    pieces = read(word_tokenizer, "The animal was tired .")
    assert pieces.text == "The animal was tired ."
    assert [piece.word for piece in pieces.pieces] == [0, 1, 2, 3, 4, None]
    assert pieces.pieces[-1].special and pieces.pieces[-1].text == "</s>"
    assert pieces.units() == (["The", "animal", "was", "tired", ".", "</s>"], [0, 1, 2, 3, 4, 5])


def test_an_unknown_word_is_a_word(word_tokenizer):
    pieces = read(word_tokenizer, "The zebra was")
    assert [piece.word for piece in pieces.pieces] == [0, 1, 2, None]
    assert not pieces.pieces[1].special


@pytest.mark.parametrize(
    "text",
    [
        "the the",
        "naïve café",
        "a 😀 b",
        "שלום עולם",
        "مرحبا",
        "👩‍👩‍👧",
        "  two  spaces ",
        "<script>",
        "</script> &amp;",
        "a\u2028b",
    ],
)
def test_every_character_and_word_is_found_again(byte_tokenizer, text):
    pieces = read(byte_tokenizer, text)
    assert pieces.text == text
    body = [piece for piece in pieces.pieces if not piece.special]
    assert {piece.word for piece in body if piece.word is not None} == set(range(len(text.split())))
    labels, groups = pieces.units()
    assert labels == [*text.split(), "</s>"]
    assert groups == sorted(groups)
    assert all("\ufffd" not in piece.text for piece in body)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters", "units"])
def test_our_own_tokenizers(kind):
    from metaphrase.configuration.options import TokenizerOptions
    from metaphrase.training.data.tokenizer import train_tokenizer

    texts = ["the lower newer wider street", "a lowest new wide animal"] * 20
    tokenizer = train_tokenizer(texts, TokenizerOptions(kind=kind, vocab_size=300))
    for text in ("the widest street", "a <s> lower", "new 😀 animal"):
        pieces = read(tokenizer, text)
        labels, groups = pieces.units()
        assert labels == [*pieces.text.split(), "</s>"]
        assert pieces.text.split() == text.split() or (kind == "units" and "<unk>" in pieces.text)
        assert len(groups) == len(pieces)


def test_bytes_of_one_character_all_show_it(byte_tokenizer):
    pieces = read(byte_tokenizer, "a 😀")
    assert [piece.text for piece in pieces.pieces[-5:-1]] == ["😀"] * 4
    assert {piece.word for piece in pieces.pieces[-5:-1]} == {1}


def test_merging_adds_the_asked_and_averages_the_asking():
    weights = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.5, 0.5, 0.0]])
    merged = merge_words(weights, [0, 0, 1], [0, 1, 1])
    assert torch.allclose(merged, torch.tensor([[0.2, 0.8], [0.5, 0.5]]))
    assert torch.allclose(merged.sum(-1), torch.ones(2))


def test_merging_keeps_leading_axes():
    weights = torch.rand(2, 3, 4, 5).softmax(-1)
    merged = merge_words(weights, [0, 1, 1, 2], [0, 0, 1, 2, 2])
    assert merged.shape == (2, 3, 3, 3)
    assert torch.allclose(merged.sum(-1), torch.ones(2, 3, 3))
