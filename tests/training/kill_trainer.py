"""Run by test_killed: trains in child processes that SIGKILL ends again and again, and looks at what is left.

    python kill_trainer.py OPTIONS.json KILLS SEED

Everything is imported once; each child is a fork that trains with `resume=True`. Half of the children are killed after
a random time, half kill themselves at a random call of a function that writes. Prints a JSON summary.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import evaluate  # noqa: F401  the imports that a child would otherwise repeat
import torch

from metaphrase.configuration.options import (
    BatchOptions,
    CheckpointOptions,
    DataOptions,
    EvaluationOptions,
    OptimizerOptions,
    RunOptions,
    TokenizerOptions,
)
from metaphrase.training import checkpoint, states
from metaphrase.training.run import train

GROUPS = {
    "data": DataOptions,
    "tokenizer": TokenizerOptions,
    "batches": BatchOptions,
    "optimizer": OptimizerOptions,
    "evaluation": EvaluationOptions,
    "checkpoints": CheckpointOptions,
}


def read_options(path: str) -> RunOptions:
    values = json.loads(Path(path).read_text())
    return RunOptions(**{key: GROUPS[key](**value) if key in GROUPS else value for key, value in values.items()})


def die_at(call: int) -> None:
    """Kill this process at the n-th call of a function that writes; a safetensors file is then half written."""
    calls = 0

    def counted(function, half=False):
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                if half:
                    function(*args, **kwargs)
                    os.truncate(args[0], os.path.getsize(args[0]) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    os.fsync, os.rename, os.replace = counted(os.fsync), counted(os.rename), counted(os.replace)
    states.save_tensors = counted(states.save_tensors, half=True)
    shutil.rmtree = counted(shutil.rmtree)


def child(options: RunOptions, call: int | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        if call is not None:
            die_at(call)
        train(options, recipe_name="killed", resume=True)
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    options, kills, draw = read_options(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    root = Path(options.output) / "checkpoints"
    newest = done = by_time = by_call = 0
    began = time.monotonic()
    pid = child(options, 1)  # how long a start takes on this machine, with the cache warm
    os.waitpid(pid, 0)
    pace = time.monotonic() - began
    while by_time + by_call < kills and not done:
        call = draw.randint(1, 60) if draw.random() < 0.5 else None
        pid = child(options, call)
        if call is None:
            time.sleep(pace * draw.uniform(0.3, 2.5))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        done = os.WIFEXITED(status)
        assert not done or os.WEXITSTATUS(status) == 0, f"a child failed with {status}"
        by_time, by_call = by_time + (not done and call is None), by_call + (not done and call is not None)
        for _, path in checkpoint.list_checkpoints(root):
            checkpoint.verify(path)  # whatever bears a checkpoint's name is whole
        update = max((update for update, _ in checkpoint.list_checkpoints(root)), default=0)
        assert update >= newest, f"update {newest} was saved, and now {update} is the newest"
        newest = update
    pid = child(options, None)
    _, status = os.waitpid(pid, 0)
    print(json.dumps({"by_time": by_time, "by_call": by_call, "newest": newest, "status": status}))


if __name__ == "__main__":
    main()
