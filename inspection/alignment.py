"""Word alignment from cross-attention: which source word each output word came from.

Links are pairs (source word, output word), counted from 0, written in Pharaoh format: "0-0 1-2 2-1" a sentence a line.

A head may attend to a word's source when the decoder is about to write the word, or one step later, when it reads it.
Which head aligns, and at which step, differs from model to model: in deep models lower layers at the reading step do
best (Chen et al. 2020, arXiv:2004.14837). Without knowledge of the model the mean of the last layer but one at the
writing step is a fair choice (Garg et al. 2019, arXiv:1909.02074); with gold alignments of a few sentences the best
head is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from metaphrase.configuration.errors import MetaphraseError

from .attend import Attention
from .words import merge_words

When = Literal["reading", "writing"]


class Link(NamedTuple):
    """A source word and an output word that belong together, counted from 0."""

    source: int
    target: int


@dataclass(frozen=True)
class Gold:
    """Links of one sentence that people drew: sure ones, and those that are possible (the sure ones included)."""

    sure: frozenset[Link]
    possible: frozenset[Link]


@dataclass(frozen=True)
class HeadChoice:
    """Where alignments are read from: a layer, a head of it (None: their mean), and the step."""

    layer: int
    head: int | None
    when: When


def default_head(attention: Attention) -> HeadChoice:
    """The mean of the last layer but one, of the last where there are fewer than four, at the step that writes."""
    layers = attention.maps.cross.shape[0]
    return HeadChoice(layers - 2 if layers > 3 else layers - 1, None, "writing")


def word_weights(attention: Attention, choice: HeadChoice) -> Tensor:
    """Cross-attention [output words, source words], special tokens left out, rows no longer summing to 1.

    "writing" takes the row that writes a piece, "reading" the next row, in which the piece is the decoder's input. The
    last piece of an output cut off without an end token has no next row and keeps its own.
    """
    weights = attention.maps.cross[choice.layer]
    weights = weights.mean(0) if choice.head is None else weights[choice.head]
    targets = [(row, piece.word) for row, piece in enumerate(attention.written.pieces) if piece.word is not None]
    sources = [(col, piece.word) for col, piece in enumerate(attention.source.pieces) if piece.word is not None]
    if not targets or not sources:
        return weights.new_zeros(len(attention.written.words), len(attention.source.words))
    last = weights.shape[0] - 1
    rows = [min(row + (choice.when == "reading"), last) for row, _ in targets]
    cols = [col for col, _ in sources]
    return merge_words(weights[rows][:, cols], [word for _, word in targets], [word for _, word in sources])


def align(attention: Attention, choice: HeadChoice | None = None, *, threshold: float | None = None) -> list[Link]:
    """Links of one sentence, sorted: each output word with the source word it attends to most.

    Args:
        choice: which head; `default_head` if unset.
        threshold: link every pair with at least this weight instead, so that a word may have several links or none.
    """
    weights = word_weights(attention, choice or default_head(attention))
    if weights.numel() == 0:
        return []
    if threshold is None:
        return sorted(Link(int(source), target) for target, source in enumerate(weights.argmax(-1)))
    return sorted(Link(source, target) for target, source in (weights >= threshold).nonzero().tolist())


def pharaoh(links: Iterable[Link]) -> str:
    """Links in Pharaoh format: `0-0 1-2`."""
    return " ".join(f"{link.source}-{link.target}" for link in sorted(links))


def read_gold(path: str | Path, *, one_based: bool = False) -> list[Gold]:
    """Gold alignments, a sentence a line: `1-2` is a sure link, `1p2` or `1?2` a possible one.

    Raises:
        MetaphraseError: if a line holds anything else; it names file, line and text.
    """
    gold = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        sure, possible = set(), set()
        for text in line.split():
            found = re.fullmatch(r"(\d+)([-p?])(\d+)", text)
            if not found or (one_based and "0" in (found[1], found[3])):
                raise MetaphraseError(
                    f"{path}, line {number}: {text!r} is no link; write `source-target`, as in 0-0, or `0p1` for a"
                    f" possible one, counted from {int(one_based)}."
                )
            link = Link(int(found[1]) - one_based, int(found[3]) - one_based)
            possible.add(link)
            if found[2] == "-":
                sure.add(link)
        gold.append(Gold(frozenset(sure), frozenset(possible)))
    return gold[:-1] if gold and not gold[-1].possible else gold  # what stands after the last line end


def alignment_error_rate(links: Sequence[Iterable[Link]], gold: Sequence[Gold]) -> float:
    """AER = 1 - (|A and S| + |A and P|) / (|A| + |S|) over all sentences (Och and Ney 2003); 0 is perfect.

    Raises:
        MetaphraseError: if the numbers of sentences differ, or there is no link at all.
    """
    if len(links) != len(gold):
        raise MetaphraseError(
            f"{len(links)} sentences are aligned and {len(gold)} have gold links; they must be as many."
        )
    hits = total = 0
    for found, wanted in zip(map(frozenset, links), gold, strict=True):
        hits += len(found & wanted.sure) + len(found & wanted.possible)
        total += len(found) + len(wanted.sure)
    if total == 0:
        raise MetaphraseError("Neither the alignments nor the gold file has any link, so there is no error rate.")
    return 1 - hits / total


def choose_head(attentions: Sequence[Attention], gold: Sequence[Gold]) -> tuple[HeadChoice, float]:
    """The head (or the mean of a layer) and step with the lowest alignment error rate, and that rate."""
    if not attentions:
        raise MetaphraseError("There are no sentences to choose a head by; give at least one with gold links.")
    layers, heads = attentions[0].maps.cross.shape[:2]
    steps: tuple[When, ...] = ("reading", "writing")
    choices = [HeadChoice(i, head, when) for i in range(layers) for head in (None, *range(heads)) for when in steps]
    rates = [alignment_error_rate([align(one, choice) for one in attentions], gold) for choice in choices]
    best = min(range(len(choices)), key=rates.__getitem__)
    return choices[best], rates[best]
