"""`accelerate launch` on CPUs: the same training and the same scores as one process, by DDP and by FSDP2."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from metaphrase.configuration.options import RunOptions
from metaphrase.training import states
from metaphrase.training.run import train


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def records(folder: str | Path, kind: str) -> list[dict]:
    lines = (Path(folder) / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def assert_same_training(first: str | Path, second: str | Path, *, tolerance: float = 1e-5) -> None:
    """The same pairs in the same updates, the same losses and scores, the same weights."""
    for one, two in zip(records(first, "training"), records(second, "training"), strict=True):
        assert (one["update"], one["pairs"], one["batches"]) == (two["update"], two["pairs"], two["batches"])
        for key in ("loss", "lr", "grad_norm"):
            assert one[key] == pytest.approx(two[key], rel=tolerance, abs=tolerance), key
    for one, two in zip(records(first, "evaluation"), records(second, "evaluation"), strict=True):
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


@pytest.mark.parametrize(
    ("processes", "config"),
    [
        (2, "cpu_two_processes"),
        (2, "fsdp2"),
        pytest.param(1, "cpu_two_processes", marks=pytest.mark.slow),
        pytest.param(3, "cpu_two_processes", marks=pytest.mark.slow),
        pytest.param(4, "cpu_two_processes", marks=pytest.mark.slow),
        pytest.param(3, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_processes_train_as_one_does_with_accumulation(still_options, launch, processes, config):
    several = still_options("several")
    result = launch(several, processes, config=config)
    assert result.returncode == 0, result.stdout
    assert f"{processes} process" in result.stdout
    alone = still_options("alone", **{"batches.accumulation": processes})
    train(alone, recipe_name="tiny")
    assert_same_training(several.output, alone.output)
    scores = [json.loads((Path(o.output) / "results.json").read_text())["test"] for o in (several, alone)]
    assert scores[0] == scores[1]  # every line once, at any number of processes

    # the run of several goes on alone, and sees the pairs that an undisturbed run sees
    several.max_updates = 12
    train(several, recipe_name="tiny", resume=True)
    whole = still_options("whole")
    whole.max_updates = 6 * processes + 6
    train(whole, recipe_name="tiny")
    seen = {record["pairs"]: record["batches"] for record in records(whole.output, "training")}
    resumed = records(several.output, "training")
    assert [record["update"] for record in resumed] == list(range(1, 13))
    assert all(seen[record["pairs"]] == record["batches"] for record in resumed)


@pytest.mark.slow
def test_a_run_of_one_goes_on_in_pieces(still_options, launch):
    """A checkpoint holds whole tensors: written by one process, it is read by two that spread them (FSDP2)."""
    options = still_options("run", **{"batches.accumulation": 2})
    options.max_updates = 3
    train(options, recipe_name="tiny")
    straight = still_options("straight", **{"batches.accumulation": 2})
    train(straight, recipe_name="tiny")
    options.max_updates, options.batches.accumulation = 6, 1
    result = launch(options, 2, "--resume", config="fsdp2")
    assert result.returncode == 0, result.stdout
    assert_same_training(options.output, straight.output)


def test_a_process_that_fails_ends_all_and_names_itself_and_its_batch(still_options, launch):
    began = time.monotonic()
    result = launch(still_options("run"), 2, "--fault", "fail", "1", "3", limit=120)
    assert result.returncode != 0 and time.monotonic() - began < 120
    assert "error: Process 1 of 2 failed on a batch of" in result.stdout, result.stdout
    assert "not enough memory" in result.stdout and "Lower batches.tokens" in result.stdout
    assert "training pairs" in result.stdout


@pytest.mark.slow
def test_a_process_that_hangs_ends_all_in_bounded_time(still_options, launch):
    result = launch(still_options("run", timeout=15), 2, "--fault", "hang", "1", "3", limit=150)
    assert result.returncode != 0
    assert "error: Process 0 of 2 stopped because another one failed or did not answer" in result.stdout, result.stdout


@pytest.mark.slow
def test_two_machines_meet_by_address_and_port(still_options, launch):
    """Two launches of one process each, as on two hosts; here both on loopback. Only the first one writes."""
    options, port = still_options("several"), free_port()

    def machine(rank: int) -> subprocess.CompletedProcess:
        where = ("--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", "127.0.0.1")
        return launch(options, 2, machines=(*where, "--main_process_port", str(port)))

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(machine, (0, 1)))
    assert [result.returncode for result in results] == [0, 0], results[0].stdout + results[1].stdout
    assert "2 processes" in results[0].stdout and "processes" not in results[1].stdout
    alone = still_options("alone", **{"batches.accumulation": 2})
    train(alone, recipe_name="tiny")
    assert_same_training(options.output, alone.output)
