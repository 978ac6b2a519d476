"""Where pairs come from: text files, TSV, JSONL, `datasets` datasets, or a corpus that a package brings.

Each kind of source is a small class with the same two members: `identity()`, a string that changes when the content
does, and `records()`, which yields one `Record` a line, bad lines included, so that the reader of the corpus decides.
`find_source` looks at the options and picks the class. Nothing here drops or repairs a line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training.data import cmudict
from metaphrase.training.data.text import count_lines, read_lines


class Record(NamedTuple):
    """One line of a source. `problem` is None, "undecodable", "malformed" or "missing"."""

    line: int  # from 1
    source: str
    targets: list[str]  # one or more translations of the same source
    problem: str | None = None
    file: str | None = None  # where the problem lies


class PairSource(Protocol):
    """What every kind of source offers."""

    name: str

    def identity(self) -> str:
        """Changes when the content does."""

    def records(self) -> Iterator[Record]:
        """One record a line, in order."""


def file_identity(path: Path) -> str:
    """Path, size and time of change: enough to tell a changed file without reading it."""
    status = path.stat()
    return f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"


def nearest(name: str, names: Iterable[str]) -> str:
    """', did you mean X?' or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


@dataclass
class TextPair:
    """Two plain text files, one sentence a line."""

    source_file: Path
    target_file: Path

    @property
    def name(self) -> str:
        return f"{self.source_file} and {self.target_file}"

    def identity(self) -> str:
        return f"text {file_identity(self.source_file)} {file_identity(self.target_file)}"

    def records(self) -> Iterator[Record]:
        lines = count_lines(self.source_file), count_lines(self.target_file)
        if lines[0] != lines[1]:
            raise MetaphraseError(
                f"{self.source_file} has {lines[0]} lines but {self.target_file} has {lines[1]}; "
                "line n of one must translate line n of the other"
            )
        pairs = zip(read_lines(self.source_file), read_lines(self.target_file), strict=True)
        for number, (source, target) in enumerate(pairs, 1):
            if source is None or target is None:
                file = self.source_file if source is None else self.target_file
                yield Record(number, source or "", [target or ""], "undecodable", str(file))
            else:
                yield Record(number, source, [target])


@dataclass
class Tsv:
    """Columns separated by tabs, without quoting.

    Where the first line holds both column names it is the header and those columns are read; otherwise every line is
    a pair, and the first two columns are source and target.
    """

    file: Path
    source: str
    target: str

    @property
    def name(self) -> str:
        return str(self.file)

    def identity(self) -> str:
        return f"tsv {file_identity(self.file)} {self.source} {self.target}"

    def records(self) -> Iterator[Record]:
        columns = (0, 1)
        for number, line in enumerate(read_lines(self.file), 1):
            if line is None:
                yield Record(number, "", [""], "undecodable", self.name)
                continue
            cells = line.split("\t")
            if number == 1 and self.source in cells and self.target in cells:
                columns = cells.index(self.source), cells.index(self.target)
            elif number == 1 and len(cells) < 2:
                raise MetaphraseError(f"{self.file}, line 1, has no tab; a TSV file needs two columns at least")
            elif len(cells) <= max(columns):
                yield Record(number, line, [""], "malformed", self.name)
            else:
                yield Record(number, cells[columns[0]], [cells[columns[1]]])


@dataclass
class JsonLines:
    """One JSON object a line. The target may be a list of strings; both keys may lie in one nested object."""

    file: Path
    source: str
    target: str

    @property
    def name(self) -> str:
        return str(self.file)

    def identity(self) -> str:
        return f"jsonl {file_identity(self.file)} {self.source} {self.target}"

    def records(self) -> Iterator[Record]:
        first = True
        for number, line in enumerate(read_lines(self.file), 1):
            if line is None:
                yield Record(number, "", [""], "undecodable", self.name)
                continue
            try:
                row = json.loads(line) if line.strip() else None
            except json.JSONDecodeError:
                row = False
            if row is None:
                yield Record(number, "", [""], "missing", self.name)
            elif not isinstance(row, dict):
                yield Record(number, line, [""], "malformed", self.name)
            else:
                if first:
                    _check_columns(row, (self.source, self.target), f"{self.file}, line {number},")
                    first = False
                yield _row_record(number, _inner(row, self.source, self.target), self.source, self.target, self.name)


@dataclass
class Columns:
    """Two columns of a `datasets.Dataset`; a nested column (`translation: {en, de}`) is looked into."""

    dataset: Any
    name: str
    source: str
    target: str

    def identity(self) -> str:
        return f"dataset {self.dataset._fingerprint} {len(self.dataset)} {self.source} {self.target}"

    def records(self) -> Iterator[Record]:
        where = f"the dataset {self.name}"
        columns = self.dataset.column_names
        if self.source in columns and self.target in columns:
            dataset = self.dataset.select_columns([self.source, self.target])
        else:
            holder = self._nested(where)
            dataset = self.dataset.select_columns([holder])
        for number, row in enumerate(dataset, 1):
            row = _inner(row, self.source, self.target)
            yield _row_record(number, row, self.source, self.target, self.name)

    def _nested(self, where: str) -> str:
        from datasets.features import Translation

        keys: dict[str, Any] = dict.fromkeys(self.dataset.column_names)
        for column, feature in self.dataset.features.items():
            inner = feature.languages if isinstance(feature, Translation) else feature
            if isinstance(feature, (dict, Translation)) and self.source in inner and self.target in inner:
                return column
            if isinstance(feature, (dict, Translation)):
                keys[column] = dict.fromkeys(inner)
        _check_columns(keys, (self.source, self.target), where)
        raise AssertionError("the check above raises")


@dataclass
class StreamedColumns:
    """The same of a `datasets.IterableDataset`, whose columns are known by its first row only."""

    dataset: Any
    name: str
    source: str
    target: str

    def identity(self) -> str:
        return f"stream {self.name} {self.source} {self.target}"

    def records(self) -> Iterator[Record]:
        for number, row in enumerate(self.dataset, 1):
            if number == 1:
                _check_columns(row, (self.source, self.target), f"the dataset {self.name}")
            yield _row_record(number, _inner(row, self.source, self.target), self.source, self.target, self.name)


@dataclass
class Dictionary:
    """A split of CMUdict: words and all their pronunciations."""

    split: str

    @property
    def name(self) -> str:
        return f"cmudict ({self.split})"

    def identity(self) -> str:
        return f"cmudict {file_identity(cmudict.dictionary_file())} {self.split}"

    def records(self) -> Iterator[Record]:
        for number, (word, variants) in enumerate(cmudict.entries(self.split), 1):
            yield Record(number, word, variants)


def _inner(row: dict[str, Any], source: str, target: str) -> dict[str, Any]:
    """The object that holds both keys: the row itself, or one nested in it."""
    if source in row and target in row:
        return row
    for value in row.values():
        if isinstance(value, dict) and source in value and target in value:
            return value
    return row


def _check_columns(row: dict[str, Any], wanted: tuple[str, str], where: str) -> None:
    """Raises where a wanted column is neither in the row nor in one of its nested objects."""
    names = [*row, *(key for value in row.values() if isinstance(value, dict) for key in value)]
    for name in wanted:
        if name not in names:
            raise MetaphraseError(f"{where} has no column {name}, only {', '.join(names)}{nearest(name, names)}")
    inner = _inner(row, *wanted)
    if not all(name in inner for name in wanted):
        raise MetaphraseError(f"{where} does not have {wanted[0]} and {wanted[1]} side by side")


def _row_record(number: int, row: dict[str, Any], source: str, target: str, name: str) -> Record:
    text, targets = row.get(source), row.get(target)
    if isinstance(targets, str):
        targets = [targets]
    if text is None or targets is None or targets == []:
        return Record(number, text if isinstance(text, str) else "", [""], "missing", name)
    if not isinstance(text, str) or not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        return Record(number, str(text), [""], "malformed", name)
    return Record(number, text, targets)
