"""Decoding speed, one thread: our search beside `generate` of transformers, and CTranslate2 where it is installed.

    python benchmarks/decoding.py MODEL SOURCE [--sentences 1000] [--rounds 3] [--beams 1 5] [--batches 64 1] [--json F]

All engines get the same batches (so many sentences, sorted by length) with the same limit. They take turns, round by
round, so that a noisy neighbour troubles all alike. "Same ids" counts sentences on which an engine's token ids equal
those of `generate`; of the others, "ties" have a score within 1e-5 of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers import AutoTokenizer

from metaphrase.decoding.engines import make_engine
from metaphrase.decoding.options import SearchOptions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

Batch = list[list[int]]
Run = Callable[[Batch], list[tuple[list[int], float | None]]]
"""A batch of sources -> ids (without `</s>`) and score of each."""
LIMIT = 100


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = MetaphraseForConditionalGeneration.from_pretrained(arguments.model).eval()
    lines = Path(arguments.source).read_text(encoding="utf-8").split("\n")[: arguments.sentences]
    sources = sorted(tokenizer([line for line in lines if line.strip()])["input_ids"], key=len)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 1 thread"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, **_ctranslate2_version()}
    print(f"{machine}; {versions}; {model.num_parameters():,} parameters; {len(sources)} sentences")
    print(f"{'':24}{'engine':20}{'sentences/s':>12}{'spread':>14}{'x generate':>12}{'same ids':>10}{'ties':>6}")
    results = []
    for batch_size in arguments.batches:
        for num_beams in arguments.beams:
            engines = _engines(model, num_beams, arguments.int8)
            chosen = sources[:: max(1, len(sources) // arguments.single)] if batch_size == 1 else sources
            rows = compare(engines, chosen, batch_size, arguments.rounds, clock)
            for row in rows:
                row |= {"beams": num_beams, "batch": batch_size}
                print(
                    f"{f'beams {num_beams}, batch {batch_size}':24}{row['engine']:20}{row['median']:12.1f}"
                    f"{row['lowest']:7.1f}-{row['highest']:<6.1f}{row['ratio']:12.2f}{row['same']:>10}{row['ties']:>6}",
                    flush=True,
                )
            results += rows
    if arguments.json:
        report = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions, "results": results}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def compare(
    engines: dict[str, Run], sources: list[list[int]], batch_size: int, rounds: int, clock: Callable[[], float]
) -> list[dict]:
    """Speed of each engine in sentences a second, and how its outputs compare with the first engine's."""
    batches = [sources[first : first + batch_size] for first in range(0, len(sources), batch_size)]
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    outputs = {}
    for run in engines.values():
        run(batches[0])
    for _ in range(rounds):
        for name, run in engines.items():
            start = clock()
            outputs[name] = [output for batch in batches for output in run(batch)]
            speeds[name].append(len(sources) / (clock() - start))
    reference = next(iter(engines))
    rows = []
    for name in engines:
        pairs = list(zip(outputs[name], outputs[reference], strict=True))
        differ = [pair for pair in pairs if pair[0][0] != pair[1][0]]
        ties = sum(a[1] is not None and b[1] is not None and abs(a[1] - b[1]) < 1e-5 for a, b in differ)
        ratios = [own / other for own, other in zip(speeds[name], speeds[reference], strict=True)]
        rows.append(
            {
                "engine": name,
                "median": statistics.median(speeds[name]),
                "lowest": min(speeds[name]),
                "highest": max(speeds[name]),
                "ratio": statistics.median(ratios),
                "same": len(pairs) - len(differ),
                "ties": ties,
            }
        )
    return rows


def _engines(model, num_beams: int, int8: bool) -> dict[str, Run]:
    options = SearchOptions(num_beams=num_beams, max_length=LIMIT)
    engines = {"generate": _run(make_engine("generate", [model], options))}
    engines["metaphrase"] = _run(make_engine("fast", [model], options))
    if _ctranslate2_version():
        for name in ("ctranslate2", "ctranslate2-int8")[: 2 if int8 else 1]:
            engines[name] = _run(make_engine(name, [model], options))
    return engines


def _run(engine) -> Run:
    def run(batch: Batch) -> list[tuple[list[int], float | None]]:
        found = engine(batch, [[1]] * len(batch))
        return [(_until_end(best[0].tokens), best[0].score) for best in found]

    return run


def _until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(2)] if 2 in tokens else tokens


def _ctranslate2_version() -> dict[str, str]:
    try:
        import ctranslate2
    except ImportError:
        return {}
    return {"ctranslate2": ctranslate2.__version__}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a trained metaphrase model")
    parser.add_argument("source", help="text file, a sentence a line")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--single", type=int, default=1000, help="how many of them at batch 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--int8", action="store_true", help="CTranslate2 with int8 weights, too")
    parser.add_argument("--cpu_time", action="store_true", help="count processor time: for a machine that others use")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
