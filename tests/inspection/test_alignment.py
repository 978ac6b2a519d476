"""Alignments, their format and their error rate, on weights whose right answer is plain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.inspection.alignment import (
    Gold,
    HeadChoice,
    Link,
    align,
    alignment_error_rate,
    choose_head,
    default_head,
    pharaoh,
    read_gold,
    word_weights,
)
from metaphrase.inspection.attend import Attention, attend
from metaphrase.inspection.maps import AttentionMaps
from metaphrase.inspection.words import Piece, Pieces


def pieces(words: list[list[str]], *, start: bool = False, end: bool = True) -> Pieces:
    """Words given as lists of pieces."""
    body = [
        Piece(10, (" " if word and not part else "") + text, False, word)
        for word, parts in enumerate(words)
        for part, text in enumerate(parts)
    ]
    first, last = Piece(1, "<s>", True, None), Piece(2, "</s>", True, None)
    return Pieces(tuple([first] * start + body + [last] * end), " ".join("".join(parts) for parts in words))


def crossing() -> Attention:
    """ "a bc d" -> "D A BC": head 0 of layer 1 attends, when it READS a word, to that word's source; head 1 when it
    WRITES it; layer 0 looks at the end token."""
    source, written = pieces([["a"], ["b", "c"], ["d"]]), pieces([["D"], ["A"], ["B", "C"]])
    read = pieces([["D"], ["A"], ["B", "C"]], start=True, end=False)
    cross = torch.zeros(2, 2, 5, 5)
    cross[0, :, :, 4] = 1
    right = {0: 3, 1: 0, 2: 1, 3: 2}  # row that writes a piece -> its source piece
    for row, col in right.items():
        cross[1, 1, row, col] = 1
        cross[1, 0, row + 1, col] = 1
    cross[1, 1, 4, 4] = cross[1, 0, 0, 4] = 1
    maps = AttentionMaps(source.ids, read.ids, written.ids, torch.zeros(0), torch.zeros(0), cross)
    return Attention("crossing", source, read, written, maps)


RIGHT = [Link(0, 1), Link(1, 2), Link(2, 0)]


def test_a_head_gives_its_links():
    assert align(crossing(), HeadChoice(1, 0, "reading")) == RIGHT
    assert align(crossing(), HeadChoice(1, 1, "writing")) == RIGHT
    assert align(crossing(), HeadChoice(1, 0, "writing")) != RIGHT
    assert pharaoh(RIGHT) == "0-1 1-2 2-0"


def test_special_tokens_are_never_linked():
    weights = word_weights(crossing(), HeadChoice(0, None, "reading"))
    assert weights.shape == (3, 3) and weights.max() == 0


def test_a_threshold_gives_several_links_or_none():
    assert align(crossing(), HeadChoice(1, None, "reading"), threshold=0.8) == []
    assert Link(0, 1) in align(crossing(), HeadChoice(1, None, "reading"), threshold=0.4)


def test_the_best_head_is_found():
    gold = [Gold(frozenset(RIGHT), frozenset(RIGHT))]
    choice, rate = choose_head([crossing()], gold)
    assert rate == 0
    assert align(crossing(), choice) == RIGHT
    assert choice.layer == 1


def test_the_default_is_the_last_layer_but_one_of_deep_models():
    shallow = crossing()
    assert default_head(shallow) == HeadChoice(1, None, "writing")
    deep = replace(shallow, maps=replace(shallow.maps, cross=torch.zeros(6, 2, 5, 5)))
    assert default_head(deep) == HeadChoice(4, None, "writing")


def test_error_rate_by_hand():
    """A = {0-0, 1-1, 2-2}, S = {0-0}, P = {0-0, 1-1}: 1 - (1 + 2) / (3 + 1)."""
    gold = [Gold(frozenset([Link(0, 0)]), frozenset([Link(0, 0), Link(1, 1)]))]
    assert alignment_error_rate([[Link(0, 0), Link(1, 1), Link(2, 2)]], gold) == pytest.approx(0.25)
    assert alignment_error_rate([[Link(0, 0)]], gold) == 0


def test_gold_files(tmp_path):
    path = tmp_path / "gold.txt"
    path.write_text("0-0 1p2\n\n2?1\n")
    assert read_gold(path) == [
        Gold(frozenset([Link(0, 0)]), frozenset([Link(0, 0), Link(1, 2)])),
        Gold(frozenset(), frozenset()),
        Gold(frozenset(), frozenset([Link(2, 1)])),
    ]
    path.write_text("1-1 2-3\n")
    assert read_gold(path, one_based=True)[0].sure == {Link(0, 0), Link(1, 2)}


@pytest.mark.parametrize(("text", "match"), [("0-0\n1:2\n", "line 2.*'1:2'"), ("0-\n", "line 1.*'0-'")])
def test_bad_gold_names_file_and_line(tmp_path, text, match):
    path = tmp_path / "gold.txt"
    path.write_text(text)
    with pytest.raises(MetaphraseError, match=match):
        read_gold(path)


def test_other_mistakes():
    with pytest.raises(MetaphraseError, match=r"1 sentences.*2"):
        alignment_error_rate([[]], [Gold(frozenset(), frozenset())] * 2)
    with pytest.raises(MetaphraseError, match="no error rate"):
        alignment_error_rate([[]], [Gold(frozenset(), frozenset())])


def test_every_output_word_of_a_real_model_has_one_link(model, word_tokenizer):
    attention = attend(model, word_tokenizer, "The animal was tired .", target="Das Tier war müde .")
    links = align(attention)
    assert [link.target for link in sorted(links, key=lambda link: link.target)] == [0, 1, 2, 3, 4]
    assert all(0 <= link.source < 5 for link in links)
