"""SIGKILL at any moment, writing included: what is left is whole, and the resumed run equals an undisturbed one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from metaphrase.training import states
from metaphrase.training.run import train


@pytest.mark.parametrize("kills", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_again_and_again(tiny_options, tmp_path, kills):
    updates = 400 if kills > 20 else 80
    changes = {"checkpoints.every": 1, "evaluation.every": 40, "evaluation.metrics": [], "data.test": None}
    killed = tiny_options(output=str(tmp_path / "killed"), max_updates=updates, **changes)
    plain = tiny_options(output=str(tmp_path / "plain"), max_updates=updates, **changes)
    (tmp_path / "options.json").write_text(json.dumps(asdict(killed)))
    script = Path(__file__).with_name("kill_trainer.py")
    result = subprocess.run(
        [sys.executable, script, tmp_path / "options.json", str(kills), "3"],
        capture_output=True, text=True, timeout=max(600, 40 * kills), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["status"] == 0 and summary["by_time"] + summary["by_call"] == kills, summary
    assert min(summary["by_time"], summary["by_call"]) > kills / 5 and summary["newest"] > 0, summary

    train(plain, recipe_name="killed")
    for name in ("model.safetensors", f"checkpoints/checkpoint-{updates}/optimizer.safetensors"):
        one, two = (states.load_tensors(Path(options.output) / name) for options in (killed, plain))
        assert all(torch.equal(one[key], two[key]) for key in one)
    logs = []
    for options in (killed, plain):
        lines = (Path(options.output) / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
        logs.append([{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines])
    assert logs[0] == logs[1]
