"""A disk that is really full: a small file system of its own, mounted for the test. What was saved stays usable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training import checkpoint, states
from metaphrase.training.run import train

SIZE = 12
"""Megabytes of the file system."""


def mount(kind: str, image: Path, place: Path) -> None:
    if kind == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", f"size={SIZE}m", "tmpfs", place]]
    else:
        with image.open("wb") as file:
            file.truncate(SIZE << 20)
        commands = [["mkfs.ext4", "-q", "-m", "0", image], ["mount", "-o", "loop", image, place]]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")


@pytest.fixture(params=["ext4", "tmpfs"])
def small_disk(request, tmp_path) -> Iterator[Path]:
    if os.name != "posix" or os.geteuid() != 0 or not shutil.which("mount") or not shutil.which("mkfs.ext4"):
        pytest.skip("only root may mount a file system")
    place = tmp_path / "disk"
    place.mkdir()
    mount(request.param, tmp_path / "image", place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], timeout=60, check=True)


def free(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tiny_options, tmp_path, small_disk):
    changes = {"checkpoints.every": 1, "checkpoints.keep_last": 20, "evaluation.metrics": [], "data.test": None}
    straight = train(tiny_options(output=str(tmp_path / "straight"), **changes), recipe_name="tiny")
    one = sum(path.stat().st_size for path in (straight / "checkpoints" / "checkpoint-12").iterdir())
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:  # leaves room for about five checkpoints
        file.write(b"x" * (free(small_disk) - int(5.5 * one)))
    options = tiny_options(output=str(small_disk / "run"), **changes)
    with pytest.raises(MetaphraseError) as caught:
        train(options, recipe_name="tiny")
    said, root = str(caught.value), Path(options.output) / "checkpoints"
    kept = checkpoint.list_checkpoints(root)
    assert 1 <= len(kept) < 12
    for _, path in kept:
        checkpoint.verify(path)
    assert said.startswith("No space is left on the disk: ") and said.count("\n") == 0
    assert f"{kept[-1][1]} is the last whole checkpoint; make room and go on with --resume." in said

    with pytest.raises(MetaphraseError, match="No space is left on the disk"):  # there is still none
        train(options, recipe_name="tiny", resume=True)
    for _, path in kept:
        checkpoint.verify(path)

    ballast.unlink()
    folder = train(options, recipe_name="tiny", resume=True)
    for name in ("model.safetensors", "checkpoints/checkpoint-12/optimizer.safetensors"):
        one, two = (states.load_tensors(place / name) for place in (straight, folder))
        assert all(torch.equal(one[key], two[key]) for key in one)
