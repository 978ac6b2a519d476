"""How cost grows with size: time and peak memory of a training step and of decoding, one size after another.

    python benchmarks/scale.py [--axes length vocabulary width beams batch] [--repeats 3] [--device cuda] [--quick]
    python benchmarks/scale.py --draw benchmarks/results/DATE-scale.json

One size is changed at a time, from source length 32, vocabulary 8,000, d_model 256 (d_ff = 4 d_model, heads of 64,
3 + 3 layers), beam 1. A training step is forward, backward, clipping and Adam over 2,048 tokens; decoding 8 sentences,
each translated into as many words as it has, whatever the untrained model would say. Made-up token ids; one thread.

Each measurement is a process of its own (a fork of this one), so that its highest memory is its own; on a GPU it is the
allocator's highest mark. Points are the fastest of the repeats. Dashed is what the count of operations predicts
(training/costs.py), laid through the last point; for memory, weights and activations as counted. The exponent is that
of the last doubling, beside the one that the count predicts. Records of single axes are put into the day's file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import RESULTS, gemm_peak, keep, machine, resident

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.options import OptimizerOptions
from metaphrase.decoding.greedy import Task
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.search import search
from metaphrase.decoding.weights import read_weights
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import costs
from metaphrase.training.measure import wait
from metaphrase.training.schedule import build_optimizer, set_learning_rate

TOKENS, SENTENCES = 2048, 8


@dataclass(frozen=True)
class Size:
    """One point: everything that an axis may change."""

    length: int = 32
    vocabulary: int = 8000
    width: int = 256
    beams: int = 1
    batch: int = 0
    """Sentences; 0: 2,048 tokens in training, 8 sentences in decoding."""

    def config(self) -> MetaphraseConfig:
        sizes = {"d_model": self.width, "vocab_size": self.vocabulary}
        for stack in ("encoder", "decoder"):
            sizes |= {f"{stack}_layers": 3, f"{stack}_ffn_dim": 4 * self.width}
            sizes |= {f"{stack}_attention_heads": max(1, self.width // 64)}
        return MetaphraseConfig(dropout=0.1, label_smoothing=0.1, **sizes)

    def rows(self, work: str) -> int:
        return self.batch or (max(1, TOKENS // self.length) if work == "training" else SENTENCES)


AXES: dict[str, tuple[int, ...]] = {
    "length": (8, 16, 32, 64, 128, 256, 512, 1024),
    "vocabulary": (4000, 8000, 16000, 32000, 64000),
    "width": (128, 256, 512, 1024),
    "beams": (1, 2, 4, 8, 16),
    "batch": (1, 2, 4, 8, 16, 32, 64, 128, 256),
}
QUICK = {"length": (8, 16), "vocabulary": (500, 1000), "width": (64, 128), "beams": (1, 2), "batch": (1, 2)}
LABELS = {
    "length": "tokens of a sentence, source and target",
    "vocabulary": "vocabulary entries",
    "width": "d_model",
    "beams": "beams",
    "batch": "sentences a batch",
}
WORKS = {"length": 2, "vocabulary": 2, "width": 2, "beams": 1, "batch": 2}
"""Kinds of work that an axis has: beams are for decoding alone."""


def training_step(size: Size, device: torch.device) -> Callable[[], object]:
    """A step, ready to be taken again and again."""
    config = size.config()
    rows = size.rows("training")
    model = MetaphraseForConditionalGeneration(config).to(device).train()
    optimizer = build_optimizer(model, OptimizerOptions())
    set_learning_rate(optimizer, 1e-4)
    ids = torch.randint(4, size.vocabulary, (rows, size.length), device=device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.flip(1)}
    tokens = torch.tensor(float(ids.numel()), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**batch, num_items_in_batch=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def decoding(size: Size, device: torch.device) -> Callable[[], object]:
    """A batch, translated into as many words as its sources have: `</s>` does not end an output here."""
    config, rows = size.config(), size.rows("decoding")
    model = MetaphraseForConditionalGeneration(config).to(device).eval()
    weights = read_weights(model.to(torch.bfloat16) if device.type == "cuda" else model)
    ids = torch.randint(4, size.vocabulary, (rows, size.length), device=device)
    ones = torch.ones(rows, dtype=torch.long, device=device)
    never = torch.tensor([-1], device=device)
    task = Task(ones[:, None], ones, ones * size.length, never)
    options = SearchOptions(num_beams=size.beams)
    return lambda: search([weights], ids, torch.ones_like(ids), options, task)


def measure(work: str, size: Size, repeats: int, device: torch.device) -> dict[str, float]:
    """Seconds (fastest of the repeats) and bytes that the work held at most."""
    make = {"training": training_step, "decoding": decoding}[work]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = _times(make(size, device), repeats, device)
        return {"seconds": min(seconds), "bytes": torch.cuda.max_memory_allocated() - before}
    before = resident("VmRSS")  # a forked process's highest mark starts anew
    seconds = _times(make(size, device), repeats, device)
    return {"seconds": min(seconds), "bytes": max(0, resident("VmHWM") - before)}


def _times(act: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    seconds, ends = [], time.perf_counter() + 12
    act()  # first touch of memory, kernels chosen
    while len(seconds) < repeats and (not seconds or time.perf_counter() < ends):
        began = time.perf_counter()
        act()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def in_fork(work: str, size: Size, repeats: int, device: torch.device) -> dict[str, float]:
    """`measure` in a process of its own; in this one on a GPU, which a fork cannot use."""
    if device.type == "cuda":
        return measure(work, size, repeats, device)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, json.dumps(measure(work, size, repeats, device)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    if os.waitpid(child, 0)[1] or not text:
        raise SystemExit(f"{work} at {size} failed")
    return json.loads(text)


def expected(work: str, size: Size) -> dict[str, float]:
    """Operations, and bytes of weights and activations, by formula."""
    config, rows, length = size.config(), size.rows(work), size.length
    weights = costs.FLOAT * costs.parameters(config)
    if work == "training":
        flops = costs.TRAINING * rows * costs.forward_flops(config, length, length)
        return {"flops": flops, "bytes": costs.training_memory(config, rows, length, length).peak}
    width = config.decoder_attention_heads * sum(config.head_dims(config.decoder_attention_heads))
    cache = costs.FLOAT * config.decoder_layers * rows * width * length * (size.beams + 1)
    copies = 2 * weights  # the model, and the weights that the search fuses
    return {"flops": rows * costs.decoding_flops(config, length, length, size.beams), "bytes": copies + cache}


def run_axis(axis: str, quick: bool, repeats: int, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """All points of an axis."""
    sizes, base = (QUICK[axis], Size(8, 500, 64)) if quick else (AXES[axis], Size())
    series: dict[str, list[dict[str, Any]]] = {}
    for work in ("training", "decoding")[2 - WORKS[axis] :]:
        series[work] = []
        for value in sizes:
            size = replace(base, **{axis: value})
            point = {"size": value, **in_fork(work, size, repeats, device), "expected": expected(work, size)}
            series[work].append(point)
            rate = point["expected"]["flops"] / point["seconds"] / 1e9
            print(
                f"{axis:10} {value:>6}  {work:8} {point['seconds']:9.4f} s {point['bytes'] / 1e6:9.1f} MB "
                f"{rate:7.1f} GFLOP/s",
                flush=True,
            )
    return series


def exponent(points: list[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    """p of cost ~ size^p over the last step of an axis."""
    first, last = points[-2], points[-1]
    return math.log(of(last) / of(first)) / math.log(last["size"] / first["size"])


OF = {
    "seconds": (lambda point: point["seconds"], lambda point: point["expected"]["flops"]),
    "bytes": (lambda point: point["bytes"], lambda point: point["expected"]["bytes"]),
}


def table(axes: dict[str, Any]) -> list[str]:
    """Markdown: first and last point of each axis, and the exponent of the last doubling beside the counted one."""
    lines = ["| changed | work | smallest | largest | time grows as | counted | memory grows as | counted |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for axis, series in axes.items():
        for work, points in series.items():
            ends = [f"{p['seconds'] * 1e3:,.0f} ms, {p['bytes'] / 1e6:,.0f} MB" for p in (points[0], points[-1])]
            growth = [f"{exponent(points, of):.2f}" for pair in OF.values() for of in pair]
            span = f"{axis} {points[0]['size']:,} to {points[-1]['size']:,}"
            lines.append("| " + " | ".join([span, work, *ends, *growth]) + " |")
    return lines


def draw(axes: dict[str, Any], what: str, path: Path) -> None:
    """A panel an axis, both scales logarithmic; dashed is the count, laid through the last point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    measured, counted = OF[what]
    scale, unit = (1, "seconds") if what == "seconds" else (1e6, "MB at most")
    figure, panels = pyplot.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    for panel, (axis, series) in zip(panels.flat, axes.items(), strict=False):
        for (work, points), colour in zip(series.items(), ("#0072B2", "#D55E00")[-len(series) :], strict=True):
            sizes = [point["size"] for point in points]
            values = [measured(point) / scale for point in points]
            guide = [counted(point) / counted(points[-1]) * values[-1] for point in points]
            panel.plot(sizes, values, "o-", color=colour, markersize=4, label=work)
            panel.plot(sizes, guide, "--", color=colour, alpha=0.5, linewidth=1)
        panel.set(xscale="log", yscale="log", xlabel=LABELS[axis], ylabel=unit)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
        panel.minorticks_off()
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=9, frameon=False)
    for panel in panels.flat[len(axes) :]:
        panel.axis("off")
    note = "Dots: measured. Dashed: as counted from sizes, laid through the last dot."
    panels.flat[-1].text(0, 0.5, note.replace(". ", ".\n"), fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="two small sizes an axis: to see that it runs")
    parser.add_argument("--draw", type=Path, help="draw the charts of a record and print its table; measure nothing")
    arguments = parser.parse_args()
    if arguments.draw:
        path, axes = arguments.draw, json.loads(arguments.draw.read_text())["axes"]
    else:
        path, axes = record(arguments)
    for what, name in (("seconds", "time"), ("bytes", "memory")):
        draw(axes, what, path.with_name(f"{path.stem}-{name}.png"))
    print("\n".join(table(axes)))


def record(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Measure, and put the axes into the day's record."""
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    name = "scale" if device.type == "cpu" else f"scale-{device.type}"
    facts = machine(torch.get_num_threads())
    path = RESULTS / f"{facts['date'][:10]}-{name}.json"
    if arguments.quick:
        path = Path(tempfile.mkdtemp(prefix="metaphrase-bench-")) / path.name
    axes = json.loads(path.read_text())["axes"] if path.exists() else {}
    for axis in arguments.axes:
        axes[axis] = run_axis(axis, arguments.quick, arguments.repeats, device)
    axes = {axis: axes[axis] for axis in AXES if axis in axes}
    command = " ".join(["python", "benchmarks/scale.py", *sys.argv[1:]])
    peak = gemm_peak(torch.get_num_threads(), seconds=0.1 if arguments.quick else 1.0)
    if arguments.quick:
        return path, axes
    found = {"machine": facts, "command": command, "gemm_peak": peak, "base": asdict(Size()), "axes": axes}
    return keep(name, found), axes


if __name__ == "__main__":
    main()
