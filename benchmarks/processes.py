"""What a second process brings: target tokens a second of one and of two processes of one thread, in turn.

    python benchmarks/processes.py [--updates 30] [--rounds 5] [--processes 2]

Every contender is `accelerate launch` with the shipped file for CPUs, and learns from the same made-up pairs by the
engine (`loop.learn`), in updates of the same two batches: one process adds them up, two take one each. Counted are
target tokens of all processes over the seconds from the third update to the last. "DDP" sends gradients during the
backward pass (`batches.max_out_of_memory: 0`); the others send them after it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import keep, machine, ratios, table, take_turns

WARM_UP = 2
CONFIG = Path(__file__).parents[1] / "configuration/accelerate/cpu_two_processes.yaml"
ONE = "1 process"


def child(updates: int, batches: int, overlapped: bool) -> None:
    """One process's part of a measurement; the first one prints the speed of all."""
    import torch
    from engine_overhead import Pairs, small_model

    from metaphrase.configuration.options import RunOptions
    from metaphrase.training import together
    from metaphrase.training.log import TrainLog
    from metaphrase.training.loop import Progress, Task, learn
    from metaphrase.training.run import start_processes
    from metaphrase.training.spread import prepare
    from metaphrase.training.stream import Stream

    options = RunOptions(max_updates=updates, trackers=[], threads=1)
    options.evaluation.every, options.optimizer.max_grad_norm = 10**9, 1.0
    laps: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        accelerator = start_processes(options, Path(folder))
        torch.manual_seed(1)
        model, optimizer = prepare(accelerator, small_model(), options.optimizer, compiled=False, overlapped=overlapped)
        log = TrainLog(Path(folder), accelerator, every=options.log_every)
        log.open(after=0)
        honest = log.update

        def lap(progress: Progress, *rest: object) -> None:
            laps.append((time.perf_counter(), progress.target_tokens))
            honest(progress, *rest)

        log.update = lap
        processes = accelerator.num_processes
        share = {"world_size": processes, "rank": accelerator.process_index, "accumulation": batches // processes}
        stream = Stream(Pairs(4000), tokens=2048, seed=1, **share)
        task = Task(accelerator, model, optimizer, stream, options, 1e-4, log, lambda _: None, lambda _: None)
        learn(task, Progress(), started=time.monotonic())
        log.close()
    (begin, before), (end, after) = laps[WARM_UP - 1], laps[-1]
    if accelerator.is_main_process:
        print(json.dumps({"tokens_per_second": (after - before) / (end - begin)}), flush=True)
    together.end(accelerator)


def measure(processes: int, batches: int, updates: int, overlapped: bool) -> float:
    """Target tokens a second of so many processes."""
    command = [
        sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(CONFIG),
        "--num_processes", str(processes), "--main_process_port", "0", __file__,
        "--child", "--batches", str(batches), "--updates", str(updates), *(["--overlapped"] if overlapped else []),
    ]  # fmt: skip
    setting = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=setting, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{processes} processes failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30, help="updates a measurement (default: 30)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contender (default: 5)")
    parser.add_argument("--processes", type=int, default=2, help="processes beside one (default: 2)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--overlapped", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.updates, arguments.batches, arguments.overlapped)

    several = f"{arguments.processes} processes"
    one_more = functools.partial(measure, batches=arguments.processes, updates=arguments.updates)
    measured = take_turns(
        {
            ONE: functools.partial(one_more, 1, overlapped=False),
            several: functools.partial(one_more, arguments.processes, overlapped=False),
            f"{several}, DDP": functools.partial(one_more, arguments.processes, overlapped=True),
        },
        arguments.rounds,
    )
    facts = machine(1)
    print(
        "\n".join(["", f"{facts['cpu']}, {facts['cores']} cores, {facts['date']}", *table(measured, several, "tok/s")])
    )
    speed_up = {name: ratios(measured, name, ONE) for name in measured if name != ONE}
    medians = {name: round(statistics.median(values), 3) for name, values in speed_up.items()}
    record = {
        "machine": facts,
        "command": " ".join(["python", "benchmarks/processes.py", *sys.argv[1:]]),
        "unit": "target tokens a second",
        "measured": measured,
        "speed_up_over_one_process": speed_up,
        "median_speed_up": medians,
    }
    print(json.dumps(medians))
    print(f"Kept in {keep('processes', record)}")
    return None


if __name__ == "__main__":
    main()
