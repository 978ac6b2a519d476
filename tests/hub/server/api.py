"""The routes under `/api`: who am I, create and delete repos, list and change what is in them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from dulwich.lfs import LFSPointer
from dulwich.objects import Commit
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .cards import card_errors, card_tags
from .repos import LARGE_SUFFIXES, HubError, HubRepository, RepoId, RepositoryStore, User

LARGE_BYTES = 10_000_000
Work = Callable[[Request, bytes], Response]


def store_of(request: Request) -> RepositoryStore:
    return request.app.state.store


def user_of(request: Request) -> User | None:
    """Who the request's token belongs to; None without a token; 401 for one that nobody holds."""
    header = request.headers.get("authorization")
    if header is None:
        return None
    user = store_of(request).users.get(header.removeprefix("Bearer ").strip())
    if user is None:
        raise HubError(401, "Invalid credentials in Authorization header")
    return user


def repo_of(request: Request) -> RepoId:
    """The repo that the request's path names."""
    path = request.path_params
    return RepoId(path.get("kind", "models"), path["namespace"], path["name"])


def base_url(request: Request) -> str:
    return f"{request.url.scheme}://{request.headers['host']}"


# Users and repos


def whoami(request: Request, body: bytes) -> Response:
    user = user_of(request)
    if user is None:
        raise HubError(401, "Invalid username or password.")
    role = "write" if user.can_write else "read"
    token = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
    return JSONResponse({"type": "user", "id": user.name, "name": user.name, "orgs": [], "auth": token})


def validate_yaml(request: Request, body: bytes) -> Response:
    errors = card_errors(json.loads(body)["content"])
    answer = {"errors": [{"message": error} for error in errors], "warnings": []}
    return JSONResponse(answer, 400 if errors else 200)


def create_repo(request: Request, body: bytes) -> Response:
    wish, user = json.loads(body), user_of(request)
    kind = (wish.get("type") or "model") + "s"
    repo_id = RepoId(kind, wish.get("organization") or (user.name if user else ""), wish["name"])
    url = f"{base_url(request)}/{repo_id.web_path}"
    try:
        store_of(request).create(repo_id, user, private=wish.get("visibility") == "private")
    except HubError as error:
        if error.status != 409:
            raise
        return JSONResponse({"error": error.message, "url": url}, 409)  # the client reads the url of an existing repo
    return JSONResponse({"url": url, "id": str(repo_id), "name": str(repo_id)})


def delete_repo(request: Request, body: bytes) -> Response:
    wish, user = json.loads(body), user_of(request)
    namespace = wish.get("organization") or (user.name if user else "")
    store_of(request).delete(RepoId((wish.get("type") or "model") + "s", namespace, wish["name"]), user)
    return JSONResponse({})


def move_repo(request: Request, body: bytes) -> Response:
    wish = json.loads(body)
    kind = (wish.get("type") or "model") + "s"
    source, target = (RepoId(kind, *wish[key].split("/")) for key in ("fromRepo", "toRepo"))
    store_of(request).move(source, target, user_of(request))
    return JSONResponse({})


def change_settings(request: Request, body: bytes) -> Response:
    with store_of(request).open(repo_of(request), user_of(request), write=True) as repository:
        wish = json.loads(body)
        if "visibility" in wish:
            wish["private"] = wish["visibility"] == "private"
        repository.change_settings(**{name: wish[name] for name in ("private", "gated") if name in wish})
        return JSONResponse(repository.settings)


# Reading


def repo_info(request: Request, body: bytes) -> Response:
    with store_of(request).open(repo_of(request), user_of(request)) as repository:
        commit = repository.resolve(request.path_params.get("revision", "main"))
        with_sizes = "blobs" in request.query_params
        entries = repository.entries(commit)
        siblings = [_sibling(entry.row(), with_sizes) for entry in entries.values()]
        readme = repository.read_blob(entries["README.md"]).decode() if "README.md" in entries else ""
        answer = {
            "_id": commit.id.decode()[:24],
            "id": str(repository.id),
            "author": repository.id.namespace,
            "sha": commit.id.decode(),
            "lastModified": _date(commit),
            "createdAt": _date(commit),
            "private": repository.private,
            "gated": repository.settings["gated"],
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": card_tags(readme),
            "siblings": siblings,
        }
    return JSONResponse(answer)


def _sibling(row: dict[str, Any], with_sizes: bool) -> dict[str, Any]:
    if not with_sizes:
        return {"rfilename": row["path"]}
    sibling = {"rfilename": row["path"], "size": row["size"], "blobId": row["oid"]}
    if "lfs" in row:
        sibling["lfs"] = {"sha256": row["lfs"]["oid"], **row["lfs"]}
    return sibling


def _date(commit: Commit) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(commit.commit_time))


def list_tree(request: Request, body: bytes) -> Response:
    folder = request.path_params.get("path", "").strip("/")
    recursive = request.query_params.get("recursive", "").lower() in ("true", "1")
    with store_of(request).open(repo_of(request), user_of(request)) as repository:
        entries = repository.entries(repository.resolve(request.path_params["revision"]))
    start = f"{folder}/" if folder else ""
    rows, folders = [], set()
    for path, entry in entries.items():
        if not path.startswith(start):
            continue
        parts = path[len(start) :].split("/")
        depth = len(parts) if recursive else min(2, len(parts))
        folders |= {start + "/".join(parts[:level]) for level in range(1, depth)}
        if recursive or len(parts) == 1:
            rows.append(entry.row())
    if folder and not rows and not folders:
        raise HubError(404, f"{folder} does not exist", "EntryNotFound")
    return JSONResponse([*map(_folder_row, sorted(folders)), *rows])


def _folder_row(path: str) -> dict[str, object]:
    return {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}


def paths_info(request: Request, body: bytes) -> Response:
    wish = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
    with store_of(request).open(repo_of(request), user_of(request)) as repository:
        entries = repository.entries(repository.resolve(request.path_params["revision"]))
    rows = []
    for path in wish.get("paths", []):
        if path in entries:
            rows.append(entries[path].row())
        elif any(name.startswith(path.rstrip("/") + "/") for name in entries):
            rows.append(_folder_row(path))
    return JSONResponse(rows)


def list_references(request: Request, body: bytes) -> Response:
    groups = {"branches": "refs/heads", "tags": "refs/tags", "pullRequests": "refs/pr"}
    answer: dict[str, list[dict[str, str]]] = {"converts": []}
    with store_of(request).open(repo_of(request), user_of(request)) as repository:
        for group, prefix in groups.items():
            answer[group] = [
                {"name": name, "ref": f"{prefix}/{name}", "targetCommit": commit}
                for name, commit in repository.references(prefix).items()
            ]
    return JSONResponse(answer)


def list_commits(request: Request, body: bytes) -> Response:
    with store_of(request).open(repo_of(request), user_of(request)) as repository:
        commits = repository.history(repository.resolve(request.path_params["revision"]))
    return JSONResponse([_commit_row(commit) for commit in commits])


def _commit_row(commit: Commit) -> dict[str, object]:
    title, _, message = commit.message.decode().partition("\n")
    authors = [{"user": commit.author.decode().split(" <")[0]}]
    return {
        "id": commit.id.decode(),
        "title": title,
        "message": message.strip(),
        "authors": authors,
        "date": _date(commit),
    }


# Changing


def create_reference(request: Request, body: bytes) -> Response:
    """`POST branch/NAME {startingPoint}` and `POST tag/REVISION {tag}`; 409 where the name is taken."""
    wish = json.loads(body or b"{}")
    if request.path_params["group"] == "branch":
        prefix, name, start = "refs/heads", request.path_params["revision"], wish.get("startingPoint", "main")
    else:
        prefix, name, start = "refs/tags", wish["tag"], request.path_params["revision"]
    store = store_of(request)
    with store.writing, store.open(repo_of(request), user_of(request), write=True) as repository:
        if name in repository.references(prefix):
            raise HubError(409, f"Reference already exists: {name}")
        repository.git.refs[f"{prefix}/{name}".encode()] = repository.resolve(start).id
    return JSONResponse({})


def delete_reference(request: Request, body: bytes) -> Response:
    prefix = "refs/heads" if request.path_params["group"] == "branch" else "refs/tags"
    store = store_of(request)
    with store.writing, store.open(repo_of(request), user_of(request), write=True) as repository:
        name = request.path_params["revision"]
        if name not in repository.references(prefix):
            raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")
        del repository.git.refs[f"{prefix}/{name}".encode()]
    return JSONResponse({})


def preupload(request: Request, body: bytes) -> Response:
    """Which files go to the LFS store, and the hashes of those that the repo has already."""
    with store_of(request).open(repo_of(request), user_of(request), write=True) as repository:
        entries = repository.entries(repository.resolve(request.path_params["revision"]))
    files = []
    for wish in json.loads(body)["files"]:
        binary = b"\0" in base64.b64decode(wish.get("sample", ""))
        large = wish["path"].endswith(LARGE_SUFFIXES) or wish["size"] > LARGE_BYTES or binary
        file = {"path": wish["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        if entry := entries.get(wish["path"]):
            file["oid"] = entry.pointer.oid if entry.pointer else entry.blob
        files.append(file)
    return JSONResponse({"files": files})


def commit(request: Request, body: bytes) -> Response:
    """One commit from NDJSON lines; 412 on a stale parent, 400 on a card that breaks the metadata rules."""
    store, revision = store_of(request), request.path_params["revision"]
    as_pull_request = request.query_params.get("create_pr") == "1"
    with store.writing, store.open(repo_of(request), user_of(request), write=not as_pull_request) as repository:
        user = user_of(request)
        if user is None or not user.can_write:
            raise HubError(403, "Forbidden: a commit needs a write token")
        parent = repository.resolve(revision)
        header, changes = _read_commit(repository, parent, body)
        expected = header.get("parentCommit")
        if expected and not parent.id.decode().startswith(expected):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        number = 1 + len(repository.references("refs/pr")) if as_pull_request else None
        reference = f"refs/pr/{number}" if number else revision
        if not reference.startswith("refs/"):
            reference = f"refs/heads/{revision}"
        message = "\n\n".join(filter(None, (header.get("summary"), header.get("description"))))
        written = repository.write_commit(reference, parent, changes, message, user.name)
    page = f"{base_url(request)}/{repository.id.web_path}"
    answer = {"success": True, "commitOid": written.id.decode(), "commitUrl": f"{page}/commit/{written.id.decode()}"}
    if number:
        answer["pullRequestUrl"] = f"{page}/discussions/{number}"
    return JSONResponse(answer)


def _read_commit(
    repository: HubRepository, parent: Commit, body: bytes
) -> tuple[dict[str, Any], dict[str, bytes | None]]:
    """Header, and path -> new content (None: deleted), of the NDJSON lines of a commit."""
    header: dict[str, Any] = {}
    changes: dict[str, bytes | None] = {}
    present = repository.entries(parent)
    for line in filter(None, body.splitlines()):
        key, value = (item := json.loads(line))["key"], item["value"]
        if key == "header":
            header = value
        elif key == "file":
            changes[value["path"]] = _decode_file(value)
        elif key == "lfsFile":
            stored = repository.large_file(value["oid"])
            if not stored.exists():
                raise HubError(422, f"LFS object {value['oid']} was not uploaded")
            changes[value["path"]] = LFSPointer(value["oid"], stored.stat().st_size).to_bytes()
        elif key == "deletedFile":
            if value["path"] not in present:
                raise HubError(404, f"Entry not found: {value['path']}", "EntryNotFound")
            changes[value["path"]] = None
        elif key == "deletedFolder":
            changes |= {path: None for path in present if path.startswith(value["path"].rstrip("/") + "/")}
        else:
            raise HubError(400, f"Unknown commit line: {key}")
    return header, changes


def _decode_file(value: dict[str, str]) -> bytes:
    content = value["content"]
    data = base64.b64decode(content) if value.get("encoding") == "base64" else content.encode()
    if value["path"] == "README.md" and (errors := card_errors(data.decode())):
        raise HubError(400, "Invalid metadata in README.md: " + "; ".join(errors))
    return data
