"""One run a folder: a lock that names its holder, and that a dead holder does not keep."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows has none: there the process number alone decides
    fcntl = None

from metaphrase.configuration.errors import MetaphraseError

NAME = ".lock"
FOREIGN = 600.0
"""Seconds without a sign of life after which a lock that another host left counts as stale."""

_held: set[Path] = set()
"""Locks of this process: the system's locks do not keep a process from itself."""


class FolderLock:
    """Holds `folder/.lock` while inside a `with` block.

    The system's own lock on the file ends with its process, however that dies. Where a file system does not carry it
    from one host to another, the holder's host and the file's age decide: call `touch` now and then.

    Raises:
        MetaphraseError: another run holds the folder; names its process, host and start.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve() / NAME
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path in _held:
            raise self._taken(_read(self.path))
        while True:
            holder = _read(self.path)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            if not _lock(descriptor) or self._lives(holder):
                os.close(descriptor)
                raise self._taken(holder)
            if self.path.exists() and os.path.samestat(os.fstat(descriptor), self.path.stat()):
                break
            os.close(descriptor)  # its holder left, and took the file along, between our opening and locking
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(mine).encode(), 0)
        self._descriptor = descriptor
        _held.add(self.path)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        _held.discard(self.path)

    def touch(self) -> None:
        """A sign of life for other hosts."""
        os.utime(self._descriptor)

    def _lives(self, holder: dict[str, object]) -> bool:
        """Whether the one who wrote the file holds it, although the system lets us have its lock."""
        if not holder:
            return False
        if holder.get("host") != socket.gethostname():
            return time.time() - self.path.stat().st_mtime < FOREIGN
        return fcntl is None and _is_running(holder.get("pid"))

    def _taken(self, holder: dict[str, object]) -> MetaphraseError:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} (since {holder.get('since', '?')})"
        return MetaphraseError(
            f"{self.path.parent} is in use by {who}; wait for it to end, or choose another --output."
        )


def _lock(descriptor: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_running(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except (OSError, ValueError):
        return False
    return True


def _read(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_bytes() or b"{}"))
    except (OSError, ValueError):
        return {}
