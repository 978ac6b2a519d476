"""What `metaphrase plan` says of a run, beside what the run then shows: plan, train, plan, train … in turn.

    python benchmarks/planning.py multi30k_en_de --data FOLDER --minutes 2
    python benchmarks/planning.py g2p_cmudict --minutes 2

Any option of train may follow the recipe. Plan and run are processes of their own, on the same threads (one, unless
OMP_NUM_THREADS says otherwise). Compared are target tokens a second, updates made, minutes until trained, seconds of
the whole command, seconds of an evaluation, and the process's highest memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import keep, machine


def command(words: list[str]) -> tuple[str, float, int]:
    """Runs a `metaphrase` command: its standard output, seconds, and the most bytes it held."""
    reading, writing = os.pipe()
    began = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-m", "metaphrase", *words]
    child = os.posix_spawn(
        sys.executable,
        arguments,
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_CLOSE, reading)],
    )
    os.close(writing)
    with os.fdopen(reading) as output:
        text = output.read()
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"metaphrase {' '.join(words)} failed")
    return text, time.perf_counter() - began, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def predicted(words: list[str]) -> dict[str, Any]:
    """What the plan says, and how long it took to say it."""
    text, seconds, _ = command(["plan", *words, "--json", "-"])
    plan = json.loads(text)
    found = plan["measured"]
    return {
        "tokens_per_second": plan["tokens_per_second"],
        "parameters": plan["parameters"],
        "updates": plan["end"]["updates"],
        "minutes": plan["end"]["trained"] / 60,
        "seconds": plan["end"]["seconds"] + plan["imports"],
        "evaluation_seconds": found["loss"] + found["greedy"] + found["metrics"],
        "memory": plan["memory"]["process"],
        "plan_seconds": seconds,
    }


def shown(words: list[str]) -> dict[str, Any]:
    """What the run shows."""
    with tempfile.TemporaryDirectory(prefix="metaphrase-bench-") as scratch:
        folder = Path(scratch) / "run"
        _, seconds, memory = command(["train", *words, "--output", str(folder)])
        results = json.loads((folder / "results.json").read_text())
        log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return {
        "tokens_per_second": results["training"]["tokens_per_second"],
        "parameters": results["model"]["parameters"],
        "updates": results["training"]["updates"],
        "minutes": results["training"]["minutes"],
        "seconds": seconds,
        "evaluation_seconds": statistics.median(r["evaluation_seconds"] for r in log if r["kind"] == "evaluation"),
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--rounds", type=int, default=2)
    arguments, rest = parser.parse_known_args()
    words = [arguments.recipe, *rest]
    rounds = []
    for number in range(arguments.rounds):
        rounds.append({"predicted": predicted(words), "shown": shown(words)})
        print(f"round {number + 1}", json.dumps(rounds[-1]), flush=True)
    names = rounds[0]["shown"]
    print("| | predicted | shown | predicted / shown, each round |\n|---|---|---|---|")
    for name in names:
        sides = [[one[side][name] for one in rounds] for side in ("predicted", "shown")]
        ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(*sides, strict=True))
        print(f"| {name} | {statistics.mean(sides[0]):,.2f} | {statistics.mean(sides[1]):,.2f} | {ratios} |")
    shown_words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    record = {"machine": machine(threads), "command": " ".join(["python", "benchmarks/planning.py", *shown_words])}
    print(f"Kept in {keep(f'planning-{Path(arguments.recipe).stem}', {**record, 'rounds': rounds})}")


if __name__ == "__main__":
    main()
