"""Folders of the cache: written beside and renamed, so that one is either whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

FORMAT = "3"
"""Goes into every fingerprint: change it when what is written changes."""


def fingerprint(*parts: object) -> str:
    """A short name for content that depends on all the parts."""
    digest = hashlib.sha256(FORMAT.encode())
    for part in parts:
        digest.update(b"\0" + str(part).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:20]


def cache_folder() -> Path:
    """Where read corpora, tokenizers, token ids and compiled kernels stay for the next start: METAPHRASE_CACHE or
    ~/.cache/metaphrase."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metaphrase"
    return Path(os.environ.get("METAPHRASE_CACHE") or default)


class Scratch:
    """A folder that lives as long as this object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="metaphrase-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `final` when the block ends well.

    Where another process was first, its folder stays: both wrote the same.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield folder
        with contextlib.suppress(OSError):  # not empty: another process was first
            os.replace(folder, final)
        if not final.is_dir():
            raise FileNotFoundError(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
