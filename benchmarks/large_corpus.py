"""How a run starts on a corpus of ten million pairs, and what memory it holds.

    python benchmarks/large_corpus.py --pairs 10000000 --folder /tmp/large

Makes a corpus up, reads and tokenizes it once, and then starts from the cache in a new process: seconds to the first
batch, resident memory there and after each tenth of an epoch, on one thread. One JSON line a stage. To save time only a
part of the pairs is made up; in the cache it is put after itself until there are as many as asked for.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

LINES = 100_000


def make_up(folder: Path, pairs: int) -> None:
    """Two text files of made-up words, frequent and rare ones as in a language."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    letters = np.array(list("eanirstdolugmkhcpbvfw"))
    words = np.array(["".join(random.choice(letters, random.integers(2, 9))) for _ in range(20_000)])
    chance = 1 / np.arange(10, len(words) + 10)
    with (folder / "train.xx").open("w") as source, (folder / "train.yy").open("w") as target:
        for first in range(0, pairs, LINES):
            rows = min(LINES, pairs - first)
            lengths = random.poisson(10, rows) + 2
            drawn = words[random.choice(len(words), lengths.sum(), p=chance / chance.sum())]
            for line in np.split(drawn, np.cumsum(lengths)[:-1]):
                source.write(" ".join(line) + "\n")
                target.write(" ".join(line[::-1]) + "\n")


def enlarge(cache: Path, copies: int) -> None:
    """Puts the checked pairs and their ids after themselves in the cache."""
    import pyarrow as pa

    for file in [*cache.glob("pairs-*/pairs.arrow"), *cache.glob("ids-*/ids.arrow")]:
        with pa.OSFile(str(file)) as source:
            table = pa.ipc.open_stream(source).read_all()
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            for _ in range(copies):
                writer.write_table(table)
        report = json.loads((file.parent / "report.json").read_text())
        report["kept"] *= copies
        (file.parent / "report.json").write_text(json.dumps(report))


def start(folder: Path) -> None:
    """From the imports to the first batch, then through an epoch."""
    began = time.perf_counter()
    from metaphrase.configuration.options import DataOptions, TokenizerOptions
    from metaphrase.training.data.batching import collate, fill, plan_epoch
    from metaphrase.training.data.corpus import read_corpus
    from metaphrase.training.data.encoding import encode_corpus
    from metaphrase.training.data.tokenizer import prepare_tokenizer

    times: dict[str, float] = {}

    def lap(name: str) -> None:
        times[name] = round(time.perf_counter() - began - sum(times.values()), 2)

    options, cache = DataOptions(str(folder), source="xx", target="yy", validation_size=0), folder / "cache"
    lap("imports")
    corpus = read_corpus(options, cache)
    lap("read_corpus")
    tokenizer = prepare_tokenizer(corpus, TokenizerOptions(), cache)
    lap("prepare_tokenizer")
    encoded = encode_corpus(corpus, tokenizer, options, cache)
    lap("encode_corpus")
    plan = plan_epoch(encoded.source_lengths, encoded.target_lengths, tokens=4096, seed=1, epoch=0)
    lap("plan_epoch")
    collate(encoded[plan[0]])
    lap("first_batch")
    tell(stage="start", pairs=len(encoded), seconds=round(sum(times.values()), 1), **times)
    tell(stage="plan", batches=len(plan), target_fill=round(fill(encoded.target_lengths, plan), 4))
    for tenth in range(10):
        for batch in range(tenth * len(plan) // 10, (tenth + 1) * len(plan) // 10):
            collate(encoded[plan[batch]])
        tell(stage="epoch", tenths=tenth + 1)


def tell(**facts: object) -> None:
    """A JSON line with resident and peak memory of this process, in MB."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps(facts | {"resident_mb": round(resident), "peak_mb": round(peak)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--start", action="store_true", help="only start; used by this script itself")
    arguments = parser.parse_args()
    if arguments.start:
        return start(arguments.folder)
    copies = max(arguments.pairs // LINES, 1)
    make_up(arguments.folder, arguments.pairs // copies)
    again = [sys.executable, __file__, "--folder", str(arguments.folder), "--start"]
    subprocess.run(again, check=True)
    enlarge(arguments.folder / "cache", copies)
    subprocess.run(again, check=True)
    return None


if __name__ == "__main__":
    main()
