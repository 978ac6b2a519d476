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

from metaphrase.configuration.options import RunOptions

WORKER = Path(__file__).with_name("worker.py")
CONFIGS = Path(__file__).parents[2] / "configuration" / "accelerate"
LIMIT = 240
"""Seconds that any launch may take."""

_spec = importlib.util.spec_from_file_location("training_conftest", Path(__file__).parents[1] / "training/conftest.py")
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
corpus_folder, tiny_options, _cache = _shared.corpus_folder, _shared.tiny_options, _shared._cache


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def launch(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """`launch(options, 2)` runs the worker on two processes and returns its exit code and output."""

    def run(
        options: RunOptions,
        processes: int,
        *more: str,
        config: str = "cpu_two_processes",
        machines: tuple[str, ...] = (),
        limit: float = LIMIT,
    ) -> subprocess.CompletedProcess:
        file = tmp_path / f"options-{Path(options.output).name}.json"
        file.write_text(json.dumps(asdict(options)))
        command = [
            sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch",
            "--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes),
            *(machines or ("--main_process_port", str(free_port()))), str(WORKER), str(file), *more,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        started = subprocess.Popen(
            command,
            env=environment,
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
        return subprocess.CompletedProcess(command, started.returncode, output)

    return run
