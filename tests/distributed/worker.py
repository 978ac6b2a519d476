"""What every process of a distributed test runs: `train`, with options from a JSON file and, at will, a fault.

worker.py OPTIONS.json [--resume] [--fault fail|hang RANK CALL]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from metaphrase.configuration import options as groups
from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training import loop
from metaphrase.training.run import train

GROUPS = {
    "data": groups.DataOptions,
    "tokenizer": groups.TokenizerOptions,
    "batches": groups.BatchOptions,
    "optimizer": groups.OptimizerOptions,
    "evaluation": groups.EvaluationOptions,
    "checkpoints": groups.CheckpointOptions,
}


def read_options(path: str) -> groups.RunOptions:
    values = json.loads(Path(path).read_text())
    return groups.RunOptions(**{key: GROUPS[key](**value) if key in GROUPS else value for key, value in values.items()})


def plant(fault: str, rank: int, call: int) -> None:
    """Let a forward pass of one process fail, or never end."""
    honest, calls = loop.add_gradients, 0

    def faulty(accelerator, model, update, tokens, loss_of):
        nonlocal calls
        calls += 1
        if accelerator.process_index == rank and calls == call:
            if fault == "hang":
                time.sleep(600)

            def loss_of(*_):
                raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 byte")

        return honest(accelerator, model, update, tokens, loss_of)

    loop.add_gradients = faulty


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("options")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fault", nargs=3)
    arguments = parser.parse_args()
    if arguments.fault:
        plant(arguments.fault[0], int(arguments.fault[1]), int(arguments.fault[2]))
    try:
        train(read_options(arguments.options), recipe_name="tiny", resume=arguments.resume)
    except MetaphraseError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)


if __name__ == "__main__":
    main()
