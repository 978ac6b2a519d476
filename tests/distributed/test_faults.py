"""A process that fails, finds no memory, hangs or dies: all skip the update, or all end, and the message says who."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

from metaphrase.configuration.options import RunOptions
from metaphrase.training import checkpoint, states

LIMIT = 240
"""Seconds within which all processes must have ended, whatever happens."""
BATCH = r"a batch of \d+ pairs x \d+ target tokens \(training pairs \d+(, \d+)*( and \d+ more)?\)"


@pytest.fixture
def options(tiny_options):
    def make(**changes: object) -> RunOptions:
        return tiny_options(**{"max_updates": 6, "evaluation.metrics": [], "evaluation.every": 2, **changes})

    return make


def fault(*words: object) -> tuple[str, ...]:
    return ("--fault", *map(str, words))


def whole_checkpoints(run: RunOptions) -> list[int]:
    """Updates of the run's checkpoints; each can be used."""
    found = checkpoint.list_checkpoints(Path(run.output) / "checkpoints")
    for _, path in found:
        checkpoint.verify(path)
    return [update for update, _ in found]


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_skip_an_update_for_which_one_has_no_memory(options, launch, records, processes):
    """Injected into a forward and a backward pass, and really provoked by a limit of the address space."""
    run = options()
    result = launch(
        run, processes, *fault("forward", 1, 2), *fault("backward", 0, 4), *fault("memory", 1, 5), limit=LIMIT
    )
    assert result.returncode == 0, result.stdout
    skipped = records(run.output, "skipped")
    assert [record["processes"] for record in skipped] == [[1], [0], [1]]
    for number, record in enumerate(skipped, 1):
        assert record["reason"] == "out of memory" and record["pairs"]
        assert re.search(rf"^Process {record['processes'][0]} of {processes} failed on {BATCH}: ", record["detail"])
        assert f"The update is left out ({number} of at most 20)." in result.stdout
    assert "allocate" in skipped[2]["detail"] or "bad_alloc" in skipped[2]["detail"]
    log = records(run.output, "training")
    assert [record["update"] for record in log] == list(range(1, 7)) and log[-1]["out_of_memory"] == 3
    weights = states.load_tensors(Path(run.output) / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    results = json.loads((Path(run.output) / "results.json").read_text())
    assert results["training"]["out_of_memory_updates"] == 3


def test_one_that_fails_ends_all_with_the_same_message(options, launch, records):
    run, began = options(), time.monotonic()
    result = launch(run, 2, *fault("fail", 1, 4), limit=LIMIT)
    assert result.returncode != 0 and time.monotonic() - began < LIMIT
    told = re.findall(rf"error: Process 1 of 2 failed on {BATCH}: IndexError: index 7 is out of range\.", result.stdout)
    assert len(told) == 2, result.stdout  # both processes say it
    assert whole_checkpoints(run) == [2]


@pytest.mark.slow
def test_too_many_updates_without_memory_end_all(options, launch, records):
    run = options(**{"batches.max_out_of_memory": 1})
    result = launch(run, 2, *fault("forward", 1, 2), *fault("backward", 1, 3), limit=LIMIT)
    assert result.returncode != 0
    told = f"error: 2 updates found no memory, more than batches.max_out_of_memory 1. Process 1 of 2 failed on {BATCH}"
    assert len(re.findall(told, result.stdout)) == 2, result.stdout
    assert len(records(run.output, "skipped")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "backward", "memory", "fail"])
@pytest.mark.parametrize(("config", "most"), [("cpu_two_processes", 0), ("fsdp2", 20)])
def test_under_ddp_and_fsdp_one_without_memory_ends_all(options, launch, records, config, most, kind):
    """They meet inside the passes, so nobody can skip; the others learn it from the connection."""
    run, began = options(**{"batches.max_out_of_memory": most}), time.monotonic()
    result = launch(run, 2, *fault(kind, 1, 4), config=config, limit=LIMIT)
    assert result.returncode != 0 and time.monotonic() - began < LIMIT
    assert re.search(rf"error: Process 1 of 2 failed on {BATCH}: ", result.stdout), result.stdout
    assert ("Lower batches.tokens" in result.stdout) == (kind != "fail")
    assert whole_checkpoints(run) == [2]


@pytest.mark.parametrize(
    ("processes", "config"),
    [
        (3, "cpu_two_processes"),
        pytest.param(2, "cpu_two_processes", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_one_that_is_killed_ends_all_and_is_named(options, launch, records, processes, config):
    run = options()
    result = launch(run, processes, *fault("kill", 1, 3), config=config, limit=LIMIT)
    assert result.returncode != 0
    blamed = r"stopped: process 1, which had to learn from training pairs \d+.*, failed or did not answer"
    assert re.search(rf"error: Process 0 of {processes} {blamed}", result.stdout), result.stdout
    assert whole_checkpoints(run) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_one_that_hangs_ends_all_in_bounded_time(options, launch, records, processes):
    run = options(timeout=15)
    result = launch(run, processes, *fault("hang", 1, 3), limit=LIMIT)
    assert result.returncode != 0
    blamed = r"stopped: process 1, which had to learn from training pairs \d+.*, failed or did not answer"
    assert re.search(rf"error: Process 0 of {processes} {blamed}", result.stdout), result.stdout
    assert whole_checkpoints(run) == [2]


@pytest.mark.slow
def test_a_mistake_that_the_first_one_finds_ends_all(options, launch):
    """The others wait for it to read the data; none of them shows a traceback in place of its sentence."""
    run = options(**{"data.source": "aa"})
    result = launch(run, 2, limit=LIMIT)
    assert result.returncode != 0
    assert re.search(r"error: there is \S+test\.b but no test\.aa beside it", result.stdout), result.stdout
    assert "error: Process 1 of 2 stopped: process 0 failed or did not answer" in result.stdout, result.stdout
    assert 'worker.py", line' not in result.stdout  # the launcher's traceback is none of ours
