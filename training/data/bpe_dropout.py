"""BPE-dropout: a word is cut otherwise each time it is learned from (Provilkov et al., 2020, arXiv:1910.13267).

At each step of building a word from its characters, every possible merge is left out with a probability; the best of
the others is made, until none is left. Only training does this: a text to be translated is always cut in one way.

Works on token ids, so it needs no text: the pieces of an encoded sentence are put together again and cut anew. What is
drawn depends on the seed, the epoch and the pair alone, so a run that goes on draws the same. (The library's own
dropout takes its random numbers from the system.)
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from metaphrase.configuration.errors import MetaphraseError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


PROBE = "Two  words, über 12 «семь» 家 </s>!"


class BpeDropout:
    """Cuts the words of an encoded sentence anew.

    Raises:
        MetaphraseError: the tokenizer is no BPE of the kind that this package trains, or the probability is not from
            0 to below 1.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, probability: float) -> None:
        whole = json.loads(tokenizer.backend_tokenizer.to_str())
        if whole["model"]["type"] != "BPE":
            raise MetaphraseError(f"tokenizer.dropout needs a tokenizer of kind bpe, not {whole['model']['type']}")
        if not whole["model"]["merges"]:
            raise MetaphraseError(
                "tokenizer.dropout needs a tokenizer of kind bpe; this one makes no merges to leave out"
            )
        if not 0 <= probability < 1:
            raise MetaphraseError(f"tokenizer.dropout is {probability}; it must be from 0 to below 1")
        self.probability = 0.0
        self._vocabulary: dict[str, int] = whole["model"]["vocab"]
        self._pieces = {number: piece for piece, number in self._vocabulary.items()}
        self._ranks = {tuple(merge): rank for rank, merge in enumerate(whole["model"]["merges"])}
        self._cut = tokenizer.backend_tokenizer.pre_tokenizer
        merged = {first + second for first, second in self._ranks}
        self._fixed = {number for number, piece in self._pieces.items() if len(piece) > 1 and piece not in merged} | {
            token["id"] for token in whole["added_tokens"]
        }  # special tokens, tags and bytes
        if not self._cuts_alike(tokenizer(PROBE).input_ids):
            raise MetaphraseError("tokenizer.dropout needs a tokenizer that this package trained; this one differs")
        self.probability = probability

    def __call__(self, ids: Sequence[int] | np.ndarray, draw: random.Random) -> np.ndarray:
        """Other ids of the same text, int32."""
        found: list[int] = []
        run: list[str] = []
        for number in map(int, ids):
            if number not in self._fixed:
                run.append(self._pieces[number])
                continue
            found += self._recut(run, draw)
            found.append(number)
            run = []
        return np.array(found + self._recut(run, draw), dtype=np.int32)

    def _cuts_alike(self, ids: list[int]) -> bool:
        """Whether nothing changes where nothing is dropped."""
        try:
            return self(ids, random.Random(0)).tolist() == ids
        except KeyError:
            return False

    def _recut(self, pieces: list[str], draw: random.Random) -> list[int]:
        if not pieces:
            return []
        text = "".join(pieces)
        words = [word for word, _ in self._cut.pre_tokenize_str(text)] if self._cut else [text]
        return [self._vocabulary[piece] for word in words for piece in self._merge(word, draw)]

    def _merge(self, word: str, draw: random.Random) -> list[str]:
        symbols = list(word)
        while len(symbols) > 1:
            best = None
            for place in range(len(symbols) - 1):
                rank = self._ranks.get((symbols[place], symbols[place + 1]))
                if rank is None or (best is not None and rank >= best[0]):
                    continue
                if draw.random() >= self.probability:
                    best = rank, place
            if best is None:
                break
            place = best[1]
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return symbols


class DroppedCorpus:
    """A corpus (or a window of one) whose pairs are cut anew as they are read; stands where the corpus stood.

    Its lengths are those without dropout, by which batches are planned: with a probability of 0.1 a batch holds about a
    quarter more tokens than planned. A side that would come out longer than `longest` stays as it was.
    """

    def __init__(self, corpus: Any, dropout: BpeDropout, *, seed: int, epoch: int, longest: int) -> None:
        self.corpus, self.dropout, self.longest = corpus, dropout, longest
        self._key = f"{seed} {epoch}"

    def __len__(self) -> int:
        return len(self.corpus)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.corpus, name)

    def __getitem__(self, indices: Sequence[int] | np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            tuple(self._dropped(ids, int(index), side) for side, ids in enumerate(pair))
            for index, pair in zip(indices, self.corpus[indices], strict=True)
        ]

    def _dropped(self, ids: np.ndarray, index: int, side: int) -> np.ndarray:
        other = self.dropout(ids, random.Random(f"{self._key} {index} {side}"))
        return other if len(other) <= self.longest else ids
