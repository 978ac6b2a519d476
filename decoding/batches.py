"""Sources of similar length side by side: little padding, and outputs that end at about the same step."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

NO_INK = {"Cc", "Cf", "Zl", "Zp", "Zs"}
"""Unicode categories that leave no ink: controls, zero-width and directional marks, separators and spaces."""


def is_blank(text: str) -> bool:
    """True where `text` holds no visible character: '', spaces, a lone U+200B."""
    return all(unicodedata.category(character) in NO_INK for character in text)


def length_sorted_batches(lengths: Sequence[int], tokens: int, copies: int = 1) -> list[list[int]]:
    """Indices of all items, longest first, cut where `rows x copies x longest` would pass `tokens`.

    The longest come first, so that memory that does not suffice shows at once. An item longer than `tokens` stands
    alone.

    Args:
        lengths: length of each item, in tokens.
        tokens: size that a batch may have, padding counted.
        copies: rows that an item takes: beams, or samples.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if room == 0:
            batches.append([])
            room = max(1, tokens // max(1, lengths[index] * copies))
        batches[-1].append(index)
        room -= 1
    return batches
