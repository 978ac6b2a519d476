"""What the training engine costs over the bare model step: the same batches, the same model, in turn.

    python benchmarks/engine_overhead.py [--updates 40] [--rounds 3]

Bare: forward, backward, clipping and Adam over batches that lie ready in memory. Engine: `loop.learn` with its stream,
schedule, guard, log and progress bar, on Accelerate. Both count processor seconds of this process, which other work on
the machine disturbs less than the clock. One thread. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from common import keep, machine

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.options import RunOptions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training.log import TrainLog
from metaphrase.training.loop import Progress, Task, learn
from metaphrase.training.schedule import build_optimizer, set_learning_rate
from metaphrase.training.spread import prepare
from metaphrase.training.stream import Stream


class Pairs:
    """Made-up pairs with the lengths of caption translation."""

    tokenizer = SimpleNamespace(pad_token_id=0)
    pairs = 20_000

    def __init__(self, vocabulary: int) -> None:
        draw = np.random.default_rng(1)
        self.source_lengths = draw.integers(6, 30, self.pairs).astype(np.int32)
        self.target_lengths = (self.source_lengths + draw.integers(-3, 4, self.pairs)).clip(3).astype(np.int32)
        self.ids = draw.integers(4, vocabulary, 64).astype(np.int32)

    def windows(self, _: int, number: int) -> Pairs | None:
        return self if number == 0 else None

    def draw(self, *, seed: int, epoch: int) -> None:
        return None

    def __getitem__(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.ids[: self.source_lengths[i]], self.ids[: self.target_lengths[i]]) for i in indices]


def small_model() -> MetaphraseForConditionalGeneration:
    """3 + 3 layers, d_model 192, vocabulary 4,000."""
    sizes = {"vocab_size": 4000, "d_model": 192, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.15}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
    return MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset("base", **sizes, **heads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    material = Pairs(4000)
    ratios, figures = [], {"bare": [], "engine": []}
    for _ in range(arguments.rounds):
        torch.manual_seed(1)
        start = small_model()
        figures["bare"].append(bare(copy.deepcopy(start), material, arguments.updates))
        figures["engine"].append(engine(copy.deepcopy(start), material, arguments.updates))
        ratios.append(figures["engine"][-1] / figures["bare"][-1])
    percent = [round(100 * (ratio - 1), 2) for ratio in ratios]
    summary = {"overhead_percent": percent, "median_percent": statistics.median(percent)}
    command = " ".join(["python", "benchmarks/engine_overhead.py", *sys.argv[1:]])
    record = {"machine": machine(1), "command": command, "unit": "processor seconds", "measured": figures, **summary}
    print(f"Kept in {keep('engine-overhead', record)}")
    print(json.dumps({**figures, **summary}))


def bare(model: MetaphraseForConditionalGeneration, material: Pairs, updates: int) -> float:
    """Processor seconds of the model step alone."""
    options = RunOptions()
    stream = iter(Stream(material, tokens=1024, seed=1))
    ready = [next(stream) for _ in range(updates)]
    optimizer = build_optimizer(model, options.optimizer)
    set_learning_rate(optimizer, 1e-4)
    model.train()
    began = time.process_time()
    for update in ready:
        model(**update.batches[0], num_items_in_batch=update.tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return time.process_time() - began


def engine(model: MetaphraseForConditionalGeneration, material: Pairs, updates: int) -> float:
    """Processor seconds of the engine over the same updates, without evaluation and checkpoints."""
    options = RunOptions(max_updates=updates, trackers=[])
    options.evaluation.every = 10**9
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True)
        wrapped, optimizer = prepare(accelerator, model, options.optimizer, compiled=False)
        log = TrainLog(Path(folder), accelerator, every=options.log_every)
        log.open(after=0)
        stream = Stream(material, tokens=1024, seed=1)
        task = Task(accelerator, wrapped, optimizer, stream, options, 1e-4, log, lambda _: None, lambda _: None)
        began = time.process_time()
        learn(task, Progress(), started=time.monotonic())
        seconds = time.process_time() - began
        log.close()
    return seconds


if __name__ == "__main__":
    main()
