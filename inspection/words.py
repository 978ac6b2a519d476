"""Token ids as readers see them: the text of each piece, and the words that pieces make up.

A piece is what one token adds to the decoded text. Its text is found by decoding longer and longer prefixes, which
works with every tokenizer (sentencepiece, byte-level, bytes of one character in several tokens). Words are what stands
between white space, as alignment tools count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # what decoders write for bytes that are not a whole character yet


@dataclass(frozen=True)
class Piece:
    """One token: its id, the text it adds, whether it is a special token, and its word (None for special tokens)."""

    id: int
    text: str
    special: bool
    word: int | None


@dataclass(frozen=True)
class Pieces:
    """The pieces of one sequence and its text without special tokens."""

    pieces: tuple[Piece, ...]
    text: str

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def ids(self) -> list[int]:
        """Token ids, in order."""
        return [piece.id for piece in self.pieces]

    @property
    def words(self) -> list[str]:
        """What stands between white space in the text."""
        return self.text.split()

    def units(self) -> tuple[list[str], list[int]]:
        """Words and special tokens in order, and for each piece the index of the unit it belongs to."""
        labels: list[str] = []
        groups: list[int] = []
        words = self.words
        last: int | None = None
        for piece in self.pieces:
            if piece.word is None or piece.word != last:
                labels.append(piece.text if piece.word is None else words[piece.word])
            last = piece.word
            groups.append(len(labels) - 1)
        return labels, groups


def read_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, source: bool = False) -> Pieces:
    """Split a sequence of token ids into pieces.

    `source=True` decodes with the source side of tokenizers that have two (Marian). Special tokens, `<unk>` apart, keep
    their own name and belong to no word.
    """
    unknown = tokenizer.unk_token_id
    special = {i for i in tokenizer.all_special_ids if i != unknown}
    plain = [i for i in ids if i not in special]
    text, spans = _spans(tokenizer, plain, source)
    words = _word_of_character(text)
    found = iter(zip(plain, spans, strict=True))
    pieces = []
    for token in ids:
        if token in special:
            pieces.append(Piece(token, str(tokenizer.convert_ids_to_tokens(token)), True, None))
        else:
            _, (start, end) = next(found)
            label = text[start:end] or str(tokenizer.convert_ids_to_tokens(token))
            pieces.append(Piece(token, label, False, _word_at(words, start, end)))
    return Pieces(tuple(pieces), text)


def _spans(tokenizer: PreTrainedTokenizerBase, ids: list[int], source: bool) -> tuple[str, list[tuple[int, int]]]:
    """The decoded text, and for each token the stretch of characters that it completes.

    Tokens that hold only a part of one character all get that character's whole stretch.
    """

    def decode(part: list[int]) -> str:
        if source and hasattr(tokenizer, "spm_source"):
            return tokenizer.decode(part, clean_up_tokenization_spaces=False, use_source_tokenizer=True)
        return tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    text = decode(ids) if ids else ""
    ends = []
    for count in range(1, len(ids) + 1):
        prefix = decode(ids[:count]).rstrip(INCOMPLETE) if count < len(ids) else text
        end = _common(prefix, text)
        ends.append(max(end, ends[-1] if ends else 0))
    spans = [(0 if i == 0 else ends[i - 1], end) for i, end in enumerate(ends)]
    for i in range(len(spans) - 2, -1, -1):
        start, end = spans[i]
        if start == end and spans[i + 1][0] == start:
            spans[i] = (start, min(spans[i + 1][1], start + 1))
    return text, spans


def _common(first: str, second: str) -> int:
    """Length of the common beginning of two texts."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return min(len(first), len(second))


def _word_of_character(text: str) -> list[int | None]:
    """For each character the index of its white-space-separated word; None for white space."""
    words: list[int | None] = []
    count = -1
    inside = False
    for character in text:
        if character.isspace():
            inside = False
            words.append(None)
        else:
            count += not inside
            inside = True
            words.append(count)
    return words


def _word_at(words: list[int | None], start: int, end: int) -> int | None:
    """The word of the first visible character of a stretch; else of the next one after it; else of the last before."""
    for word in words[start : max(end, start)]:
        if word is not None:
            return word
    for word in words[end:]:
        if word is not None:
            return word
    return next((word for word in reversed(words[:start]) if word is not None), None)


def merge_words(weights: Tensor, rows: Sequence[int], cols: Sequence[int]) -> Tensor:
    """Attention between units from attention between pieces.

    `weights` is [..., T, S]; `rows` and `cols` give the unit of each piece. The weights of an asked unit's pieces are
    added up, and those of an asking unit's pieces are averaged, so that rows still sum to 1. Returns [..., units of T,
    units of S].
    """
    by_row = torch.zeros(max(rows) + 1, len(rows), dtype=weights.dtype, device=weights.device)
    by_row[torch.tensor(rows), torch.arange(len(rows))] = 1
    by_row = by_row / by_row.sum(-1, keepdim=True)
    by_col = torch.zeros(len(cols), max(cols) + 1, dtype=weights.dtype, device=weights.device)
    by_col[torch.arange(len(cols)), torch.tensor(cols)] = 1
    return by_row @ weights @ by_col
