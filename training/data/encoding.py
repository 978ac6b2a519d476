"""Checked pairs to token ids on disk, and back out in any order.

Ids lie in an Arrow file that is read through a memory map: a corpus of any size costs 8 bytes a pair (its two lengths)
plus the pages just read, which are handed back to the system now and then.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions
from metaphrase.training.data.cache import Scratch, fingerprint, new_folder
from metaphrase.training.data.corpus import ROWS, Corpus, Part, tagged
from metaphrase.training.data.mixture import draw_epoch, times_an_epoch
from metaphrase.training.data.report import CorpusReport, DropList

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FETCHES = 1_000
"""Pairs read between two times that pages are handed back."""


class EncodedCorpus:
    """Token ids of every training pair, both sides ending in `</s>`.

    `source_lengths`, `target_lengths`: int32 [pairs], with `</s>`. `corpus[indices]` gives a list of (source ids,
    target ids), each a numpy array that is only to be read. `sizes` says how many pairs each part of the corpus has, in
    order. `report` is the whole account: what the corpus left out, and the pairs that are too long.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        corpus_report: CorpusReport,
        *,
        weights: Sequence[float] | None = None,
        temperature: float | None = None,
        keep: Scratch | None = None,
    ) -> None:
        reports = [CorpusReport.load(folder / "report.json") for folder in folders]
        self.report = CorpusReport.merged([corpus_report, *reports])
        self.report.read, self.report.kept = corpus_report.read, sum(report.kept for report in reports)
        self.sizes = [report.kept for report in reports]
        self.times = times_an_epoch(self.sizes, weights or [1.0] * len(folders), temperature)
        """How many times an epoch brings each pair of each part."""
        self._keep = keep
        self._maps = [_map(folder / "ids.arrow") for folder in folders]
        batches = [batch for whole in self._maps for batch in _batches(whole)]
        self._ends = np.cumsum([batch.num_rows for batch in batches])
        self._sides = [[_list_parts(batch.column(side)) for batch in batches] for side in (0, 1)]
        self._rows = [batch.column(2) for batch in batches]
        self.source_lengths, self.target_lengths = (
            np.concatenate([np.diff(offsets) for offsets, _ in side]) for side in self._sides
        )
        self._fetched = 0
        self._hand_back(FETCHES + 1)

    @property
    def rows(self) -> np.ndarray:
        """Which row of its part of the corpus each pair was, int64 [pairs]."""
        return np.concatenate([column.to_numpy() for column in self._rows])

    def __len__(self) -> int:
        return len(self.source_lengths)

    def __getitem__(self, indices: Sequence[int] | np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        self._hand_back(len(indices))
        return [self._pair(int(index)) for index in indices]

    def draw(self, *, seed: int, epoch: int) -> np.ndarray | None:
        """The pairs of an epoch, for `plan_epoch`; None where it is each pair once."""
        return draw_epoch(self.sizes, self.times, seed=seed, epoch=epoch)

    def _pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        batch = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[batch - 1]) if batch else 0)
        sides = (side[batch] for side in self._sides)
        source, target = (values[offsets[row] : offsets[row + 1]] for offsets, values in sides)
        return source, target

    def _hand_back(self, fetched: int) -> None:
        """Pages of the map count as this process' memory while they are mapped in; the file cache keeps them anyway."""
        self._fetched += fetched
        if self._fetched > FETCHES and hasattr(mmap, "MADV_DONTNEED"):
            self._fetched = 0
            for whole in self._maps:
                whole.madvise(mmap.MADV_DONTNEED)


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def _batches(whole: mmap.mmap) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    stream = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(whole)))
    return (batch for batch in stream if batch.num_rows)


def encode_corpus(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, options: DataOptions, cache_dir: Path | None = None
) -> EncodedCorpus:
    """Tokenizes the training pairs on all cores, or finds them in the cache.

    Pairs with more than `options.max_length` tokens on a side are left out, counted and listed.

    Raises:
        MetaphraseError: every pair is too long.
    """
    scratch = Scratch() if cache_dir is None else None
    root = scratch.path if scratch else Path(cache_dir)
    identity = tokenizer_identity(tokenizer)
    folders = []
    for part in corpus.parts:
        key = fingerprint("ids", part.fingerprint, part.tags, identity, options.max_length)
        folders.append(root / f"ids-{key}")
        if not (folders[-1] / "report.json").is_file():
            with new_folder(folders[-1]) as unfinished:
                _write_ids(part, tokenizer, options, unfinished, folders[-1])
    encoded = [CorpusReport.load(folder / "report.json") for folder in folders]
    if sum(report.kept for report in encoded) == 0:
        raise MetaphraseError(f"every training pair is longer than data.max_length {options.max_length} tokens")
    weights = [part.weight for part in corpus.parts]
    return EncodedCorpus(folders, corpus.report, weights=weights, temperature=options.temperature, keep=scratch)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Changes when the tokenizer would give other ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return fingerprint(type(tokenizer).__name__, content, tokenizer.split_special_tokens)


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, target: bool = False, workers: int | None = None
) -> list[list[int]]:
    """Ids of many texts, `</s>` included, never cut. Uses `workers` threads: one a core when None."""
    if type(tokenizer).__name__ in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        with _threads(workers):
            return [encoding.ids for encoding in backend.encode_batch_fast(texts)]
    return tokenizer(**{"text_target" if target else "text": texts}, truncation=False)["input_ids"]


@contextlib.contextmanager
def _threads(workers: int | None) -> Iterator[None]:
    """The library reads the number of threads once, at its first parallel call, and whether to use them at each."""
    if workers is not None:
        os.environ.setdefault("RAYON_NUM_THREADS", str(workers))
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers == 1 else "true"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _list_parts(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    return column.offsets.to_numpy(), column.values.to_numpy()


def _write_ids(part: Part, tokenizer: PreTrainedTokenizerBase, options: DataOptions, folder: Path, final: Path) -> None:
    import pyarrow as pa

    report = CorpusReport(listings=[str(final / "left_out.jsonl")])
    kind = pa.uint16() if len(tokenizer) <= 1 << 16 else pa.int32()
    schema = pa.schema([("source_ids", pa.list_(kind)), ("target_ids", pa.list_(kind)), ("row", pa.int64())])
    with (
        (folder / "left_out.jsonl").open("w", encoding="utf-8") as listing,
        pa.OSFile(str(folder / "ids.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        drops = DropList(report, listing)
        for first, batch in _with_progress(part.pairs):
            sources = encode_texts(tokenizer, tagged(batch["source"], part.tags), workers=options.workers)
            targets = encode_texts(tokenizer, batch["target"], target=True, workers=options.workers)
            report.read += len(sources)
            rows = [
                row
                for row, pair in enumerate(zip(sources, targets, strict=True))
                if max(map(len, pair)) <= options.max_length
            ]
            if len(rows) < len(sources):
                _list_too_long(sources, targets, set(rows), batch, part.name, options, drops)
            report.kept += len(rows)
            columns = [_list_array([side[row] for row in rows], kind) for side in (sources, targets)]
            writer.write_batch(pa.record_batch([*columns, pa.array(np.array(rows) + first, pa.int64())], schema=schema))
    report.save(folder / "report.json")


def _with_progress(pairs: Dataset) -> Iterator[tuple[int, dict[str, list]]]:
    """Batches of rows with the number of the first, behind a progress bar (on a terminal only)."""
    from tqdm import tqdm

    with tqdm(total=len(pairs), desc="tokenizing", unit=" pairs", unit_scale=True, disable=None) as bar:
        for first in range(0, len(pairs), ROWS):
            batch = pairs[first : first + ROWS]
            yield first, batch
            bar.update(len(batch["source"]))


def _list_too_long(
    sources: list[list[int]],
    targets: list[list[int]],
    kept: set[int],
    batch: dict[str, list],
    name: str,
    options: DataOptions,
    drops: DropList,
) -> None:
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if row not in kept:
            detail = f"{len(source)} and {len(target)} tokens, of at most {options.max_length}: {batch['source'][row]}"
            drops.add(name, batch["line"][row], "too_long", detail)


def _list_array(rows: list[list[int]], kind: pa.DataType) -> pa.ListArray:
    import pyarrow as pa

    lengths = np.fromiter(map(len, rows), dtype=np.int32, count=len(rows))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = np.fromiter(chain.from_iterable(rows), dtype=kind.to_pandas_dtype(), count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
