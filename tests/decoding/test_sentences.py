"""Long texts are cut at the best place, and nothing of them is lost."""

from __future__ import annotations

import random

import pytest

from metaphrase.decoding.sentences import split_text

TEXTS = [
    "",
    "One.",
    "One sentence. Another one! A third?  Two spaces before.\n\nA new paragraph, with a clause; and more.",
    ' "Quoted." (In brackets.) Über alles. 3. Oktober 2020, z. B. hier, by J. S. Bach.',
    "これは文です。二つ目です！三つ目、です。",
    "no stops at all only words that go on and on and on",
    "x" * 50,
    "\n\n  \n",
    "Line one\r\nLine two\u2028line three",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("limit", [1, 2, 5, 12, 30, 1000])
def test_the_pieces_are_the_text_and_fit(text: str, limit: int) -> None:
    pieces = split_text(text, lambda piece: len(piece) <= limit)
    assert "".join(piece.text + piece.gap for piece in pieces) == text
    assert all(len(piece.text) <= limit for piece in pieces)
    assert all(piece.gap == "" or piece.gap.isspace() for piece in pieces)


def test_random_texts_come_back() -> None:
    draw = random.Random(3)
    for _ in range(500):
        text = "".join(draw.choice("ab. ,\nA!?。、)\"' 1") for _ in range(draw.randrange(60)))
        limit = draw.randrange(1, 20)
        pieces = split_text(text, lambda piece, limit=limit: len(piece) <= limit)
        assert "".join(piece.text + piece.gap for piece in pieces) == text
        assert all(len(piece.text) <= limit for piece in pieces)


def in_pieces(text: str, limit: int) -> list[str]:
    return [piece.text for piece in split_text(text, lambda piece: len(piece) <= limit)]


def test_cuts_are_made_where_they_hurt_least() -> None:
    text = "First line. Second sentence.\nThe next line is long, it has clauses, three of them."
    assert in_pieces(text, 100) == [text]
    assert in_pieces(text, 60) == text.split("\n")
    assert in_pieces(text, 55) == text.split("\n")
    assert in_pieces(text, 40) == [
        "First line. Second sentence.",
        "The next line is long, it has clauses,",
        "three of them.",
    ]
    assert in_pieces(text, 17)[:3] == ["First line.", "Second sentence.", "The next line is"]


def test_abbreviations_end_no_sentence() -> None:
    assert in_pieces("Das war z. B. so. Am 3. Mai kam J. S. Bach. Er ging.", 26) == [
        "Das war z. B. so.",
        "Am 3. Mai kam J. S. Bach.",
        "Er ging.",
    ]


def test_closing_marks_stay_with_their_sentence() -> None:
    assert in_pieces('He said "Go." Then he left.', 15) == ['He said "Go."', "Then he left."]
    assert in_pieces("「行け。」彼は言った。", 6) == ["「行け。」", "彼は言った。"]


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="too small for a single character"):
        split_text("ab", lambda piece: False)
