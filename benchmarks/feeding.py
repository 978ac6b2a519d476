"""What it takes to feed training: reading, tokenizing, planning an epoch and making batches, on one thread.

    python benchmarks/feeding.py --data FOLDER [--source en] [--target de] [--rounds 3]

Reading checks pairs and writes them to an empty cache; tokenizing does the same with their ids, with a joint vocabulary
of 8,000. An epoch is planned over the corpus' lengths, repeated to one and four million pairs: what grows faster than
the pairs shows. Batches of 4,096 tokens are fetched and padded as training does. Figures are medians; pairs a second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common import keep, machine

from metaphrase.configuration.options import DataOptions, TokenizerOptions
from metaphrase.training.data.batching import collate, plan_epoch
from metaphrase.training.data.corpus import read_corpus
from metaphrase.training.data.encoding import encode_corpus
from metaphrase.training.data.tokenizer import prepare_tokenizer

PLANNED = (1_000_000, 4_000_000)
BATCHES = 200


def timed(act: Callable[[], object]) -> tuple[object, float]:
    began = time.perf_counter()
    result = act()
    return result, time.perf_counter() - began


def one_round(options: DataOptions) -> dict[str, float]:
    """Pairs a second of each stage, and bytes a pair in the cache."""
    with tempfile.TemporaryDirectory(prefix="metaphrase-bench-") as scratch:
        cache = Path(scratch)
        corpus, reading = timed(lambda: read_corpus(options, cache))
        tokenizer = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=8000), cache)
        encoded, tokenizing = timed(lambda: encode_corpus(corpus, tokenizer, options, cache))
        pairs = len(encoded)
        size = sum(file.stat().st_size for file in cache.rglob("*.arrow"))
        found = {
            "pairs": pairs,
            "reading": pairs / reading,
            "tokenizing": pairs / tokenizing,
            "bytes_a_pair": size / pairs,
        }
        for count in PLANNED:
            sides = [np.resize(side, count) for side in (encoded.source_lengths, encoded.target_lengths)]
            plan, seconds = timed(lambda sides=sides: plan_epoch(*sides, tokens=4096, seed=1, epoch=0))
            found[f"planning_{count}"] = count / seconds
            found["pairs_a_batch"] = count / len(plan)
        plan = plan_epoch(encoded.source_lengths, encoded.target_lengths, tokens=4096, seed=1, epoch=0)
        chosen = [plan[number] for number in range(min(BATCHES, len(plan)))]
        _, seconds = timed(lambda: [collate(encoded[indices]) for indices in chosen])
        found["batching"] = sum(map(len, chosen)) / seconds
        found["target_tokens_a_pair"] = float(encoded.target_lengths.mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    options = DataOptions(str(arguments.data), source=arguments.source, target=arguments.target, workers=1)
    rounds = [one_round(options) for _ in range(arguments.rounds)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    for name, value in medians.items():
        print(f"{name:24} {value:14,.1f}")
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    record = {"machine": machine(1), "command": " ".join(["python", "benchmarks/feeding.py", *words])}
    print(f"Kept in {keep('feeding', {**record, 'medians': medians, 'rounds': rounds})}")


if __name__ == "__main__":
    main()
