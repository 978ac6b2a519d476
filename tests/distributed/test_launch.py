"""`accelerate launch` on CPUs: the same training and the same scores as one process, by DDP and by FSDP2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metaphrase.training.run import train

SLOW = pytest.mark.slow
WAYS = {
    "voting": ("cpu_two_processes", 20),
    "ddp": ("cpu_two_processes", 0),
    "fsdp2": ("fsdp2", 20),
}
"""How gradients travel: an Accelerate config, and `batches.max_out_of_memory`, which chooses between the first two."""


@pytest.mark.parametrize(
    ("processes", "way"),
    [
        (3, "voting"),
        (2, "ddp"),
        (2, "fsdp2"),
        *(pytest.param(number, "voting", marks=SLOW) for number in (1, 2, 4)),
        *(pytest.param(number, "ddp", marks=SLOW) for number in (3, 4)),
        *(pytest.param(number, "fsdp2", marks=SLOW) for number in (3, 4)),
    ],
)
def test_processes_train_as_one_does_with_accumulation(
    still_options, launch, records, assert_same_training, processes, way
):
    config, most = WAYS[way]
    several = still_options("several", **{"batches.max_out_of_memory": most})
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
def test_a_run_of_one_goes_on_in_pieces(still_options, launch, assert_same_training):
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
