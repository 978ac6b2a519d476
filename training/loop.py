"""The training loop, top to bottom: batches, loss, gradient, guard, step, log, evaluation, checkpoint.

One update learns from `processes x accumulation` micro-batches. Its loss is a sum over target tokens, divided by the
number of target tokens of the WHOLE update. So the tokens are counted first, over all micro-batches and processes, and
each micro-batch's sum is divided by that count: the gradient does not depend on how the update was cut.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import RunOptions
from metaphrase.training import parts, together
from metaphrase.training.log import TrainLog
from metaphrase.training.objective import Loss, make_loss, plain_loss
from metaphrase.training.running_mean import RunningMean
from metaphrase.training.schedule import learning_rate, set_learning_rate
from metaphrase.training.spread import hold_back
from metaphrase.training.stream import Stream, Update
from metaphrase.training.together import share_counts

NORM_MEMORY = 50
"""Updates over which the running mean of gradient norms forgets."""


@dataclass
class Progress:
    """What changes while a run goes on and a checkpoint must hold, besides weights, moments and random states."""

    updates: int = 0
    skipped: int = 0
    """Updates whose gradient was not finite or far too large; they changed nothing."""
    skipped_in_a_row: int = 0
    out_of_memory: int = 0
    """Updates that were left out because memory was short."""
    mean_norm: float = 0.0
    """Running mean of the gradient's norm."""
    seconds: float = 0.0
    """Seconds spent up to here, in every command that worked on this run."""
    training_seconds: float = 0.0
    """Seconds spent on updates alone."""
    target_tokens: int = 0
    evaluated: int = 0
    """Update of the last evaluation."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Of each evaluation: `update`, `score` (of the metric that chooses), `loss`."""
    without_gain: int = 0
    """Evaluations since the best one."""
    window: dict[str, float] = field(default_factory=dict)
    """Sums since the last record of the log."""


@dataclass
class Task:
    """What the loop works with."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream: Stream
    options: RunOptions
    peak: float
    """Highest learning rate."""
    log: TrainLog
    evaluate: Callable[[Progress], None]
    """Scores the model and enters the result into the progress."""
    save: Callable[[Progress], None]
    """Writes a checkpoint."""
    mean: RunningMean | None = None


@dataclass
class Outcome:
    """What came of one update."""

    made: bool
    """Whether the weights changed."""
    signalled: bool
    time_up: bool
    rate: float
    """Learning rate."""
    loss: float | None = None
    """This process's share of the loss a token; None where memory was short."""
    norm: float = math.nan
    tokens: float = 0.0


def learn(task: Task, progress: Progress, *, started: float) -> str:
    """Train until a budget is spent, the score no longer improves, or a signal comes. Returns why it ended.

    Args:
        task: model, data and what to call.
        progress: changed in place.
        started: `time.monotonic()` of the command's start, less the seconds of earlier commands.

    Raises:
        MetaphraseError: too many updates had no finite gradient or found no memory, or a process failed.
    """
    accelerator, model, options = task.accelerator, task.model, task.options
    evaluation, saving = options.evaluation, options.checkpoints
    budget = Budget(options, task.stream, started)
    updates = together.fetched(accelerator, model, task.stream)

    def after(made: bool, signalled: bool, time_up: bool) -> str:
        """Score and save what is due after an update, or on coming back to one; why to stop, or nothing."""
        reason = budget.spent(progress) or ("signal" if signalled else "time" if time_up else "")
        due = is_due(progress.updates, evaluation.every, task.stream) or (reason and reason != "signal")
        due = due and reason != "signal" and progress.evaluated < progress.updates
        if due:
            before = time.monotonic()
            with together.naming(accelerator, f"in the evaluation after update {progress.updates}"):
                task.evaluate(progress)
            model.train()
            budget.took(evaluation=time.monotonic() - before)
            progress.seconds = time.monotonic() - started
            if not reason and evaluation.patience is not None and progress.without_gain >= evaluation.patience:
                reason = "patience"
        if due or (made and (reason or (saving.every and progress.updates % saving.every == 0))):
            task.save(progress)
        return reason

    model.train()
    with Interruption() as interruption:
        _, _, time_up = share_counts(accelerator, 0, False, budget.time_is_up()).tolist()
        reason = after(False, False, bool(time_up))
        while not reason:
            clock = time.monotonic()
            update = next(updates)
            with together.naming(accelerator, f"in update {progress.updates + 1}", update):
                counts = share_counts(accelerator, update.tokens, bool(interruption.signal), budget.time_is_up())
                outcome = make(task, progress, update, counts)
            budget.took(update=time.monotonic() - clock)
            progress.training_seconds += time.monotonic() - clock
            progress.seconds = time.monotonic() - started
            task.log.update(progress, task.stream, outcome)
            reason = after(outcome.made, outcome.signalled, outcome.time_up)
    return reason


def make(task: Task, progress: Progress, update: Update, counts: torch.Tensor) -> Outcome:
    """Gradients, guard and step of one update, or of none where the update has to be left out.

    Args:
        counts: sums over all processes: target tokens, signals to stop, clocks that ran out.

    Raises:
        MetaphraseError: a batch could not be learned from, or too many updates were left out.
    """
    accelerator, model, optimizer, rule = task.accelerator, task.model, task.optimizer, task.options.optimizer
    rate = learning_rate(progress.updates + 1, peak=task.peak, warmup=rule.warmup)
    set_learning_rate(optimizer, rate)
    loss, faults = None, None
    try:
        loss = add_gradients(accelerator, model, update, counts[0], make_loss(rule.rdrop))
    except together.BatchFailed as error:
        if not (error.memory and together.votes(model) and task.options.batches.max_out_of_memory):
            raise
        faults = error.faults
    if loss is None:
        optimizer.zero_grad()
        skip_out_of_memory(task, progress, update, faults)
        tokens, signalled, time_up = counts.tolist()
        return Outcome(False, bool(signalled), bool(time_up), rate)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = accelerator.clip_grad_norm_(parameters, rule.max_grad_norm or math.inf)
    loss, norm, tokens, signalled, time_up = torch.stack([loss, full(norm), *counts]).tolist()
    good = is_good(norm, progress, rule.skip_above)
    if good or accelerator.scaler is not None:  # a scaler skips by itself, and must see the bad ones
        optimizer.step()
    optimizer.zero_grad()
    made = good and not getattr(optimizer, "step_was_skipped", False)
    if made:
        progress.updates, progress.skipped_in_a_row = progress.updates + 1, 0
        progress.mean_norm += (norm - progress.mean_norm) / min(progress.updates, NORM_MEMORY)
        if task.mean is not None:
            task.mean.update()
    else:
        skip(task, progress, update, norm)
    progress.target_tokens += int(tokens)
    return Outcome(made, bool(signalled), bool(time_up), rate, loss, norm, tokens)


def add_gradients(
    accelerator: Accelerator, model: nn.Module, update: Update, tokens: torch.Tensor, loss_of: Loss = plain_loss
) -> torch.Tensor:
    """Add the gradient of an update to the model's; returns this process's share of the loss a token.

    Raises:
        BatchFailed: a batch could not be learned from, here or, under `together.votes`, anywhere: then on all alike.
    """
    if not together.votes(model):
        return add_share(accelerator, model, update, tokens, loss_of)
    fault, loss = update.fault, torch.zeros((), dtype=torch.float64, device=accelerator.device)
    try:
        loss = add_share(accelerator, model, update, tokens, loss_of)
    except together.BatchFailed as error:
        fault = error.faults[0]  # the error itself goes, and with it all that its traceback holds in memory
    if fault is not None:
        together.free_memory(accelerator)
    together.agree(accelerator, fault)
    together.add_up(accelerator, model)
    return loss


def add_share(
    accelerator: Accelerator, model: nn.Module, update: Update, tokens: torch.Tensor, loss_of: Loss
) -> torch.Tensor:
    """The part of `add_gradients` that is this process's own.

    DDP and FSDP take the mean over processes where a sum is due, hence the factor. There gradients travel once, with
    the last micro-batch.

    Raises:
        BatchFailed: names the process and the batch.
    """
    factor = 1 if together.votes(model) else accelerator.num_processes
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for number, batch in enumerate(update.batches):
        last = number + 1 == len(update.batches)
        try:
            batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
            with contextlib.nullcontext() if last else hold_back(model):
                total += parts.backward(accelerator, model, batch, tokens, loss_of, factor)
        except Exception as error:
            if together.is_connection(error):
                raise
            raise together.BatchFailed([together.fault_of(error, accelerator, update, number)]) from error
    return total


def full(norm: torch.Tensor) -> torch.Tensor:
    """A gradient norm as a plain float64 scalar."""
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).double()


def is_good(norm: float, progress: Progress, skip_above: float | None) -> bool:
    """Whether a gradient may change the weights: finite, and not far above the running mean of norms."""
    if skip_above is not None and progress.updates >= NORM_MEMORY and norm > skip_above * progress.mean_norm:
        return False
    return math.isfinite(norm)


def skip(task: Task, progress: Progress, update: Update, norm: float) -> None:
    """Count and list an update that changed nothing because of its gradient.

    Raises:
        MetaphraseError: too many in a row.
    """
    progress.skipped, progress.skipped_in_a_row = progress.skipped + 1, progress.skipped_in_a_row + 1
    said = norm if math.isfinite(norm) else str(norm)
    list_skipped(task, progress, update, reason="gradient not finite or far too large", grad_norm=said)
    if progress.skipped_in_a_row >= task.options.optimizer.max_skipped:
        raise MetaphraseError(
            f"{progress.skipped_in_a_row} updates in a row after update {progress.updates} had a gradient that is not "
            f"finite or far too large (norm {norm:.3g}, usually {progress.mean_norm:.3g}); lower "
            "optimizer.learning_rate or lengthen optimizer.warmup, and go on from a checkpoint before."
        )


def skip_out_of_memory(task: Task, progress: Progress, update: Update, faults: list[together.Fault]) -> None:
    """Count, list and tell an update that all processes left out because memory was short on one.

    Raises:
        MetaphraseError: it is one too many.
    """
    progress.out_of_memory += 1
    most, told = task.options.batches.max_out_of_memory, "; ".join(map(str, faults))
    processes = [fault.process for fault in faults]
    list_skipped(task, progress, update, reason="out of memory", processes=processes, detail=told)
    if progress.out_of_memory > most:
        raise MetaphraseError(
            f"{progress.out_of_memory} updates found no memory, more than batches.max_out_of_memory {most}. {told}. "
            "Lower batches.tokens, raise batches.accumulation to match, and go on with --resume."
        )
    task.log.say(f"{told}. The update is left out ({progress.out_of_memory} of at most {most}).")


def list_skipped(task: Task, progress: Progress, update: Update, **facts: Any) -> None:
    """A record of the log with the pairs that nothing was learned from."""
    pairs = [int(index) for batch in update.pairs for index in batch]
    place = {"epoch": task.stream.position.epoch, "window": task.stream.position.window}
    task.log.write({"kind": "skipped", "update": progress.updates + 1, **facts, **place, "pairs": pairs})


def is_due(update: int, every: int | None, stream: Stream) -> bool:
    """Whether an evaluation follows this update: each `every` updates, or at the end of each pass."""
    if every is not None:
        return update % every == 0
    return stream.ends_a_pass()


class Budget:
    """Updates, passes and minutes that a run may take; whichever is spent first ends it."""

    def __init__(self, options: RunOptions, stream: Stream, started: float) -> None:
        self.options, self.stream, self.started = options, stream, started
        self.longest_evaluation = self.longest_update = 0.0

    def took(self, evaluation: float = 0.0, update: float = 0.0) -> None:
        """Time is kept for one more update, the last evaluation, and that of the averaged model."""
        self.longest_evaluation = max(self.longest_evaluation, evaluation)
        self.longest_update = max(self.longest_update, update)

    def time_is_up(self) -> bool:
        """Whether the time left is only enough for an update and the last two evaluations."""
        if self.options.minutes is None:
            return False
        elapsed = time.monotonic() - self.started
        return elapsed + self.longest_update + 2 * self.longest_evaluation >= 60 * self.options.minutes

    def spent(self, progress: Progress) -> str:
        """Which of updates and passes is spent, or nothing."""
        if self.options.max_updates is not None and progress.updates >= self.options.max_updates:
            return "updates"
        if self.options.epochs is not None and self.stream.epochs >= self.options.epochs:
            return "epochs"
        return ""

    def left(self, progress: Progress) -> float:
        """Part of the run still to come, from 1 to 0."""
        done = [0.0]
        if self.options.max_updates:
            done.append(progress.updates / self.options.max_updates)
        if self.options.epochs:
            done.append(self.stream.epochs / self.options.epochs)
        if self.options.minutes:
            done.append(progress.seconds / (60 * self.options.minutes))
        return max(0.0, 1 - max(done))


class Interruption:
    """Takes SIGINT and SIGTERM as a wish to stop after the current update; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}
        self._at = 0.0

    @property
    def name(self) -> str:
        return signal.Signals(self.signal).name if self.signal else ""

    def __enter__(self) -> Interruption:
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: object) -> None:
        if number == signal.SIGINT and self.signal is not None and time.monotonic() - self._at > 1:
            raise KeyboardInterrupt
        self.signal, self._at = number, time.monotonic()
        print("\nStopping after this update and saving; press Ctrl-C again to leave at once.", file=sys.stderr)
