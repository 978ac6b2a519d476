"""Texts longer than a model reads, cut where it hurts least, so that the translations can be put together again.

A cut is made at a line break if that is enough, else after a sentence, a clause, a word, and only then inside a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

CLOSING = "\"'”’»)]」』"
CUTS = (
    re.compile(r"\s*\n\s*"),
    re.compile(
        rf"(?<=[.!?…])\s+|(?<=[.!?…][{re.escape(CLOSING)}])\s+"
        rf"|(?<=[。！？])(?![{re.escape(CLOSING)}])|(?<=[。！？][{re.escape(CLOSING)}])"
    ),
    re.compile(r"(?<=[,;:–—])\s+|(?<=[、，；：])"),
    re.compile(r"\s+"),
)
"""Where a text may be cut, the best places first. What a pattern matches stands between the two pieces."""
LINES, SENTENCES, CLAUSES, WORDS = range(4)


@dataclass(frozen=True)
class Piece:
    """A part of a text, and the white space that follows it there."""

    text: str
    gap: str


def split_text(text: str, fits: Callable[[str], bool]) -> list[Piece]:
    """The text in pieces that fit; "".join(piece.text + piece.gap …) is the text.

    A text that fits stays whole. Lines and sentences become a piece each; clauses and words are put together up to
    what fits.

    Args:
        fits: whether the model can read a piece.

    Raises:
        ValueError: not even one character fits.
    """
    return list(_split(text, "", fits, LINES))


def _split(text: str, gap: str, fits: Callable[[str], bool], level: int) -> Iterator[Piece]:
    if fits(text):
        yield Piece(text, gap)
        return
    if level > WORDS:
        yield from _cut_anywhere(text, gap, fits)
        return
    parts = list(_parts(text, gap, level))
    if level >= CLAUSES:
        parts = _packed(parts, fits)
    for part in parts:
        yield from _split(part.text, part.gap, fits, level + 1)


def _parts(text: str, gap: str, level: int) -> Iterator[Piece]:
    start = 0
    for cut in CUTS[level].finditer(text):
        if cut.end() == len(text) or cut.start() == start == 0:
            continue  # white space around the text is no cut
        if level == SENTENCES and not _ends_sentence(text, cut):
            continue
        yield Piece(text[start : cut.start()], cut.group())
        start = cut.end()
    yield Piece(text[start:], gap)


def _ends_sentence(text: str, cut: re.Match[str]) -> bool:
    """A stop before a small letter, or after a single letter or digit (`z. B.`, `J. S. Bach`), ends no sentence."""
    if text[cut.end()].islower():
        return False
    before = text[: cut.start()].rstrip(CLOSING)
    return re.search(r"(^|[\s.(])\w\.$", before) is None


def _packed(parts: list[Piece], fits: Callable[[str], bool]) -> list[Piece]:
    """Neighbours put together as long as they fit."""
    packed = [parts[0]]
    for part in parts[1:]:
        joined = Piece(packed[-1].text + packed[-1].gap + part.text, part.gap)
        if fits(joined.text):
            packed[-1] = joined
        else:
            packed.append(part)
    return packed


def _cut_anywhere(text: str, gap: str, fits: Callable[[str], bool]) -> Iterator[Piece]:
    while not fits(text):
        size = len(text) // 2
        while size > 0 and not fits(text[:size]):
            size //= 2
        if size == 0:
            raise ValueError("the limit is too small for a single character of the text")
        yield Piece(text[:size], "")
        text = text[size:]
    yield Piece(text, gap)
