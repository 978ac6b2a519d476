"""What a run will take, measured in seconds on the machine at hand, by the code that runs.

Updates are made by `loop.learn` on the run's own batches in their own order, and thrown away; the loss of validation
batches, searches and a checkpoint are timed by the functions that do them. A part stands for the whole in proportion to
the operations that `costs.py` counts.

Searches write as many words as the reference has: so long are the outputs of a model that has learned.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.options import RunOptions
from metaphrase.decoding.batches import length_sorted_batches
from metaphrase.decoding.greedy import Task as SearchTask
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.search import search
from metaphrase.decoding.weights import read_weights
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import checkpoint, costs, evaluate, spread, states
from metaphrase.training.data.batching import collate
from metaphrase.training.fit import most_memory
from metaphrase.training.judge import Judge
from metaphrase.training.log import TrainLog
from metaphrase.training.loop import Progress, Task, learn
from metaphrase.training.material import Material
from metaphrase.training.objective import make_loss
from metaphrase.training.running_mean import RunningMean
from metaphrase.training.schedule import peak_learning_rate
from metaphrase.training.stream import Stream, Update

WARM_UP, FEWEST = 3, 3
"""Updates that are not counted, and those that are at least."""
MATRIX = 2048
USUAL_SHARE = 0.3
"""Of the matrix-product peak; only to choose a batch that a slow machine can finish."""
SMALLEST = 256
"""Tokens that a batch is not made smaller than."""
Tell = Callable[[str, float], None]
"""(what is being measured, part of it that is done)"""


@dataclass
class Measurement:
    """Seconds, unless it says otherwise."""

    a_flop: float = 0.0
    """Of forward and backward, for each operation counted; 1 / a_flop is the speed in FLOP/s."""
    step: float = 0.0
    """Clipping, Adam and the running mean, once an update."""
    updates: int = 0
    """Updates that were measured."""
    tokens: int = 0
    """Target tokens in them."""
    seconds: float = 0.0
    """What they took."""
    batch_tokens: int = 0
    """Token budget of the batches measured; smaller than the run's where the machine is too slow for those."""
    loss: float = 0.0
    """One validation loss."""
    greedy: float = 0.0
    """One greedy search over the sentences that are scored during training."""
    metrics: float = 0.0
    """Scoring these."""
    beam: float = 0.0
    """Beam search for a validation sentence, and its scoring: what a line of the test set will take."""
    checkpoint: float = 0.0
    peak: float = 0.0
    """FLOP/s of a product of two square matrices."""
    memory: int = 0
    """Bytes that the process held at most while it measured."""
    parts: dict[str, float] = field(default_factory=dict)
    """Which part of a whole was measured, from 0 to 1."""

    @property
    def evaluation(self) -> float:
        """One evaluation during training."""
        return self.loss + self.greedy + self.metrics


def measure(
    options: RunOptions,
    material: Material,
    model: MetaphraseForConditionalGeneration,
    accelerator: Accelerator,
    judge: Judge,
    folder: Path,
    *,
    seconds: float,
    tell: Tell,
) -> Measurement:
    """Measure everything that takes time in a run.

    Args:
        options: the run, with a number in `batches.tokens`.
        model: on the accelerator's device; its weights change.
        judge: the run's, for its validation batches.
        folder: an empty one on the disk that will hold the checkpoints.
        seconds: what updates may take; evaluation, search and scoring together take about as much again.
    """
    found = Measurement()
    tell("matrix products", 0.0)
    found.peak = matrix_peak(accelerator.device, half=accelerator.mixed_precision != "no")
    optimizer, mean = measure_updates(found, options, material, model, accelerator, folder, seconds, tell)
    tell("checkpoint", 0.0)
    found.checkpoint = measure_checkpoint(model, optimizer, mean, folder)
    measure_evaluation(found, options, model, accelerator, judge, seconds / 3, tell)
    found.memory = most_memory(accelerator.device)
    return found


def matrix_peak(device: torch.device, *, half: bool = False, size: int = MATRIX, seconds: float = 0.5) -> float:
    """FLOP/s of a product of two square matrices, best of many; in bfloat16 with `half`."""
    kind = torch.bfloat16 if half else torch.float32
    size = size if device.type == "cpu" else 4 * size
    a, b = torch.randn(size, size, device=device, dtype=kind), torch.randn(size, size, device=device, dtype=kind)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end or not best:
        before = time.perf_counter()
        a @ b
        wait(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - before))
    return best


class WatchedStream(Stream):
    """Notes when each update was handed out, and ends the run that takes them when the time is over."""

    def __init__(self, material: Material, run: RunOptions, config: MetaphraseConfig, seconds: float, tell: Tell):
        super().__init__(material, tokens=run.batches.tokens, seed=run.seed)
        self.run, self.config, self.tell, self.ends = run, config, tell, time.perf_counter() + seconds
        self.allowed = seconds
        self.laps: list[tuple[float, int, int]] = []
        """Clock, target tokens, operations."""

    def __iter__(self) -> Iterator[Update]:
        for update in super().__iter__():
            now = time.perf_counter()
            self.laps.append((now, update.tokens, sum(batch_flops(self.config, batch) for batch in update.batches)))
            if now > self.ends and len(self.laps) >= WARM_UP + FEWEST:
                self.run.max_updates = 1
            self.tell("updates", min(1.0, 1 - (self.ends - now) / self.allowed))
            yield update


def batch_flops(config: MetaphraseConfig, batch: dict[str, torch.Tensor]) -> int:
    """Operations of a training step over a batch, padding counted."""
    (rows, source), target = batch["input_ids"].shape, batch["labels"].shape[1]
    return costs.TRAINING * rows * costs.forward_flops(config, source, target)


def measure_updates(
    found: Measurement,
    options: RunOptions,
    material: Material,
    model: MetaphraseForConditionalGeneration,
    accelerator: Accelerator,
    folder: Path,
    seconds: float,
    tell: Tell,
) -> tuple[Any, RunningMean | None]:
    """Learn for so many seconds, and time the end of an update by itself. Gives the optimizer and the running mean."""
    found.batch_tokens = affordable(options, material, model, found.peak, seconds)
    batches = replace(options.batches, tokens=found.batch_tokens, accumulation=1)
    run = replace(options, batches=batches, max_updates=None, epochs=None, minutes=None, trackers=[])
    run.evaluation, run.checkpoints = replace(run.evaluation, every=10**9), replace(run.checkpoints, every=None)
    callable_model, optimizer = spread.prepare(accelerator, model, options.optimizer, compiled=options.compile)
    mean = RunningMean(model, options.optimizer.ema) if options.optimizer.ema is not None else None
    log = TrainLog(folder, accelerator, every=options.log_every, show=False)
    log.open(after=0)
    stream = WatchedStream(material, run, model.config, seconds, tell)
    peak = peak_learning_rate(options.optimizer, model.config.d_model)
    nothing = lambda _: None  # noqa: E731
    task = Task(accelerator, callable_model, optimizer, stream, run, peak, log, nothing, nothing, mean)
    if learn(task, Progress(), started=time.monotonic()) == "signal":
        raise KeyboardInterrupt
    end = time.perf_counter()
    log.close()
    laps = stream.laps[WARM_UP:]
    found.updates, found.seconds = len(laps), end - laps[0][0]
    found.tokens = sum(tokens for _, tokens, _ in laps)
    indices = stream.plan[0]
    batch = collate(stream.window[indices], pad=material.tokenizer.pad_token_id)
    found.step = measure_step(options, callable_model, accelerator, optimizer, mean, batch)
    learning = max(found.seconds - found.updates * found.step, 0.1 * found.seconds)
    found.a_flop = learning / sum(flops for *_, flops in laps)
    return optimizer, mean


def affordable(
    options: RunOptions, material: Material, model: MetaphraseForConditionalGeneration, peak: float, seconds: float
) -> int:
    """The run's token budget, or a smaller one where an update of that size would take too much of the time."""
    window = material.windows(0, 0)
    longest = int(max(window.source_lengths.max(), window.target_lengths.max()))
    length = max(1, int(window.target_lengths.mean()))
    a_token = costs.TRAINING * costs.forward_flops(model.config, length, length) / length
    most = int(seconds / (WARM_UP + FEWEST) * USUAL_SHARE * peak / a_token)
    return min(int(options.batches.tokens), max(most, SMALLEST, longest))


def measure_step(
    options: RunOptions,
    model: torch.nn.Module,
    accelerator: Accelerator,
    optimizer: Any,
    mean: RunningMean | None,
    batch: dict[str, torch.Tensor],
) -> float:
    """Median time of what ends an update, whatever it learned from."""
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
    tokens = (batch["labels"] >= 0).sum().double()
    accelerator.backward(make_loss(options.optimizer.rdrop)(model, batch, tokens))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    times = []
    for _ in range(5):
        wait(accelerator.device)
        before = time.perf_counter()
        accelerator.clip_grad_norm_(parameters, options.optimizer.max_grad_norm or 1e9)
        optimizer.step()
        if mean is not None:
            mean.update()
        wait(accelerator.device)
        times.append(time.perf_counter() - before)
    optimizer.zero_grad()
    return statistics.median(times)


def measure_checkpoint(
    model: MetaphraseForConditionalGeneration, optimizer: Any, mean: RunningMean | None, folder: Path
) -> float:
    """Write one checkpoint, checksums and all, to the disk that will hold them."""

    def fill(place: Path) -> None:
        states.save_tensors(place / "model.safetensors", states.model_tensors(model))
        states.save_tensors(place / "optimizer.safetensors", states.optimizer_tensors(model, optimizer))
        if mean is not None:
            states.save_tensors(place / "running_mean.safetensors", mean.tensors(model))
        model.config.save_pretrained(place)

    before = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as root:
        checkpoint.write_checkpoint(Path(root), 1, fill, {"random": [states.random_states()]})
        return time.perf_counter() - before


def measure_evaluation(
    found: Measurement,
    options: RunOptions,
    model: MetaphraseForConditionalGeneration,
    accelerator: Accelerator,
    judge: Judge,
    seconds: float,
    tell: Tell,
) -> None:
    """Time a part of an evaluation: loss, greedy search and metrics; and of the last scoring, with beams."""
    if judge.loss is None or judge.head is None:
        return
    model.eval()
    tell("validation loss", 0.0)
    shapes = [_shape(judge.loss.pairs, batch) for batch in judge.loss.batches]
    flops = [rows * costs.forward_flops(model.config, source, target) for rows, source, target in shapes]
    every = max(1, round(sum(flops) * found.a_flop / seconds))
    part = range(every // 2, len(flops), every) or range(len(flops))
    chosen = replace(judge.loss, batches=[judge.loss.batches[number] for number in part])
    evaluate.validation_loss(model, replace(chosen, batches=chosen.batches[:1]), accelerator)
    before = time.perf_counter()
    evaluate.validation_loss(model, chosen, accelerator)
    found.parts["loss"] = sum(flops[number] for number in part) / sum(flops)
    found.loss = (time.perf_counter() - before) / found.parts["loss"]
    if not options.evaluation.metrics:
        return
    heads = judge.loss.pairs[: len(judge.head)]
    beams = options.evaluation.num_beams
    budget = int(options.batches.tokens)
    for name, pairs, width in (("greedy", heads, 1), ("beam", judge.loss.pairs, beams)):
        whole, part = searched(
            model, pairs, width, budget, seconds, lambda done, name=name: tell(f"{name} search", done)
        )
        setattr(found, name, whole)
        found.parts[name] = part
    tell("metrics", 0.0)
    found.metrics = measure_metrics(judge, options.evaluation.metrics)
    found.beam = found.beam / len(judge.loss.pairs) + found.metrics / max(1, len(judge.head))


def measure_metrics(judge: Judge, metrics: Sequence[str]) -> float:
    """Time of scoring the first sentences; a metric loads its package at its first call, which is not counted."""
    hypotheses = [line[0] for line in judge.head.references]
    evaluate.score_texts(hypotheses[:1], judge.head.references[:1], metrics)
    before = time.perf_counter()
    evaluate.score_texts(hypotheses, judge.head.references, metrics)
    return time.perf_counter() - before


def searched(
    model: MetaphraseForConditionalGeneration,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    beams: int,
    batch_tokens: int,
    seconds: float,
    tell: Callable[[float], None],
) -> tuple[float, float]:
    """Search batches, short and long ones in turn, until the time is over.

    Returns:
        the time that all would take, and the part that was searched.
    """
    batches = length_sorted_batches([len(source) for source, _ in pairs], batch_tokens)
    order = sorted(range(len(batches)), key=lambda number: number * 0.618034 % 1)
    weights, config = read_weights(model), model.config
    flops = [sum(costs.decoding_flops(config, *map(len, pairs[index]), beams) for index in batch) for batch in batches]
    search_as_long(model, weights, pairs[:2], beams)  # the first search chooses kernels
    done, took = 0, 0.0
    for number in order:
        tell(min(1.0, took / seconds))
        before = time.perf_counter()
        search_as_long(model, weights, [pairs[index] for index in batches[number]], beams)
        wait(model.device)
        took += time.perf_counter() - before
        done += flops[number]
        if took > seconds:
            break
    return took * sum(flops) / done, done / sum(flops)


def search_as_long(
    model: MetaphraseForConditionalGeneration,
    weights: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    beams: int,
) -> None:
    """One batch, each output as long as its reference: no token ends it before."""
    batch = collate(pairs, pad=model.config.pad_token_id)
    ids, mask = batch["input_ids"].to(model.device), batch["attention_mask"].to(model.device)
    ones = torch.ones(len(pairs), dtype=torch.long, device=model.device)
    limits = torch.tensor([len(target) for _, target in pairs], device=model.device)
    starts = ones[:, None] * model.config.decoder_start_token_id
    task = SearchTask(starts, ones, limits, torch.tensor([-1], device=model.device), model.config.pad_token_id)
    search([weights], ids, mask, SearchOptions(num_beams=beams), task)


def _shape(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch: Sequence[int]) -> tuple[int, int, int]:
    return len(batch), max(len(pairs[index][0]) for index in batch), max(len(pairs[index][1]) for index in batch)


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
