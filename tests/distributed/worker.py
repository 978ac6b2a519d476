"""What every process of a distributed test runs: `train`, with options from a JSON file and, at will, a fault.

worker.py OPTIONS.json [--resume] [--fault fail|forward|backward|memory|kill|hang PROCESS UPDATE] …
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

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


class Breaking(torch.autograd.Function):
    """Lets a backward pass fail as torch's allocator of a CPU does."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def unsound(*_):
    raise IndexError("index 7 is out of range")


def starving(honest, accelerator, model, update, tokens, loss_of):
    """The real thing: the batch many times over, in an address space that has no room for it."""
    many = [{name: tensor.repeat(3000, 1) for name, tensor in batch.items()} for batch in update.batches]
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), before[1]))
    try:
        return honest(accelerator, model, replace(update, batches=many), tokens, loss_of)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def plant(faults: list[tuple[str, int, int]]) -> None:
    """Let forward or backward passes fail: (kind, process, number of its update, from 1)."""
    honest, calls = loop.add_share, 0

    def faulty(accelerator, model, update, tokens, loss_of):
        nonlocal calls
        calls += 1
        for kind, rank, call in faults:
            if accelerator.process_index == rank and calls == call:
                if kind == "memory":
                    return starving(honest, accelerator, model, update, tokens, loss_of)
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "hang":
                    time.sleep(600)
                broken = {
                    "fail": unsound,
                    "forward": out_of_memory,
                    "backward": lambda *given: Breaking.apply(loss_of(*given)),
                }
                return honest(accelerator, model, update, tokens, broken[kind])
        return honest(accelerator, model, update, tokens, loss_of)

    loop.add_share = faulty


def watch(folder: str) -> None:
    """Say so if a process that is not the first writes into the result folder."""
    place = os.path.abspath(folder)

    def hook(event: str, given: tuple) -> None:
        writes = event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "shutil.rmtree")
        writes |= (
            event == "open" and isinstance(given[2], int) and bool(given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        )
        if writes and isinstance(given[0], (str, os.PathLike)) and os.path.abspath(given[0]).startswith(place):
            print(f"A process that is not the first one writes: {event} {given[0]}", flush=True)

    if os.environ.get("RANK", "0") != "0":
        sys.addaudithook(hook)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("options")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fault", nargs=3, action="append", default=[])
    arguments = parser.parse_args()
    plant([(kind, int(rank), int(call)) for kind, rank, call in arguments.fault])
    options = read_options(arguments.options)
    watch(str(options.output))
    try:
        train(options, recipe_name="tiny", resume=arguments.resume)
    except MetaphraseError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
