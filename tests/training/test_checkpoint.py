"""Checkpoints: whole or not at all, checked before they are believed, and never deleted when they are needed."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import OptimizerOptions
from metaphrase.training import checkpoint, states
from metaphrase.training.checkpoint import BrokenCheckpoint
from metaphrase.training.lock import FolderLock
from metaphrase.training.schedule import build_optimizer, set_learning_rate


def write(root: Path, update: int) -> Path:
    def fill(place: Path) -> None:
        states.save_tensors(place / "model.safetensors", {"weight": torch.full((64,), float(update))})

    return checkpoint.write_checkpoint(root, update, fill, {"update": update})


def dirs(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_a_checkpoint_has_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    """Nothing is under the final name while any of its files is written, and all are on the disk before it is."""
    synced, honest, final = [], checkpoint._sync, tmp_path / "checkpoint-5"

    def sync(path: Path) -> None:
        assert path == tmp_path or not final.exists()
        synced.append(path.name)
        honest(path)

    def fill(place: Path) -> None:
        assert place.parent == tmp_path and not final.exists()
        states.save_tensors(place / "model.safetensors", {"weight": torch.ones(3)})

    monkeypatch.setattr(checkpoint, "_sync", sync)
    checkpoint.write_checkpoint(tmp_path, 5, fill, {"update": 5})
    assert {path.name for path in final.iterdir()} <= set(synced)
    assert synced[-1] == tmp_path.name  # the rename itself


def test_written_is_read(tmp_path):
    folder = write(tmp_path, 5)
    assert folder.name == "checkpoint-5" and checkpoint.read_state(folder) == {"update": 5}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {"model.safetensors", "state.json"} and manifest["update"] == 5
    assert dirs(tmp_path) == {"checkpoint-5"}


@pytest.mark.parametrize("keep_last", [1, 2])
def test_rotation_keeps_the_best_and_the_newest_and_sorts_by_number(tmp_path, keep_last):  # CKPT-ROTATE
    for update in (5, 10, 15, 100):
        write(tmp_path, update)
        checkpoint.rotate(tmp_path, keep_last=keep_last, best=[5])
    # `keep_last` counts the newest alone; the best ones stay besides
    assert dirs(tmp_path) == {"checkpoint-5", "checkpoint-100"} | ({"checkpoint-15"} if keep_last == 2 else set())


def test_rotation_never_deletes_everything(tmp_path):
    write(tmp_path, 20)
    write(tmp_path, 100)
    checkpoint.rotate(tmp_path, keep_last=0, best=[])
    assert dirs(tmp_path) == {"checkpoint-100"}


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest", "no manifest", "empty"])
def test_a_broken_newest_is_passed_over_and_a_named_one_refused(tmp_path, caplog, damage):
    write(tmp_path, 20)
    folder = write(tmp_path, 100)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "cut":
        weights.write_bytes(content[:-7])
    elif damage == "flip":
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text('{"format": 1, "files": {"model.sa')
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        for path in folder.iterdir():
            path.unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-20"
    assert "checkpoint-100" in caplog.text and "passed over" in caplog.text
    with pytest.raises(BrokenCheckpoint, match="checkpoint-100"):
        checkpoint.read_state(folder)


def test_a_broken_one_is_replaced_when_its_update_comes_again(tmp_path):
    folder = write(tmp_path, 20)
    (folder / "manifest.json").unlink()
    write(tmp_path, 20)
    assert checkpoint.read_state(folder) == {"update": 20}


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left (os error 28)")],
)
def test_a_full_disk_leaves_the_last_one_and_says_so(tmp_path, error):
    write(tmp_path, 20)

    def fill(place: Path) -> None:
        (place / "model.safetensors").write_bytes(b"half")
        raise error

    with pytest.raises(MetaphraseError, match=r"No space is left.*checkpoint-40.*checkpoint-20 is the last whole"):
        checkpoint.write_checkpoint(tmp_path, 40, fill, {})
    assert dirs(tmp_path) == {"checkpoint-20"} and checkpoint.read_state(tmp_path / "checkpoint-20")


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_disk_that_fills_up_late_is_told_too(tmp_path, monkeypatch, name):
    write(tmp_path, 20)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(MetaphraseError, match="No space is left"):
        patch.setattr(os, name, full)
        write(tmp_path, 40)
    assert dirs(tmp_path) == {"checkpoint-20"}


def test_other_errors_stay_themselves(tmp_path):
    def fill(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        checkpoint.write_checkpoint(tmp_path, 40, fill, {})


def test_remains_of_a_dead_process_are_cleared(tmp_path):
    write(tmp_path, 20)
    for name in (".writing-checkpoint-40", ".deleting-checkpoint-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    assert checkpoint.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-20"
    checkpoint.clean(tmp_path)
    assert dirs(tmp_path) == {"checkpoint-20"}


def test_nothing_is_pickled(tmp_path):
    folder = write(tmp_path, 5)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}


def test_random_states_come_back():
    states.seed_everything(3)
    np.random.standard_normal()  # leaves half of a pair behind
    saved = json.loads(json.dumps(states.random_states()))

    def draw() -> tuple:
        return random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()

    first = draw()
    assert draw() != first
    states.restore_random_states(saved)
    assert draw() == first


def test_adams_state_comes_back_bit_for_bit(tmp_path):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        optimizer = build_optimizer(model, OptimizerOptions(weight_decay=0.1))
        set_learning_rate(optimizer, 0.01)
        return model, optimizer

    def step(model, optimizer, number):
        optimizer.zero_grad()
        torch.manual_seed(number)
        model(torch.randn(8, 4)).pow(2).sum().backward()
        optimizer.step()

    model, optimizer = build()
    for number in range(3):
        step(model, optimizer, number)
    states.save_tensors(tmp_path / "m", states.model_tensors(model))
    states.save_tensors(tmp_path / "o", states.optimizer_tensors(model, optimizer))
    again, other = build()
    states.load_model_tensors(again, states.load_tensors(tmp_path / "m"), tmp_path)
    states.load_optimizer_tensors(again, other, states.load_tensors(tmp_path / "o"))
    for number in range(3, 6):
        step(model, optimizer, number)
        step(again, other, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_weights_of_another_model_are_refused():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(MetaphraseError, match="lacks bias"):
        states.load_model_tensors(model, {"weight": torch.zeros(4, 4)}, Path("there"))
    with pytest.raises(MetaphraseError, match=r"weight is \[2, 4\] there, \[4, 4\] here"):
        states.load_model_tensors(model, {"weight": torch.zeros(2, 4), "bias": torch.zeros(4)}, Path("there"))


HOLD = """
import sys
from pathlib import Path
from metaphrase.training.lock import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_in_one_folder_are_refused_and_a_dead_ones_lock_is_not_kept(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(MetaphraseError, match=f"in use by process {other.pid} on .*--output"):
                FolderLock(tmp_path).__enter__()
        finally:
            other.kill()
            other.wait(timeout=30)
        assert (tmp_path / ".lock").exists()  # nobody cleared it away
        with FolderLock(tmp_path), pytest.raises(MetaphraseError, match=f"process {os.getpid()}"):
            FolderLock(tmp_path).__enter__()
    assert not (tmp_path / ".lock").exists()


def test_a_lock_of_another_host_holds_while_it_gives_signs_of_life(tmp_path):
    lock = tmp_path / ".lock"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "now"}))
    with pytest.raises(MetaphraseError, match="process 1 on elsewhere"):
        FolderLock(tmp_path).__enter__()
    os.utime(lock, (0, 0))
    with FolderLock(tmp_path) as mine:
        assert json.loads(lock.read_text())["pid"] == os.getpid()
        os.utime(lock, (0, 0))
        mine.touch()
        assert lock.stat().st_mtime > 0
