"""What a run will cost, told before it is started: `metaphrase plan`.

Each figure is counted (from the data and the model's sizes: exact), measured (by `measure.py`, on this machine, now),
or assumed, and says which. An update takes a x (operations of its batches) + b, both measured; what an epoch's batches
cost is counted batch by batch, so that a few measured batches stand for all.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.limits import check_end, check_limits
from metaphrase.configuration.options import RunOptions
from metaphrase.training import costs, kernels
from metaphrase.training.assumed import Assumptions
from metaphrase.training.finish import hardware
from metaphrase.training.judge import Judge
from metaphrase.training.log import TrainLog
from metaphrase.training.material import Material, gather
from metaphrase.training.measure import Measurement, measure
from metaphrase.training.run import build_model, find_tokens, start_processes
from metaphrase.training.stream import Stream

CACHED = 2.0
"""Seconds of reading above which the data are read again, to tell what a start from the cache takes."""
DOUBLE = 8
"""Bytes of a float64, in which checkpoints are averaged."""


@dataclass
class Epoch:
    """A pass over the data, counted."""

    pairs: int
    target_tokens: int
    micro_batches: int
    updates: int
    flops: int
    slowest_share: int
    """Operations of the process that has the most to do in each update, summed over updates."""
    largest: tuple[int, int, int]
    """Pairs, source and target length of the batch that takes the most memory."""
    whole: bool = True
    """False where the corpus is streamed: this is its first window."""


@dataclass
class Plan:
    """All that `metaphrase plan` tells; sizes in bytes, times in seconds."""

    recipe: str
    hardware: str
    parameters: int
    accumulation: int
    batch_tokens: int
    flops_a_token: float
    epoch: Epoch
    memory: dict[str, int]
    measured: Measurement
    update: float
    tokens_per_second: float
    tests: int
    """Lines of the test split."""
    start: float
    """From the command's first line to its first update, data from the cache."""
    imports: float
    """Processor time of the command before that."""
    first_reading: float | None
    """Reading and tokenizing just now, where it was not in the cache."""
    finish: float
    checkpoint_bytes: int
    checkpoints: int
    end: dict[str, Any]
    milestones: list[dict[str, float]] = field(default_factory=list)
    gpus: dict[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def make_plan(
    options: RunOptions,
    *,
    recipe_name: str,
    gpus: int | None = None,
    seconds: float = 10.0,
    assumptions: Assumptions | None = None,
    imports: float = 0.0,
    tell: Callable[[str, float], None] = lambda what, done: None,
) -> Plan:
    """Read the run's data as it would, measure for so many seconds, and count the rest. Nothing is written.

    Args:
        options: the run.
        gpus: also tell what so many GPUs would do.
        seconds: what measuring updates may take; the rest takes about as much again.
        imports: what the command took before it came here.
        tell: (what is being done, part of it that is done).

    Raises:
        MetaphraseError: anything wrong with the run, in one sentence, as in `train`; or a number that cannot be.
    """
    check_limits(options)
    if gpus is not None and gpus < 1:
        raise MetaphraseError(f"--gpus is {gpus}; it must be 1 or more")
    if not seconds > 0:
        raise MetaphraseError(f"--seconds is {seconds}; it must be above 0")
    options = replace(options, trackers=[])
    place = Path(options.output or f"runs/{recipe_name}")
    with (
        contextlib.ExitStack() as stack,
        tempfile.TemporaryDirectory(dir=nearest_folder(place), prefix=".metaphrase-plan-") as scratch,
    ):
        stack.callback(kernels.remove)
        folder = Path(scratch)
        accelerator = start_processes(options, folder)
        if accelerator.num_processes > 1:
            raise MetaphraseError("plan runs in one process; give the number of GPUs by --gpus")
        tell("reading the data", 0.0)
        material, reading, first_reading = read_twice(options, accelerator)
        began = time.monotonic()
        model = build_model(options, material.tokenizer).to(accelerator.device)
        if options.batches.tokens == "auto":
            tokens = find_tokens(model, material, options, accelerator)
            options = replace(options, batches=replace(options.batches, tokens=tokens))
        log = TrainLog(folder, accelerator, every=1, show=False)
        judge = Judge(material.validation, material.tokenizer, options, model.config, accelerator, log)
        start = reading + time.monotonic() - began
        measured = measure(options, material, model, accelerator, judge, folder, seconds=seconds, tell=tell)
        tell("", 1.0)
    epoch = count_epoch(options, material, model.config, processes=1)
    update = epoch.flops / epoch.updates * measured.a_flop + measured.step
    run = Run(options, epoch, update, measured, start)
    # Lines of the test split are counted for the time that they will take; nothing else is done with them.
    tests = len(material.read_test() or ()) if material.has_test and options.data.test is not None else 0
    finish = finish_seconds(run, tests=tests)
    ema = options.optimizer.ema is not None
    memory = {**asdict(costs.training_memory(model.config, *epoch.largest, running_mean=ema))}
    memory["formula"] = costs.training_memory(model.config, *epoch.largest, running_mean=ema).peak
    # At the end the final model and the average of checkpoints stand beside what training held.
    memory["process"] = measured.memory + (2 * costs.FLOAT + DOUBLE) * model.num_parameters()
    unseen = 1 - measured.batch_tokens / int(options.batches.tokens)  # of the activations, where batches were smaller
    memory["process"] += int(unseen * memory["activations"])
    plan = Plan(
        recipe=recipe_name,
        hardware=hardware(accelerator),
        parameters=model.num_parameters(),
        accumulation=options.batches.accumulation,
        batch_tokens=int(options.batches.tokens),
        flops_a_token=epoch.flops / epoch.target_tokens,
        epoch=epoch,
        memory=memory,
        measured=measured,
        update=update,
        tokens_per_second=epoch.target_tokens / epoch.updates / update,
        tests=tests,
        start=start,
        imports=imports,
        first_reading=first_reading,
        finish=finish,
        checkpoint_bytes=costs.checkpoint_bytes(model.config, running_mean=ema),
        checkpoints=options.checkpoints.keep_last + options.checkpoints.keep_best,
        end=run.end(finish),
        milestones=[{"updates": n, "epochs": n / epoch.updates, "seconds": run.time_of(n)} for n in run.milestones()],
    )
    if gpus is not None:
        here = accelerator.device.type == "cuda"
        plan.gpus = on_gpus(
            options, material, model.config, gpus, assumptions or Assumptions(), measured if here else None
        )
    return plan


def nearest_folder(place: Path) -> Path:
    """The nearest folder above a result folder that is there: on the same disk, most likely."""
    return next(folder for folder in place.resolve().parents if folder.is_dir())


def read_twice(options: RunOptions, accelerator: Any) -> tuple[Material, float, float | None]:
    """The data, how long reading takes from the cache, and how long it took now where that was much longer."""
    import datasets  # noqa: F401  (its import is not part of the reading)

    began = time.monotonic()
    material = gather(options, accelerator)
    first = time.monotonic() - began
    if first < CACHED or options.data.streaming:
        return material, first, None
    began = time.monotonic()
    material = gather(options, accelerator)
    again = time.monotonic() - began
    return material, again, first if first > 1.5 * again else None


def count_epoch(options: RunOptions, material: Material, config: MetaphraseConfig, *, processes: int) -> Epoch:
    """Everything about a pass that follows from the lengths of its pairs and the plan of its batches."""
    stream = Stream(material, tokens=int(options.batches.tokens), seed=options.seed)
    plan, window, begins = stream.plan, stream.window, stream.plan.starts[:-1]
    sources, targets = (np.asarray(side)[plan.order] for side in (window.source_lengths, window.target_lengths))
    rows = np.diff(plan.starts).astype(np.int64)
    source, target = (np.maximum.reduceat(side, begins).astype(np.int64) for side in (sources, targets))
    flops = costs.TRAINING * rows * costs.forward_flops(config, source, target)
    if options.optimizer.rdrop:
        flops = 2 * flops
    most = int((costs.activation_bytes(config, rows, source, target)).argmax())
    group = processes * options.batches.accumulation
    updates = -(-len(flops) // group)
    shares = np.zeros(updates * group, dtype=np.int64)
    shares[: len(flops)] = flops
    shares = shares.reshape(updates, options.batches.accumulation, processes).sum(1).max(1)
    return Epoch(
        pairs=plan.pairs,
        target_tokens=int(targets.sum(dtype=np.int64)),
        micro_batches=len(flops),
        updates=updates,
        flops=int(flops.sum()),
        slowest_share=int(shares.sum()),
        largest=(int(rows[most]), int(source[most]), int(target[most])),
        whole=material.pairs is not None,
    )


@dataclass
class Run:
    """A run as time goes by."""

    options: RunOptions
    epoch: Epoch
    update: float
    measured: Measurement
    start: float

    @property
    def every(self) -> int:
        """Updates between two evaluations."""
        return self.options.evaluation.every or self.epoch.updates

    @property
    def pause(self) -> float:
        """An evaluation and its checkpoint."""
        return self.measured.evaluation + self.measured.checkpoint

    def time_of(self, updates: float, *, last: bool = False) -> float:
        """Seconds from the command's start to the end of an update, evaluations and checkpoints up to it included."""
        pauses = math.floor(updates / self.every)
        saved = math.floor(updates / self.options.checkpoints.every) if self.options.checkpoints.every else 0
        pauses += bool(last and updates % self.every)
        return self.start + updates * self.update + pauses * self.pause + saved * self.measured.checkpoint

    def last_update(self) -> tuple[int, str]:
        """The update after which the run ends, and which of its limits that is; as `loop.Budget` has it."""
        check_end(self.options)
        ends: list[tuple[int, str]] = []
        if self.options.max_updates is not None:
            ends.append((self.options.max_updates, "max_updates"))
        if self.options.epochs is not None and self.epoch.whole:
            ends.append((math.ceil(self.options.epochs * self.epoch.updates), "epochs"))
        if self.options.minutes is not None:
            ends.append((self._within(60 * self.options.minutes - self.start), "minutes"))
        if not ends:
            raise MetaphraseError(
                "How long a pass over a stream is, is not known before it: set max_updates or minutes."
            )
        return min(ends)

    def _within(self, seconds: float) -> int:
        """Updates that fit. As soon as the loop knows what an evaluation takes, it keeps time for two."""
        before_the_first = math.floor(seconds / self.update)
        if before_the_first < self.every:
            return max(1, before_the_first)
        a_round = self.every * self.update + self.pause
        seconds -= 2 * self.measured.evaluation
        rounds = max(0, math.floor(seconds / a_round))
        rest = max(0, math.floor((seconds - rounds * a_round) / self.update))
        return max(self.every, rounds * self.every + min(rest, self.every))

    def end(self, finish: float) -> dict[str, Any]:
        """The run's end."""
        updates, why = self.last_update()
        trained = self.time_of(updates, last=True)
        return {
            "why": why,
            "updates": updates,
            "epochs": updates / self.epoch.updates,
            "evaluations": math.ceil(updates / self.every),
            "trained": trained,
            "seconds": trained + finish,
        }

    def milestones(self) -> list[int]:
        """1,000, 10,000 … and an epoch, as far as they lie before the end."""
        last, _ = self.last_update()
        return sorted({n for n in (self.epoch.updates, 100, 1000, 10_000, 100_000, 1_000_000) if n < last})


def finish_seconds(run: Run, *, tests: int) -> float:
    """The best checkpoint, the average of the best and the running mean are each scored, then the test lines once."""
    evaluations = run.end(0.0)["evaluations"]
    candidates = 1 + (evaluations > 1 and run.options.checkpoints.keep_best > 1)
    candidates += run.options.optimizer.ema is not None
    return candidates * run.measured.evaluation + run.measured.beam * tests


def on_gpus(
    options: RunOptions,
    material: Material,
    config: MetaphraseConfig,
    gpus: int,
    assumed: Assumptions,
    measured: Measurement | None,
) -> dict[str, Any]:
    """The same arithmetic for N GPUs.

    Args:
        measured: of a GPU like those, where one is at hand; else its speed is assumed.
    """
    ema, batches = options.optimizer.ema is not None, options.batches.accumulation
    epochs = [count_epoch(options, material, config, processes=number) for number in (1, gpus)]
    times = [
        assumed.update(config, number, epoch.slowest_share / epoch.updates, batches, ema=ema)
        for number, epoch in zip((1, gpus), epochs, strict=True)
    ]
    if measured is not None:
        times = [
            replace(
                time, operations=epoch.slowest_share / epoch.updates * measured.a_flop, launches=0, step=measured.step
            )
            for time, epoch in zip(times, epochs, strict=True)
        ]
    alone, speed = (
        epoch.target_tokens / epoch.updates / time.seconds for time, epoch in zip(times, epochs, strict=True)
    )
    epoch, update = epochs[1], times[1]
    run = Run(replace(options, minutes=None), epoch, update.seconds, Measurement(), 0.0)
    ends = options.max_updates is not None or (options.epochs is not None and epoch.whole)
    updates = run.last_update()[0] if ends else None
    return {
        "gpus": gpus,
        "assumptions": asdict(assumed),
        "measured_speed": measured is not None,
        "update": update.seconds,
        "sending": update.sending,
        "bound": "launches" if update.launches > update.operations else "operations",
        "balance": epoch.flops / (gpus * epoch.slowest_share),
        "efficiency": speed / (gpus * alone),
        "tokens_per_second": speed,
        "tokens_an_update": epoch.target_tokens / epoch.updates,
        "updates_an_epoch": epoch.updates,
        "epoch": epoch.updates * update.seconds,
        "memory": costs.training_memory(config, *epoch.largest, running_mean=ema).peak,
        "updates": updates,
        "seconds": updates * update.seconds if updates is not None else None,
    }
