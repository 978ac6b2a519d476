"""Raw parallel text to checked pairs.

Training pairs go line by line from their source into an Arrow file, which is mapped into memory and not held there.
A pair with a blank, missing, undecodable or malformed side is left out together with its partner, counted and listed.
Validation and test lines are never left out: every line is scored, and one that cannot be read is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import CorpusOptions, DataOptions
from metaphrase.training.data.cache import Scratch, fingerprint, new_folder
from metaphrase.training.data.locate import find_source
from metaphrase.training.data.report import CorpusReport, DropList
from metaphrase.training.data.sources import PairSource
from metaphrase.training.data.text import is_blank

if TYPE_CHECKING:
    from datasets import Dataset

ROWS = 10_000
"""Rows of one Arrow record batch."""


@dataclass
class EvaluationSet:
    """Lines to score: `references[i]` are the accepted translations, one or more, of `sources[i]`."""

    sources: list[str]
    references: list[list[str]]

    def __len__(self) -> int:
        return len(self.sources)

    def head(self, lines: int | None) -> EvaluationSet:
        """The first `lines` lines, or all."""
        return EvaluationSet(self.sources[:lines], self.references[:lines])


@dataclass
class Part:
    """The training pairs of one corpus."""

    name: str
    pairs: Dataset
    """Columns `source`, `target` and `line` (from 1, of the file or dataset), mapped from disk."""
    fingerprint: str
    tags: list[str]
    """Tokens that go before each source."""
    weight: float


@dataclass
class Corpus:
    """What a run learns from and is scored on."""

    parts: list[Part]
    """The main corpus, then those of `data.more`."""
    validation: EvaluationSet | None
    """None only where `validation_size` is 0 and there is no validation split."""
    report: CorpusReport
    data: DataOptions
    _folder: Scratch | None = field(default=None, repr=False)

    @property
    def train(self) -> Dataset:
        """All training pairs, each once, without tags."""
        from datasets import concatenate_datasets

        return concatenate_datasets([part.pairs for part in self.parts])

    @property
    def fingerprint(self) -> str:
        """Changes when a training pair does."""
        return fingerprint(*(part.fingerprint for part in self.parts))

    @property
    def tags(self) -> list[str]:
        """Every tag once, in order."""
        return list(dict.fromkeys(tag for part in self.parts for tag in part.tags))

    def texts(self) -> Iterator[list[str]]:
        """Every training text, both sides, in batches, without tags: what a tokenizer is trained on."""
        for part in self.parts:
            for batch in part.pairs.with_format("arrow").iter(batch_size=ROWS):
                yield batch["source"].to_pylist()
                yield batch["target"].to_pylist()

    def read_test(self) -> EvaluationSet | None:
        """The test split, read now and not before. None where there is none."""
        return read_evaluation(self.data, "test")


def read_corpus(data: DataOptions, cache_dir: Path | None = None, *, seed: int = 1) -> Corpus:
    """Reads the training and validation splits.

    Args:
        data: what to read.
        cache_dir: folder in which the checked pairs are kept for the next start. None: a folder that lives as long
            as the returned corpus.
        seed: chooses the pairs that are held out where there is no validation split.

    Raises:
        MetaphraseError: a file, split or column is missing, two files differ in their number of lines, or no pair is
            left.
    """
    scratch = Scratch() if cache_dir is None else None
    root = scratch.path if scratch else Path(cache_dir)
    validation = read_evaluation(data, "validation")
    parts, reports = [], []
    for options in (data, *(further(data, more) for more in data.more)):
        part, report = _read_part(options, root)
        parts.append(part)
        reports.append(report)
    if validation is None and data.validation_size:
        validation = _hold_out(parts[0], reports[0], data.validation_size, seed, root)
    return Corpus(parts, validation, CorpusReport.merged(reports), data, scratch)


def further(data: DataOptions, more: CorpusOptions) -> DataOptions:
    """The options of a further corpus, as if it were the only one."""
    given = {name: value for name, value in vars(more).items() if value is not None}
    if more.path is not None:
        given["config_name"] = more.config_name
    return replace(data, more=[], **given)


def _read_part(data: DataOptions, root: Path) -> tuple[Part, CorpusReport]:
    """The training pairs of one corpus, written to the cache or found there."""
    source = find_source(data, "train")
    assert source is not None  # find_source raises where there is nothing to learn from
    check_tags(data)
    key = fingerprint("pairs", source.identity(), data.max_pairs)
    folder = root / f"pairs-{key}"
    if not (folder / "report.json").is_file():
        with new_folder(folder) as unfinished:
            _write_pairs(source, unfinished, folder, data.max_pairs)
    report = CorpusReport.load(folder / "report.json")
    if report.kept == 0:
        raise MetaphraseError(f"no pair to learn from in {source.name}: {report.summary()}")
    return Part(source.name, _map_arrow(folder / "pairs.arrow"), key, data.tags, data.weight), report


def check_tags(data: DataOptions) -> None:
    """Raises where a tag could not be a token of its own."""
    for tag in data.tags:
        if not re.fullmatch(r"<[^<>\s]+>", tag) or tag in ("<pad>", "<s>", "</s>", "<unk>") or tag.startswith("<0x"):
            raise MetaphraseError(f"the tag {tag!r} must be written <…>, without spaces, and be no special token")


def tagged(texts: list[str], tags: list[str]) -> list[str]:
    """The texts with the tags before each: "<2de> a dog". A blank text stays as it is."""
    if not tags:
        return texts
    prefix = " ".join(tags) + " "
    return [text if is_blank(text) else prefix + text for text in texts]


def read_evaluation(data: DataOptions, role: str) -> EvaluationSet | None:
    """Reads a validation or test split whole. None where the options name none.

    Raises:
        MetaphraseError: a line cannot be read, or there is none; scores over a part of the lines would mislead.
    """
    source = find_source(data, role)
    if source is None:
        return None
    sources: list[str] = []
    references: list[list[str]] = []
    for record in source.records():
        if record.problem is not None:
            where = f"{record.file or source.name}, line {record.line}"
            raise MetaphraseError(f"{where}: {record.problem}; every line of the {role} split must be readable")
        sources.append(record.source)
        references.append(record.targets)
    if not sources:
        raise MetaphraseError(f"the {role} split {source.name} is empty")
    return EvaluationSet(tagged(sources, data.tags), references)


def _write_pairs(source: PairSource, folder: Path, final: Path, max_pairs: int | None) -> None:
    """Writes pairs.arrow, left_out.jsonl and report.json into `folder`, which will be renamed to `final`."""
    import pyarrow as pa

    report = CorpusReport(listings=[str(final / "left_out.jsonl")])
    schema = pa.schema([("source", pa.string()), ("target", pa.string()), ("line", pa.int64())])
    rows: list[tuple[str, str, int]] = []

    def write(rows: list[tuple[str, str, int]]) -> None:
        columns = zip(*rows, strict=True) if rows else ([], [], [])
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        writer.write_batch(pa.record_batch(arrays, schema=schema))

    with (
        (folder / "left_out.jsonl").open("w", encoding="utf-8") as listing,
        pa.OSFile(str(folder / "pairs.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for row in checked_pairs(source, DropList(report, listing), max_pairs):
            rows.append(row)
            if len(rows) == ROWS:
                write(rows)
                rows = []
        write(rows)
    report.save(folder / "report.json")


def checked_pairs(source: PairSource, drops: DropList, max_pairs: int | None) -> Iterator[tuple[str, str, int]]:
    """The pairs worth learning from, with their line; all others are listed."""
    report = drops.report
    for record in source.records():
        if max_pairs is not None and report.kept >= max_pairs:
            report.notes.append(f"only the first {max_pairs:,} pairs were read (data.max_pairs)")
            return
        report.read += 1
        if record.problem is not None:
            drops.add(record.file or source.name, record.line, record.problem, record.source)
        elif is_blank(record.source):
            drops.add(source.name, record.line, "blank", " ||| ".join(record.targets))
        else:
            targets = [target for target in record.targets if not is_blank(target)]
            if len(targets) < len(record.targets):
                drops.add(source.name, record.line, "blank", record.source)
            if max_pairs is not None:
                targets = targets[: max_pairs - report.kept]
            report.kept += len(targets)
            for target in targets:
                yield record.source, target, record.line


def _map_arrow(file: Path) -> Dataset:
    from datasets import Dataset

    return Dataset.from_file(str(file))


def _hold_out(part: Part, report: CorpusReport, size: int, seed: int, root: Path) -> EvaluationSet:
    """Takes `size` pairs, drawn by seed, out of a part. Both halves are kept in the cache."""
    if size >= len(part.pairs):
        raise MetaphraseError(
            f"data.validation_size is {size} but there are only {len(part.pairs)} training pairs; give a validation "
            "split or a smaller size"
        )
    part.fingerprint = fingerprint(part.fingerprint, size, seed)
    folder = root / f"pairs-{part.fingerprint}"
    if not folder.is_dir():
        with new_folder(folder) as unfinished:
            _write_halves(part.pairs, size, seed, unfinished)
    part.pairs = _map_arrow(folder / "pairs.arrow")
    held = _map_arrow(folder / "held_out.arrow")
    report.kept -= size
    report.notes.append(f"there is no validation split: {size:,} training pairs were held out (seed {seed})")
    return EvaluationSet(tagged(list(held["source"]), part.tags), [[target] for target in held["target"]])


def _write_halves(pairs: Dataset, size: int, seed: int, folder: Path) -> None:
    import pyarrow as pa

    chosen = np.zeros(len(pairs), dtype=bool)
    chosen[np.random.default_rng(seed).choice(len(pairs), size, replace=False)] = True
    files = folder / "pairs.arrow", folder / "held_out.arrow"
    with pa.OSFile(str(files[0]), "wb") as kept, pa.OSFile(str(files[1]), "wb") as held:
        schema = pairs.data.schema
        with pa.ipc.new_stream(kept, schema) as keep, pa.ipc.new_stream(held, schema) as hold:
            for number, table in enumerate(pairs.with_format("arrow").iter(batch_size=ROWS)):
                mask = chosen[number * ROWS : number * ROWS + len(table)]
                keep.write_table(table.filter(pa.array(~mask)))
                hold.write_table(table.filter(pa.array(mask)))
