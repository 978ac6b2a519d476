"""What every benchmark does alike: name the machine, take turns, print medians and ratios, keep a dated record."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("metaphrase", "torch", "transformers", "accelerate", "tokenizers", "ctranslate2")

Measurements = dict[str, list[float]]


def machine(threads: int) -> dict[str, Any]:
    """The machine, the versions and the commit, so that a figure can be read later."""
    import torch

    from metaphrase.training.finish import processor_name

    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def gemm_peak(threads: int, size: int = 2048, seconds: float = 1.0) -> float:
    """Floating-point operations a second in a product of two square matrices, best of many: float32 on a CPU, bfloat16
    on a GPU where there is one."""
    import torch

    from metaphrase.training.measure import matrix_peak

    torch.set_num_threads(threads)
    there = torch.cuda.is_available()
    return matrix_peak(torch.device("cuda" if there else "cpu"), half=there, size=size, seconds=seconds)


def resident(field: str) -> int:
    """Bytes of this process's memory by /proc/self/status: `VmRSS` is now, `RssAnon` the part of it that is no file's
    page, `VmHWM` the highest so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def take_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> Measurements:
    """Measure each contender once a round, A B C A B C …, so that a noisy neighbour disturbs all alike."""
    measured: Measurements = {name: [] for name in contenders}
    for number in range(1, rounds + 1):
        for name, measure in contenders.items():
            value = measure()
            measured[name].append(value)
            print(f"round {number} of {rounds}  {name:<32} {value:>12,.1f}", flush=True)
    return measured


def ratios(measured: Measurements, of: str, to: str) -> list[float]:
    """Ratio of two contenders in each round: what stays true when the machine is shared."""
    return [a / b for a, b in zip(measured[of], measured[to], strict=True)]


def table(measured: Measurements, ours: str, unit: str) -> list[str]:
    """A Markdown table: median, spread, and how many times faster `ours` is (median and range over the rounds)."""
    lines = [f"| | {unit}, median (range) | {ours} is faster by |", "|---|---|---|"]
    for name, values in measured.items():
        factors = ratios(measured, ours, name)
        line = f"| {name} | {statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f}) |"
        if name != ours:
            line += f" {statistics.median(factors):.2f} x ({min(factors):.2f} to {max(factors):.2f}) |"
        lines.append(line if name != ours else line + " |")
    return lines


def keep(name: str, record: dict[str, Any]) -> Path:
    """Write a dated JSON file below `benchmarks/results`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.date.today().isoformat()}-{name}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def bar_chart(path: Path, measured: Measurements, ours: str, unit: str, title: str) -> None:
    """Horizontal bars of the medians with their range; those whose names end in `ours` in another colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(measured)[::-1]
    medians = [statistics.median(measured[name]) for name in names]
    errors = [
        [median - min(measured[name]) for median, name in zip(medians, names, strict=True)],
        [max(measured[name]) - median for median, name in zip(medians, names, strict=True)],
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.55 * len(names) + 1.2), layout="constrained")
    colours = ["#0072B2" if name.endswith(ours) else "#BBBBBB" for name in names]
    axes.barh(names, medians, xerr=errors, color=colours, error_kw={"elinewidth": 1, "capsize": 3})
    for position, median in enumerate(medians):
        axes.annotate(f" {median:,.0f}", (0, position), va="center", ha="left", fontsize=9)
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
