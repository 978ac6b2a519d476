"""How a run starts on a corpus of ten million pairs, and what memory it holds over a whole epoch.

    python benchmarks/large_corpus.py --folder /tmp/large [--pairs 10000000] [--distinct 1000000] [--streaming]

Makes the corpus up (once), and runs `train` over it in a process of its own: once to read and tokenize, and once from
the cache, which is what is measured: seconds from the process's start to the end of the first update, and resident
memory there, after a stretch of real updates, and at every twentieth of the epoch. After the stretch the forward and
backward passes are left out, and only they, so that an epoch takes minutes: stream, batches, counts, clipping, Adam,
log, checkpoints are the engine's own. Memory is the process's resident set, which counts pages of mapped files too.

To save time only so many distinct pairs are made up; they are put after themselves, in the text files where the corpus
is streamed (so that all are read and tokenized), else in the cache.

With `--minutes M` the epoch is cut into pieces of about so long, each a process of its own that goes on where it was,
for a machine that is not to be held for longer; `--step prepare`, `measure` (one piece) and `record` do a part each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import keep, machine, resident

LINES = 100_000
REAL = 50
"""Updates with a real forward and backward pass, before the others."""
TOKENS = 4096


def make_up(folder: Path, pairs: int, copies: int) -> None:
    """Text files of made-up words, frequent and rare ones as in a language; a few lines to validate on."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    letters = np.array(list("eanirstdolugmkhcpbvfw"))
    words = np.array(["".join(random.choice(letters, random.integers(2, 9))) for _ in range(20_000)])
    chance = 1 / np.arange(10, len(words) + 10)
    for split, number in (("validation", 50), ("train", pairs)):
        files = [folder / f"{split}.{suffix}" for suffix in ("xx", "yy")]
        with files[0].open("w") as source, files[1].open("w") as target:
            for first in range(0, number, LINES):
                rows = min(LINES, number - first)
                lengths = random.poisson(10, rows) + 2
                drawn = words[random.choice(len(words), lengths.sum(), p=chance / chance.sum())].tolist()
                ends = np.cumsum(lengths).tolist()
                for begin, end in zip([0, *ends[:-1]], ends, strict=True):
                    source.write(" ".join(drawn[begin:end]) + "\n")
                    target.write(" ".join(drawn[begin:end][::-1]) + "\n")
    for file in files:
        once = file.read_bytes()
        with file.open("ab") as more:
            for _ in range(copies - 1):
                more.write(once)


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
        for key in ("read", "kept"):
            report[key] *= copies
        (file.parent / "report.json").write_text(json.dumps(report))


def memory() -> dict[str, int]:
    """Megabytes of this process: in memory now, of these its own (no page of a file), and the most so far."""
    names = {"resident_mb": "VmRSS", "own_mb": "RssAnon", "peak_mb": "VmHWM"}
    return {name: round(resident(field) / 1e6) for name, field in names.items()}


def run_options(folder: Path, streaming: bool):
    """A tiny model over the corpus."""
    from metaphrase.configuration.options import DataOptions, RunOptions

    options = RunOptions(output=str(folder / "run"), trackers=[], threads=1, log_every=1000, epochs=1.0)
    options.data = DataOptions(str(folder), source="xx", target="yy", test=None, streaming=streaming)
    options.model = {"preset": "base", "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}
    options.model |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    options.model |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    options.batches.tokens = TOKENS
    known = sorted((folder.parent / "arrow" / "cache").glob("tokenizer-*"))
    if streaming and known:  # the same first pairs give the same tokenizer: no need to train it twice
        options.tokenizer.path = str(known[0])
    options.evaluation.every, options.evaluation.metrics = 10**9, []
    options.checkpoints.every, options.checkpoints.keep_best = 2000, 1
    return options


def epoch(folder: Path, pairs: int, streaming: bool, updates: int | None, minutes: float | None) -> None:
    """An epoch of `train`, or a part of it; a JSON line a stage."""
    began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + _started()
    import torch

    from metaphrase.training import loop
    from metaphrase.training.run import train

    options = run_options(folder, streaming)
    options.max_updates, options.minutes = updates, None
    honest, update, calls, told = loop.add_share, loop.make, 0, 0
    twentieth = pairs // 20

    def tell(stage: str, **facts: object) -> None:
        print(json.dumps({"stage": stage, "seconds": round(time.time() - began, 1), **facts, **memory()}), flush=True)

    def made(task, progress, *rest):
        nonlocal calls, told
        outcome = update(task, progress, *rest)
        calls, seen = calls + 1, task.stream.position.seen
        if calls == 1:
            told = seen // twentieth
            tell("first update done", pairs=seen)
        if calls == REAL:
            tell("real updates done", updates=REAL)
        if seen // twentieth > told:
            told = seen // twentieth
            tell("epoch", twentieths=told, pairs=seen, updates=progress.updates)
        if minutes is not None and time.time() - began > 60 * minutes:
            os.kill(os.getpid(), signal.SIGTERM)  # the run saves, and says how to go on
        return outcome

    def share(accelerator, model, *rest):
        if calls < REAL:
            return honest(accelerator, model, *rest)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return torch.zeros((), dtype=torch.float64)

    loop.add_share, loop.make = share, made
    try:
        train(options, recipe_name="large", resume=(folder / "run").exists())
    except KeyboardInterrupt:
        tell("stopped")
    else:
        tell("end", updates_here=calls)


def _started() -> float:
    """When this process began, on the clock that counts from the machine's start."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def run(arguments: argparse.Namespace, *more: str) -> list[dict]:
    """A part of the epoch in a process of its own; what it told."""
    words = ["--folder", str(arguments.folder), "--pairs", str(arguments.pairs), "--step", "child", *more]
    setting = {**os.environ, "METAPHRASE_CACHE": str(arguments.folder / "cache"), "OMP_NUM_THREADS": "1"}
    facts = []
    command = [sys.executable, __file__, *words, *(["--streaming"] if arguments.streaming else [])]
    with subprocess.Popen(command, env=setting, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if line.startswith("{"):
                print(line, end="", flush=True)
                facts.append(json.loads(line))
    if child.returncode:
        raise SystemExit(f"the run ended with {child.returncode}")
    return facts


def prepare(arguments: argparse.Namespace) -> None:
    """The corpus and its cache."""
    copies = max(1, arguments.pairs // arguments.distinct)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    make_up(arguments.folder, arguments.pairs // copies, copies if arguments.streaming else 1)
    (arguments.folder / "first.json").write_text(json.dumps(run(arguments, "--updates", "3")))
    if not arguments.streaming:
        enlarge(arguments.folder / "cache", copies)
    shutil.rmtree(arguments.folder / "run")


def measure(arguments: argparse.Namespace) -> bool:
    """A piece of the epoch, put beside the others; whether it was the last."""
    facts = run(arguments, *(["--minutes", str(arguments.minutes)] if arguments.minutes else []))
    with (arguments.folder / "pieces.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")
    return facts[-1]["stage"] == "end"


def record(arguments: argparse.Namespace) -> None:
    """All pieces as a dated record."""
    pieces = [json.loads(line) for line in (arguments.folder / "pieces.jsonl").read_text().splitlines()]
    facts = [fact for piece in pieces for fact in piece]
    command = f"python benchmarks/large_corpus.py --folder FOLDER --pairs {arguments.pairs}"
    command += f" --distinct {arguments.distinct}" + (f" --minutes {arguments.minutes}" if arguments.minutes else "")
    by_twentieth = {fact["twentieths"]: fact["resident_mb"] for fact in facts if fact["stage"] == "epoch"}
    whole = {
        "machine": machine(1),
        "command": command + (" --streaming" if arguments.streaming else ""),
        "pairs": arguments.pairs,
        "batch_tokens": TOKENS,
        "first_start": json.loads((arguments.folder / "first.json").read_text()),
        "pieces": pieces,
        "summary": {
            "seconds_to_the_first_update": [f["seconds"] for f in facts if f["stage"] == "first update done"],
            "highest_resident_mb": max(fact["peak_mb"] for fact in facts),
            "resident_mb_by_twentieth": by_twentieth,
        },
    }
    print(json.dumps(whole["summary"]))
    print(f"Kept in {keep('large-corpus-' + ('streamed' if arguments.streaming else 'arrow'), whole)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000_000)
    parser.add_argument("--distinct", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--streaming", action="store_true", help="the corpus is streamed, not read into the cache")
    parser.add_argument("--minutes", type=float, help="cut the epoch into pieces of so long")
    parser.add_argument("--step", choices=("all", "prepare", "measure", "record", "child"), default="all")
    parser.add_argument("--updates", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step == "child":
        return epoch(arguments.folder, arguments.pairs, arguments.streaming, arguments.updates, arguments.minutes)
    arguments.folder /= "streamed" if arguments.streaming else "arrow"
    if arguments.step in ("all", "prepare"):
        prepare(arguments)
    if arguments.step in ("all", "measure"):
        while not measure(arguments) and arguments.step == "all":
            pass
    if arguments.step in ("all", "record"):
        record(arguments)
    return None


if __name__ == "__main__":
    main()
