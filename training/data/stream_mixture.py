"""Several streamed corpora, or one with a weight, as one stream of windows.

Each corpus is an endless row of lines, itself after itself. An epoch takes the next times x lines of each, as
`draw_epoch` does of corpora on disk, and every window of it takes its part of each corpus in proportion, so that all
corpora come to the epoch's end together. What window (e, w) holds follows from the numbers of lines alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import TYPE_CHECKING

import numpy as np

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions
from metaphrase.training.data.cache import fingerprint
from metaphrase.training.data.corpus import ROWS, further
from metaphrase.training.data.mixture import times_an_epoch
from metaphrase.training.data.report import CorpusReport
from metaphrase.training.data.sources import Columns, Dictionary, PairSource, StreamedColumns, TextPair
from metaphrase.training.data.streaming import TOKENIZER_PAIRS, Row, StreamedCorpus, Window, first_window
from metaphrase.training.data.text import count_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_stream(data: DataOptions) -> StreamedCorpus | StreamedMixture:
    """What the options ask for.

    Raises:
        MetaphraseError: a source cannot be found, or how many lines it has cannot be known where that is needed.
    """
    return StreamedMixture(data) if data.more or data.weight != 1 else StreamedCorpus(data)


class EndlessRow:
    """The lines of one corpus, over and over; place p is line p mod n, from 0."""

    def __init__(self, corpus: StreamedCorpus) -> None:
        self.corpus = corpus
        self.lines = lines_of(corpus)
        self._at = -1
        self._rows: Iterator[tuple[int, Row]] = iter(())
        self._ahead: tuple[int, Row] | None = None

    def between(self, begin: int, end: int) -> list[Row]:
        """The pairs of the places from `begin` up to, but not, `end`. One place may hold several pairs, or none."""
        if begin >= end:
            return []
        if begin != self._at:
            self._rows = self._from(begin)
            self._ahead = next(self._rows)
        found = []
        while self._ahead is not None and self._ahead[0] < end:
            found.append(self._ahead[1])
            self._ahead = next(self._rows)
        self._at = end
        return found

    def _from(self, begin: int) -> Iterator[tuple[int, Row]]:
        for copy in count(begin // self.lines):
            empty = True
            for row in self.corpus.read():
                empty = False
                place = copy * self.lines + min(row[2], self.lines) - 1
                if place >= begin:
                    yield place, row
            if empty:
                report = self.corpus.report.summary()
                raise MetaphraseError(f"no pair to learn from in {self.corpus.source.name}: {report}")


class StreamedMixture:
    """What `StreamedCorpus` is for one corpus: windows, in order and from any place."""

    def __init__(self, data: DataOptions) -> None:
        """Counts the lines of every corpus.

        Raises:
            MetaphraseError: a source cannot be found, or nobody says how many lines it has.
        """
        self.data = data
        parts = [replace(data, more=[]), *(further(data, more) for more in data.more)]
        self.corpora = [StreamedCorpus(part) for part in parts]
        self.rows = [EndlessRow(corpus) for corpus in self.corpora]
        self.lines = [row.lines for row in self.rows]
        self.times = times_an_epoch(self.lines, [part.weight for part in parts], data.temperature)
        """How many times an epoch brings each line of each corpus."""

    @property
    def tags(self) -> list[str]:
        """Every tag once, in order."""
        return list(dict.fromkeys(tag for corpus in self.corpora for tag in corpus.tags))

    @property
    def fingerprint(self) -> str:
        """Changes when a source, a weight or the temperature does."""
        return fingerprint("mixture", *(corpus.fingerprint for corpus in self.corpora), self.times)

    @property
    def report(self) -> CorpusReport:
        """One account of all corpora."""
        return CorpusReport.merged([corpus.report for corpus in self.corpora])

    def texts(self) -> Iterator[list[str]]:
        """Both sides of the first pairs of each corpus, in proportion to its part of an epoch, in batches."""
        places = self._places(0)
        total = sum(end - begin for begin, end in places)
        for corpus, (begin, end) in zip(self.corpora, places, strict=True):
            pairs = islice(corpus.read(), -(-TOKENIZER_PAIRS * (end - begin) // total))
            while batch := list(islice(pairs, ROWS)):
                yield [source for source, _, _ in batch]
                yield [target for _, target, _ in batch]

    def window(self, epoch: int, number: int, tokenizer: PreTrainedTokenizerBase) -> Window | None:
        """A window of an epoch; None after the last one.

        Raises:
            MetaphraseError: a corpus holds no pair to learn from, or the window holds none that is not too long.
        """
        places = self._places(epoch)
        total = sum(end - begin for begin, end in places)
        first = first_window(self.data.window, epoch)
        begin, end = (min(total, first + (at - 1) * self.data.window) if at else 0 for at in (number, number + 1))
        if begin >= total:
            return None
        sides: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        for row, (start, stop) in zip(self.rows, places, strict=True):
            cut = [start + (stop - start) * at // total for at in (begin, end)]
            for side, ids in zip(sides, row.corpus.encode(row.between(*cut), tokenizer), strict=True):
                side += ids
        if not sides[0]:
            raise MetaphraseError(
                f"window {number} of epoch {epoch} holds no pair of at most data.max_length {self.data.max_length} "
                "tokens; enlarge data.window, or look at the data with metaphrase doctor data"
            )
        return Window(epoch, number, *sides)

    def _places(self, epoch: int) -> list[tuple[int, int]]:
        """Where an epoch begins and ends in each endless row."""
        return [
            (round(epoch * times * lines), round((epoch + 1) * times * lines))
            for times, lines in zip(self.times, self.lines, strict=True)
        ]


def lines_of(corpus: StreamedCorpus) -> int:
    """Lines of a streamed corpus, up to the last that `data.max_pairs` lets through.

    Raises:
        MetaphraseError: a dataset does not say how many rows it has; or there is no line.
    """
    lines = max((line for *_, line in corpus.read()), default=0) if corpus.data.max_pairs else _lines(corpus.source)
    if lines is None:
        raise MetaphraseError(
            f"{corpus.source.name} does not say how many rows it has, so it cannot be streamed with a weight or beside "
            "other corpora; set data.max_pairs, or leave out data.streaming"
        )
    if not lines:
        raise MetaphraseError(f"no pair to learn from in {corpus.source.name}: it has no line")
    return lines


def _lines(source: PairSource) -> int | None:
    if isinstance(source, TextPair):
        return count_lines(source.source_file)
    if isinstance(source, Columns):
        return len(source.dataset)
    if isinstance(source, Dictionary):
        return sum(1 for _ in source.records())
    if isinstance(source, StreamedColumns):
        splits, split = getattr(source.dataset.info, "splits", None) or {}, str(source.dataset.split)
        return splits[split].num_examples if split in splits else None
    return count_lines(source.file)
