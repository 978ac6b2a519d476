"""Bytes up and down: `resolve` with ranges, and the Git LFS interface with single and multi-part uploads."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from .api import base_url, repo_of, store_of, user_of
from .repos import Entry, HubError, HubRepository, RepoId

PART_BYTES = 6_000_000
"""Files above this go up in parts of this size, as files above some 5 GB do at the Hub."""
LFS_JSON = "application/vnd.git-lfs+json"


def resolve(request: Request, body: bytes) -> Response:
    """`GET` or `HEAD` of one file. Large files are answered at once, not by a redirect: see below."""
    with store_of(request).open(repo_of(request), user_of(request)) as repository:
        store_of(request).require_admission(repository, user_of(request))
        commit = repository.resolve(request.path_params["revision"])
        entry = repository.entries(commit).get(request.path_params["path"])
        if entry is None:
            raise HubError(404, "Entry not found", "EntryNotFound", commit=commit.id.decode())
        headers = {"X-Repo-Commit": commit.id.decode(), "Accept-Ranges": "bytes"}
        if entry.pointer:
            return _large_file(repository, entry, headers)
        headers["ETag"] = f'"{entry.blob}"'
        return _ranged(repository.read_blob(entry), request.headers.get("range"), headers)


def _large_file(repository: HubRepository, entry: Entry, headers: dict[str, str]) -> Response:
    # The Hub redirects to another host here. A redirect to the same host is followed by the client, which then misses
    # X-Repo-Commit.
    oid = entry.pointer.oid
    headers |= {"ETag": f'"{oid}"', "X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(entry.size)}
    return FileResponse(repository.large_file(oid), media_type="application/octet-stream", headers=headers)


def _ranged(data: bytes, wish: str | None, headers: dict[str, str]) -> Response:
    """`data`, or the one range `bytes=FIRST-LAST` of it that is wished for."""
    if not data or wish is None or not wish.startswith("bytes=") or "," in wish:
        return Response(data, headers=headers, media_type="text/plain; charset=utf-8")
    first, last = wish.removeprefix("bytes=").split("-")
    start = int(first) if first else max(len(data) - int(last), 0)
    stop = min(int(last) + 1, len(data)) if first and last else len(data)
    if start >= len(data):
        raise HubError(416, "Range not satisfiable")
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    return Response(data[start:stop], 206, headers, "text/plain; charset=utf-8")


def batch(request: Request, body: bytes) -> Response:
    """The LFS batch call: where to send each object, or nothing for one that is there already."""
    wish = json.loads(body)
    upload = wish["operation"] == "upload"
    repo_id = repo_of(request)
    with store_of(request).open(repo_id, user_of(request), write=upload) as repository:
        answers = [
            _upload_actions(request, repo_id, repository, item) if upload else _download_actions(request, repo_id, item)
            for item in wish["objects"]
        ]
    return JSONResponse({"transfer": "basic", "objects": answers, "hash_algo": "sha256"}, media_type=LFS_JSON)


def _object_url(request: Request, repo_id: RepoId, oid: str) -> str:
    return f"{base_url(request)}/lfs/{repo_id.kind}/{repo_id}/{oid}"


def _download_actions(request: Request, repo_id: RepoId, item: dict[str, object]) -> dict[str, object]:
    return {**item, "actions": {"download": {"href": _object_url(request, repo_id, str(item["oid"]))}}}


def _upload_actions(
    request: Request, repo_id: RepoId, repository: HubRepository, item: dict[str, object]
) -> dict[str, object]:
    oid, size = str(item["oid"]), int(str(item["size"]))
    if repository.large_file(oid).exists():
        return item
    url = _object_url(request, repo_id, oid)
    header: dict[str, str] = {}
    if size > PART_BYTES:
        header = {str(part): f"{url}/part/{part}" for part in range(1, math.ceil(size / PART_BYTES) + 1)}
        header["chunk_size"] = str(PART_BYTES)
    upload = {"href": url, "header": header}
    return {**item, "actions": {"upload": upload, "verify": {"href": f"{url}/verify"}}}


async def object_endpoint(request: Request) -> Response:
    """`/lfs/KIND/NAMESPACE/NAME/OID`: PUT a whole object, POST to join its parts, GET to read it.

    The address is the permission, as with the signed addresses of the Hub: the LFS batch call gives it to whoever may
    have it.
    """
    target = _object_path(request)
    if request.method == "GET":
        return FileResponse(target) if target.exists() else JSONResponse({"error": "no such object"}, 404)
    if request.method == "PUT":
        await _store(request.stream(), target, sha256=request.path_params["oid"])
        return Response(status_code=200)
    parts = [_part_path(target, part["partNumber"]) for part in json.loads(await request.body())["parts"]]
    await _store(_read_parts(parts), target, sha256=request.path_params["oid"])
    for part in parts:
        part.unlink()
    return Response(status_code=200)


async def part_endpoint(request: Request) -> Response:
    """PUT one part of an object; its hash is the ETag that the client hands back when it joins them."""
    digest = await _store(request.stream(), _part_path(_object_path(request), request.path_params["part"]))
    return Response(status_code=200, headers={"ETag": f'"{digest}"'})


def verify(request: Request, body: bytes) -> Response:
    target = _object_path(request)
    if not target.exists() or target.stat().st_size != json.loads(body)["size"]:
        raise HubError(404, "LFS object missing or of another size")
    return JSONResponse({})


def _object_path(request: Request) -> Path:
    oid = request.path_params["oid"]
    objects = store_of(request).folder(repo_of(request)) / ".git" / "lfs" / "objects"
    return objects / oid[:2] / oid[2:4] / oid


def _part_path(target: Path, number: int) -> Path:
    return target.with_name(f"{target.name}.part{number}")


async def _read_parts(parts: list[Path]) -> AsyncIterator[bytes]:
    for part in parts:
        yield await run_in_threadpool(part.read_bytes)


async def _store(chunks: AsyncIterator[bytes], target: Path, sha256: str | None = None) -> str:
    """Write `chunks` to `target` once they are all there (and hash to `sha256`); a broken upload leaves nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    handle, name = tempfile.mkstemp(dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            async for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise HubError(400, "the object's bytes do not hash to its name")
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return digest.hexdigest()
