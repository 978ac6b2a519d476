"""Checkpoints on disk: a folder appears whole or not at all, and is believed only if its checksums hold.

    checkpoint-<update>/
        model.safetensors, config.json      the weights, loadable by `from_pretrained`
        optimizer.safetensors               Adam's moments, by parameter name
        state.json                          everything else: counts, position, scores, random states
        manifest.json                       size and SHA-256 of each file above, written last

It is written beside (`.writing-checkpoint-<update>`), forced to the disk, then renamed, so a process that dies at any
moment leaves either the old state or the new one. Nothing is pickled, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from metaphrase.configuration.errors import MetaphraseError

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
_PARTIAL = ".writing-"
_RETIRED = ".deleting-"

logger = logging.getLogger(__name__)


class BrokenCheckpoint(MetaphraseError):
    """A checkpoint folder that is not what its manifest says."""


def write_checkpoint(root: Path, update: int, fill: Callable[[Path], None], state: dict[str, Any]) -> Path:
    """Write `root/checkpoint-<update>` in one piece and return it.

    Args:
        root: folder of all checkpoints; made if it is not there.
        update: updates made so far.
        fill: called with an empty folder, writes the tensors into it.
        state: written as state.json.

    Raises:
        MetaphraseError: the disk is full; the checkpoints written before are as they were.
    """
    final, partial = root / f"checkpoint-{update}", root / f"{_PARTIAL}checkpoint-{update}"
    with explain_full_disk(final, last=lambda: newest_checkpoint(root), remove=partial):
        root.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        partial.mkdir()
        fill(partial)
        _write_json(partial / STATE, state)
        names = sorted(path.name for path in partial.iterdir())
        entries = {name: _fingerprint(partial / name) for name in names}
        _write_json(partial / MANIFEST, {"format": FORMAT, "update": update, "files": entries})
        for name in [*names, MANIFEST]:
            _sync(partial / name)
        _sync(partial)
        if final.exists():  # only a broken one can be in the way: an intact one is never written twice
            _retire(final)
        os.rename(partial, final)
        _sync(root)
    return final


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint whose every file is checked against the manifest first.

    Raises:
        BrokenCheckpoint: names the file that is missing, cut or changed.
    """
    verify(checkpoint)
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def verify(checkpoint: Path) -> None:
    """Hold every file against the manifest.

    Raises:
        BrokenCheckpoint: names the file that is missing, cut or changed.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{checkpoint} is no whole checkpoint: it has no {MANIFEST}.") from None
    except (ValueError, KeyError, TypeError):
        raise BrokenCheckpoint(f"{checkpoint / MANIFEST} cannot be read; choose another checkpoint.") from None
    if manifest.get("format") != FORMAT:
        raise BrokenCheckpoint(f"{checkpoint} has format {manifest.get('format')}, this version reads format {FORMAT}.")
    for name in sorted({STATE, *files}):
        path, expected = checkpoint / name, files.get(name)
        if expected is None or not path.is_file():
            raise BrokenCheckpoint(f"{checkpoint} is broken: {name} is missing.")
        if path.stat().st_size != expected["bytes"]:
            raise BrokenCheckpoint(
                f"{checkpoint} is broken: {name} has {path.stat().st_size} bytes in place of {expected['bytes']}."
            )
        if _fingerprint(path) != expected:
            raise BrokenCheckpoint(f"{checkpoint} is broken: the checksum of {name} is wrong.")


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(update, folder) of all checkpoints, by number: 20 stands before 100."""
    if not root.is_dir():
        return []
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def newest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint that is whole. A broken one is passed over with a warning."""
    for _, path in reversed(list_checkpoints(root)):
        try:
            verify(path)
        except BrokenCheckpoint as problem:
            logger.warning("%s It is passed over.", problem)
        else:
            return path
    return None


def rotate(root: Path, *, keep_last: int, best: Iterable[int]) -> None:
    """Delete all checkpoints but the newest `keep_last` (at least one) and those of the updates in `best`."""
    checkpoints = list_checkpoints(root)
    kept = {update for update, _ in checkpoints[-max(1, keep_last) :]} | set(best)
    for update, path in checkpoints:
        if update not in kept:
            _retire(path)


def set_aside(root: Path, *, after: int) -> list[Path]:
    """Rename the checkpoints of later updates, for a run that goes on from an earlier one: they are of another course,
    and would be taken for its newest. Returns what they are called now; nothing is deleted."""
    renamed = []
    for update, path in list_checkpoints(root):
        if update > after:
            names = (f"set-aside-{update}" + (f".{number}" if number else "") for number in itertools.count())
            renamed.append(path.rename(next(root / name for name in names if not (root / name).exists())))
    return renamed


def clean(root: Path) -> None:
    """Remove what a process that died has left: half-written and half-deleted folders."""
    if root.is_dir():
        for path in root.iterdir():
            if path.name.startswith((_PARTIAL, _RETIRED)):
                _remove(path)


def write_file(path: Path, text: str) -> None:
    """Replace a small text file in one piece, forced to the disk."""
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    with explain_full_disk(path, remove=partial):
        partial.write_text(text, encoding="utf-8")
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)


@contextlib.contextmanager
def explain_full_disk(
    path: Path, *, last: Callable[[], Path | None] | None = None, remove: Path | None = None
) -> Iterator[None]:
    """Turn "no space left" into one sentence that says which checkpoint can still be used."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not _is_full_disk(error):
            raise
        if remove is not None:
            _remove(remove)
        newest = last() if last is not None else None
        usable = f" {newest} is the last whole checkpoint;" if newest is not None else ""
        raise MetaphraseError(
            f"No space is left on the disk: {path} could not be written;{usable} make room and go on with --resume."
        ) from None


def _is_full_disk(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error)  # safetensors' own


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, allow_nan=True), encoding="utf-8")


def _sync(path: Path) -> None:
    """Force a file or a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _retire(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that a half-deleted one never bears a checkpoint's name."""
    retired = path.with_name(f"{_RETIRED}{path.name}")
    _remove(retired)
    os.rename(path, retired)
    _remove(retired)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
