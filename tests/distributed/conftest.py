"""Starts `accelerate launch` on this machine's CPU, with a watchdog."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from metaphrase.configuration.options import RunOptions
from metaphrase.training import states

WORKER = Path(__file__).with_name("worker.py")
CONFIGS = Path(__file__).parents[2] / "configuration" / "accelerate"
LIMIT = 240
"""Seconds that any launch may take."""

_spec = importlib.util.spec_from_file_location("training_conftest", Path(__file__).parents[1] / "training/conftest.py")
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
corpus_folder, tiny_options, _cache = _shared.corpus_folder, _shared.tiny_options, _shared._cache


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _records(folder: str | Path, kind: str) -> list[dict]:
    lines = (Path(folder) / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _assert_same_training(first: str | Path, second: str | Path, *, tolerance: float = 1e-5) -> None:
    """The same pairs in the same updates, the same losses and scores, the same weights."""
    for one, two in zip(_records(first, "training"), _records(second, "training"), strict=True):
        assert (one["update"], one["pairs"], one["batches"]) == (two["update"], two["pairs"], two["batches"])
        for key in ("loss", "lr", "grad_norm"):
            assert one[key] == pytest.approx(two[key], rel=tolerance, abs=tolerance), key
    for one, two in zip(_records(first, "evaluation"), _records(second, "evaluation"), strict=True):
        assert one["tokens"] == two["tokens"] and one["samples"] == two["samples"]
        assert one["loss"] == pytest.approx(two["loss"], rel=tolerance)
        assert one["chrf"] == pytest.approx(two["chrf"], abs=1e-9)
    weights = [states.load_tensors(Path(folder) / "model.safetensors") for folder in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[0][key], weights[1][key], atol=1e-4) for key in weights[0])


@pytest.fixture
def still_options(tiny_options):
    """Without dropout, whose noise differs from process to process."""

    def make(name: str, **changes: object) -> RunOptions:
        options = tiny_options(max_updates=6, **{"evaluation.every": 3, "evaluation.metrics": ["chrf"]}, **changes)
        options.model["dropout"] = 0.0
        options.output = str(Path(options.output).with_name(name))
        return options

    return make


@pytest.fixture
def free_port() -> Callable[[], int]:
    return _free_port


@pytest.fixture
def records() -> Callable[[str | Path, str], list[dict]]:
    return _records


@pytest.fixture
def assert_same_training() -> Callable[..., None]:
    return _assert_same_training


@pytest.fixture
def launch(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """`launch(options, 2)` runs the worker on two processes and returns its exit code and output.

    `machines` are options of `accelerate launch` in place of a free port, `torchrun` those of torchrun in its place;
    `before` stands before the command.
    """

    def run(
        options: RunOptions,
        processes: int,
        *more: str,
        config: str = "cpu_two_processes",
        machines: tuple[str, ...] = (),
        limit: float = LIMIT,
        before: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        name: str = "",
        torchrun: tuple[str, ...] = (),
    ) -> subprocess.CompletedProcess:
        file = tmp_path / f"options-{Path(options.output).name}{name}.json"
        file.write_text(json.dumps(asdict(options)))
        launcher = (
            "accelerate.commands.accelerate_cli", "launch", "--config_file", str(CONFIGS / f"{config}.yaml"),
            "--num_processes", str(processes), *(machines or ("--main_process_port", str(_free_port()))),
        )  # fmt: skip
        launcher = ("torch.distributed.run", *torchrun) if torchrun else launcher
        command = [*before, sys.executable, "-m", *launcher, str(WORKER), str(file), *more]
        setting = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        started = subprocess.Popen(
            command,
            env=setting,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = started.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            output, _ = started.communicate(timeout=30)
            pytest.fail(f"no end within {limit} s:\n{output[-3000:]}")
        assert "not the first one writes" not in output, output
        return subprocess.CompletedProcess(command, started.returncode, output)

    return run
