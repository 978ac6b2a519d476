"""What the test Hub stores: one git repository a repo, large files beside it as Git LFS keeps them.

`ROOT/models/alice/tiny/.git` is an ordinary repository that `git fsck` and other tools can read; the bytes of large
files lie in `.git/lfs/objects`, and `.git/hub.json` says whether the repo is private.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dulwich.lfs import LFSPointer, LFSStore
from dulwich.object_store import commit_tree_changes, iter_tree_contents
from dulwich.objects import Blob, Commit, Tag, Tree
from dulwich.repo import Repo

Kind = Literal["models", "datasets", "spaces"]
LARGE_SUFFIXES = (".safetensors", ".parquet", ".arrow", ".bin", ".zip", ".gz", ".png")
REGULAR_FILE = 0o100644


class HubError(Exception):
    """An answer other than success; `code` is the Hub's `X-Error-Code`, which the client turns into an exception."""

    def __init__(self, status: int, message: str, code: str | None = None, commit: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.commit = status, message, code, commit


@dataclass(frozen=True)
class User:
    """Who holds a token, and whether the token may write."""

    name: str
    can_write: bool = True


@dataclass(frozen=True)
class RepoId:
    """`models`, `alice`, `tiny`."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def web_path(self) -> str:
        """Path of the repo's page: datasets and spaces carry a prefix, models none."""
        return str(self) if self.kind == "models" else f"{self.kind}/{self}"


@dataclass(frozen=True)
class Entry:
    """A file of a commit. `blob` is its git hash; `pointer` is set where git holds only a pointer to a large file."""

    path: str
    blob: str
    stored_size: int
    pointer: LFSPointer | None

    @property
    def size(self) -> int:
        return self.pointer.size if self.pointer else self.stored_size

    def row(self) -> dict[str, object]:
        """The file as `tree` and `paths-info` list it."""
        row: dict[str, object] = {"type": "file", "oid": self.blob, "size": self.size, "path": self.path}
        if self.pointer:
            row["lfs"] = {"oid": self.pointer.oid, "size": self.size, "pointerSize": self.stored_size}
        return row


class HubRepository:
    """One repo, open for reading and writing."""

    def __init__(self, repo_id: RepoId, folder: Path) -> None:
        self.id, self.git = repo_id, Repo(str(folder))
        self.settings_file = folder / ".git" / "hub.json"
        self.large_files = LFSStore.from_repo(self.git, create=True)

    @property
    def settings(self) -> dict[str, Any]:
        """`private`, and `gated`: whether the owner admits each reader."""
        kept = json.loads(self.settings_file.read_text()) if self.settings_file.exists() else {}
        return {"private": False, "gated": False, **kept}

    @property
    def private(self) -> bool:
        return bool(self.settings["private"])

    def change_settings(self, **changes: Any) -> None:
        self.settings_file.write_text(json.dumps({**self.settings, **changes}))

    def resolve(self, revision: str) -> Commit:
        """The commit that a branch, tag, full reference or commit id names; 404 when none does."""
        name = revision.encode()
        for reference in (b"refs/heads/" + name, b"refs/tags/" + name, name):
            if reference.startswith(b"refs/") and reference in self.git.refs:
                return self._peel(self.git.refs[reference])
        try:
            return self._peel(name) if len(name) == 40 else self._unknown(revision)
        except KeyError:
            return self._unknown(revision)

    def _peel(self, object_id: bytes) -> Commit:
        found = self.git[object_id]
        while isinstance(found, Tag):
            found = self.git[found.object[1]]
        if not isinstance(found, Commit):
            raise KeyError(object_id)
        return found

    def _unknown(self, revision: str) -> Commit:
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def entries(self, commit: Commit) -> dict[str, Entry]:
        """Path -> file, of every file in `commit`."""
        return {item.path.decode(): self._entry(item.path, item.sha) for item in self._walk(commit)}

    def _walk(self, commit: Commit) -> Iterator[object]:
        return iter_tree_contents(self.git.object_store, commit.tree)

    def _entry(self, path: bytes, blob: bytes) -> Entry:
        data = self.git[blob].data
        pointer = LFSPointer.from_bytes(data) if len(data) < 200 else None
        return Entry(path.decode(), blob.decode(), len(data), pointer)

    def read_blob(self, entry: Entry) -> bytes:
        return self.git[entry.blob.encode()].data

    def large_file(self, oid: str) -> Path:
        return Path(self.large_files.path) / "objects" / oid[:2] / oid[2:4] / oid

    def references(self, prefix: str) -> dict[str, str]:
        """Short name -> commit id, of the references below `prefix` (`refs/heads`)."""
        names = self.git.refs.as_dict(prefix.encode())
        return {name.decode(): self._peel(target).id.decode() for name, target in names.items()}

    def history(self, commit: Commit) -> list[Commit]:
        """`commit` and its ancestors, newest first."""
        return [step.commit for step in self.git.get_walker(include=[commit.id])]

    def write_commit(
        self, reference: str, parent: Commit | None, changes: dict[str, bytes | None], message: str, author: str
    ) -> Commit:
        """Move `reference` to a new commit with `changes` (path -> content, or None to delete) upon `parent`."""
        store = self.git.object_store
        rows: list[tuple[bytes, int | None, bytes | None]] = []
        for path, content in changes.items():
            blob = None if content is None else Blob.from_string(content)
            if blob is not None:
                store.add_object(blob)
            rows.append((path.encode(), REGULAR_FILE if blob else None, blob.id if blob else None))
        tree = commit_tree_changes(store, self.git[parent.tree] if parent else Tree(), rows)
        commit = Commit()
        commit.tree = getattr(tree, "id", tree)
        commit.parents = [parent.id] if parent else []
        commit.author = commit.committer = f"{author} <{author}@hub.test>".encode()
        commit.author_time = commit.commit_time = int(time.time())
        commit.author_timezone = commit.commit_timezone = 0
        commit.encoding, commit.message = b"UTF-8", message.encode()
        store.add_object(commit)
        self.git.refs[reference.encode()] = commit.id
        return commit


class RepositoryStore:
    """All repos of the Hub, and who may do what with them."""

    def __init__(self, root: Path, users: dict[str, User]) -> None:
        self.root, self.users, self.writing = root.resolve(), users, threading.RLock()

    def folder(self, repo_id: RepoId) -> Path:
        parts = (repo_id.namespace, repo_id.name)
        if any(part in ("", ".", "..") or "/" in part for part in parts):
            raise HubError(400, f"Invalid repo name: {repo_id}")
        return self.root.joinpath(repo_id.kind, *parts)

    @contextmanager
    def open(self, repo_id: RepoId, user: User | None, *, write: bool = False) -> Iterator[HubRepository]:
        """The repo, if `user` may see it (and change it). A private repo looks missing to everybody else."""
        folder = self.folder(repo_id)
        missing = HubError(404 if user else 401, "Repository not found", "RepoNotFound")
        if not folder.is_dir():
            raise missing
        repository = HubRepository(repo_id, folder)
        try:
            if repository.private and (user is None or user.name != repo_id.namespace):
                raise missing
            if write:
                self.require_owner(repo_id, user)
            yield repository
        finally:
            repository.git.close()

    def require_admission(self, repository: HubRepository, user: User | None) -> None:
        """Refuses the files of a gated repo to all but its owner; what is in it, everybody may know."""
        if repository.settings["gated"] and (user is None or user.name != repository.id.namespace):
            raise HubError(403 if user else 401, f"Access to {repository.id} is restricted", "GatedRepo")

    def require_owner(self, repo_id: RepoId, user: User | None) -> User:
        """`user`, if the repo's namespace is theirs and their token may write."""
        if user is None:
            raise HubError(401, "Invalid username or password.")
        if user.name != repo_id.namespace or not user.can_write:
            raise HubError(403, f"Forbidden: this token has no write access to {repo_id.namespace}")
        return user

    def create(self, repo_id: RepoId, user: User | None, *, private: bool) -> None:
        """A new repo with one commit that names the large files, as the Hub makes it; 409 where it exists."""
        owner = self.require_owner(repo_id, user)
        folder = self.folder(repo_id)
        with self.writing:
            if folder.exists():
                raise HubError(409, "You already created this repo")
            folder.mkdir(parents=True)
            Repo.init(str(folder), default_branch=b"main").close()
            repository = HubRepository(repo_id, folder)
            repository.change_settings(private=private)
            attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE_SUFFIXES)
            changes = {".gitattributes": attributes.encode()}
            repository.write_commit("refs/heads/main", None, changes, "initial commit", owner.name)
            repository.git.close()

    def delete(self, repo_id: RepoId, user: User | None) -> None:
        with self.writing, self.open(repo_id, user, write=True):
            shutil.rmtree(self.folder(repo_id))

    def move(self, source: RepoId, target: RepoId, user: User | None) -> None:
        with self.writing, self.open(source, user, write=True):
            self.require_owner(target, user)
            if self.folder(target).exists():
                raise HubError(409, f"{target} exists already")
            self.folder(target).parent.mkdir(parents=True, exist_ok=True)
            self.folder(source).rename(self.folder(target))
