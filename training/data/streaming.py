"""A corpus that is read as it is needed, window by window, and never written down.

A window is so many checked pairs in the order of the source; it is tokenized in memory and planned by `plan_epoch` like
a small epoch, so batches are as full as ever. Pairs of different windows never meet in a batch; the windows of another
epoch begin elsewhere, so that other pairs meet.

A place in the stream is (epoch, window) and a position within the plan of that window. Window (e, w) always holds the
same pairs, so a run goes on exactly where it was: pairs before it are read again, but not tokenized.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions
from metaphrase.training.data.cache import Scratch, fingerprint
from metaphrase.training.data.corpus import ROWS, check_tags, checked_pairs, tagged
from metaphrase.training.data.encoding import encode_texts
from metaphrase.training.data.locate import find_source
from metaphrase.training.data.report import CorpusReport, DropList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

TOKENIZER_PAIRS = 1_000_000
"""Pairs from the first on that a tokenizer is trained on."""

Row = tuple[str, str, int]


def first_window(size: int, epoch: int) -> int:
    """Pairs of an epoch's first window: another part of a whole one in each epoch, so that other pairs meet."""
    return size - int(size * (epoch * 0.618034 % 1))


class Window:
    """Token ids of the pairs of one window, in memory; what `EncodedCorpus` is for a corpus on disk."""

    def __init__(self, epoch: int, number: int, sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
        self.epoch, self.number = epoch, number
        self._sides = sources, targets
        self.source_lengths, self.target_lengths = (
            np.array([len(ids) for ids in side], np.int32) for side in self._sides
        )

    @property
    def key(self) -> int:
        """Stands for the epoch in `plan_epoch`, so that each window has an order of its own."""
        return (self.epoch << 32) + self.number

    def __len__(self) -> int:
        return len(self.source_lengths)

    def __getitem__(self, indices: Sequence[int] | np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        sources, targets = self._sides
        return [(sources[index], targets[index]) for index in indices]


class Reading(DropList):
    """One reading from the start: counts everything, and lists what no earlier reading came to."""

    def __init__(self, file: IO[str], read_before: int) -> None:
        super().__init__(CorpusReport(listings=[file.name]), file)
        self.read_before = read_before

    def add(self, file: str, line: int, reason: str, detail: str = "") -> None:
        if self.report.read > self.read_before:
            super().add(file, line, reason, detail)
        else:
            self.report.count(reason)

    def list_first(self, file: str, line: int, reason: str, detail: str) -> None:
        """Counts and lists whatever was read before."""
        super().add(file, line, reason, detail)


class StreamedCorpus:
    """Windows of a training corpus, in order and from any place.

    `report` counts what was read so far, each line once however often it is read. Over-long pairs are among its kept
    ones, for only a tokenizer knows them; they are counted and listed beside.
    """

    def __init__(self, data: DataOptions, listing: Path | None = None) -> None:
        """Finds the source and reads nothing yet.

        Args:
            data: what to read; `data.window` pairs make a window.
            listing: JSONL file for what is left out. None: one that lives as long as this object.

        Raises:
            MetaphraseError: the source cannot be found, or a tag could be no token.
        """
        check_tags(data)
        self._scratch = Scratch() if listing is None else None
        listing = listing or self._scratch.path / "left_out.jsonl"
        self.data = data
        self.source = find_source(data, "train")
        self._listing = listing.open("w", encoding="utf-8")
        weakref.finalize(self, self._listing.close)
        self._drops = Reading(self._listing, 0)
        self._furthest = self._drops.report
        self._long_lines = 0
        self._place: tuple[int, int] | None = None
        self._rows: Iterator[Row] = iter(())

    @property
    def tags(self) -> list[str]:
        """Tokens that go before each source."""
        return self.data.tags

    @property
    def fingerprint(self) -> str:
        """Changes when the source does, as far as that is known without reading it."""
        return fingerprint("streamed", self.source.identity(), self.data.max_pairs)

    @property
    def report(self) -> CorpusReport:
        """Of the reading that came furthest."""
        self._listing.flush()
        return max(self._furthest, self._drops.report, key=lambda report: report.read)

    def texts(self) -> Iterator[list[str]]:
        """Both sides of the first pairs, in batches: what a tokenizer is trained on."""
        rows = islice(self.read(), TOKENIZER_PAIRS)
        while batch := list(islice(rows, ROWS)):
            yield [source for source, _, _ in batch]
            yield [target for _, target, _ in batch]

    def window(self, epoch: int, number: int, tokenizer: PreTrainedTokenizerBase) -> Window | None:
        """A window of an epoch; None after the last one.

        Raises:
            MetaphraseError: the source holds no pair to learn from, or all of a window are too long.
        """
        if self._place is None or self._place[0] != epoch or self._place[1] > number:
            self._place, self._rows = (epoch, 0), self.read()
        for skipped in range(self._place[1], number):
            self._take(epoch, skipped)
        rows = self._take(epoch, number)
        self._place = epoch, number + 1
        if not rows:
            if number == 0:
                raise MetaphraseError(f"no pair to learn from in {self.source.name}: {self.report.summary()}")
            return None
        return self._encoded(rows, epoch, number, tokenizer)

    def read(self) -> Iterator[Row]:
        self._furthest = self.report
        self._drops = Reading(self._listing, self._furthest.read)
        self._drops.report.dropped["too_long"] = self._furthest.dropped.get("too_long", 0)
        return checked_pairs(self.source, self._drops, self.data.max_pairs)

    def _take(self, epoch: int, number: int) -> list[Row]:
        """The pairs of the next window; the first of an epoch is shorter by another part each time."""
        size = self.data.window if number else first_window(self.data.window, epoch)
        return list(islice(self._rows, size))

    def encode(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Ids of both sides of the rows that are not too long; the others are counted and listed."""
        kept: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        if not rows:
            return kept
        sources = encode_texts(tokenizer, tagged([row[0] for row in rows], self.data.tags), workers=self.data.workers)
        targets = encode_texts(tokenizer, [row[1] for row in rows], target=True, workers=self.data.workers)
        for (text, _, line), *pair in zip(rows, sources, targets, strict=True):
            if max(map(len, pair)) > self.data.max_length:
                detail = f"{len(pair[0])} and {len(pair[1])} tokens, of at most {self.data.max_length}: {text}"
                if line > self._long_lines:
                    self._drops.list_first(self.source.name, line, "too_long", detail)
                continue
            for side, ids in zip(kept, pair, strict=True):
                side.append(np.array(ids, np.int32))
        self._long_lines = max(self._long_lines, rows[-1][2])
        return kept

    def _encoded(self, rows: list[Row], epoch: int, number: int, tokenizer: PreTrainedTokenizerBase) -> Window:
        kept = self.encode(rows, tokenizer)
        if not kept[0]:
            raise MetaphraseError(
                f"every pair of {self.source.name} from line {rows[0][2]} to {rows[-1][2]} is longer than "
                f"data.max_length {self.data.max_length} tokens"
            )
        return Window(epoch, number, *kept)
