"""The Hub as one ASGI application: routes, error answers, and the fault injector around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import api, files
from .faults import FaultInjector
from .repos import HubError, RepositoryStore, User

USERS = {"hf_alice": User("alice"), "hf_alice_read": User("alice", can_write=False), "hf_bob": User("bob")}


class QuotedSegment(Convertor[str]):
    """One segment of a path in which `%2F` stands for a slash: `dev%2Fx` is the revision `dev/x`."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        return value


class QuotedPath(QuotedSegment):
    """The rest of a path, percent-encoded."""

    regex = ".+"


class RepoKind(QuotedSegment):
    regex = "models|datasets|spaces"


class ReferenceGroup(QuotedSegment):
    regex = "branch|tag"


register_url_convertor("text", QuotedSegment())
register_url_convertor("rest", QuotedPath())
register_url_convertor("kind", RepoKind())
register_url_convertor("group", ReferenceGroup())


def endpoint(work: api.Work) -> Callable[[Request], Awaitable[Response]]:
    """`work`, run in a thread with the request's body, its `HubError` turned into the answer that the client knows."""

    async def call(request: Request) -> Response:
        body = await request.body()
        return await run_in_threadpool(work, request, body)

    return call


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HubError)
    headers = {"X-Error-Message": error.message.replace("\n", " ")}
    if error.code:
        headers["X-Error-Code"] = error.code
    if error.commit:
        headers["X-Repo-Commit"] = error.commit
    return JSONResponse({"error": error.message}, error.status, headers)


def routes() -> list[Route]:
    repo = "/api/{kind:kind}/{namespace:text}/{name:text}"
    large = "/lfs/{kind:kind}/{namespace:text}/{name:text}/{oid:text}"
    table: list[tuple[str, str, api.Work]] = [
        ("GET", "/api/whoami-v2", api.whoami),
        ("POST", "/api/validate-yaml", api.validate_yaml),
        ("POST", "/api/repos/create", api.create_repo),
        ("DELETE", "/api/repos/delete", api.delete_repo),
        ("POST", "/api/repos/move", api.move_repo),
        ("GET", repo, api.repo_info),
        ("PUT", f"{repo}/settings", api.change_settings),
        ("GET", f"{repo}/revision/{{revision:text}}", api.repo_info),
        ("GET", f"{repo}/tree/{{revision:text}}", api.list_tree),
        ("GET", f"{repo}/tree/{{revision:text}}/{{path:rest}}", api.list_tree),
        ("POST", f"{repo}/paths-info/{{revision:text}}", api.paths_info),
        ("GET", f"{repo}/refs", api.list_references),
        ("GET", f"{repo}/commits/{{revision:text}}", api.list_commits),
        ("POST", f"{repo}/preupload/{{revision:text}}", api.preupload),
        ("POST", f"{repo}/commit/{{revision:text}}", api.commit),
        ("POST", f"{repo}/{{group:group}}/{{revision:text}}", api.create_reference),
        ("DELETE", f"{repo}/{{group:group}}/{{revision:text}}", api.delete_reference),
        ("POST", f"{large}/verify", files.verify),
    ]
    built = [Route(path, endpoint(work), methods=[method]) for method, path, work in table]
    built += [
        Route(large, files.object_endpoint, methods=["GET", "PUT", "POST"]),
        Route(f"{large}/part/{{part:int}}", files.part_endpoint, methods=["PUT"]),
    ]
    for prefix in ("/{kind:kind}", ""):
        page = f"{prefix}/{{namespace:text}}/{{name:text}}"
        built.append(Route(f"{page}.git/info/lfs/objects/batch", endpoint(files.batch), methods=["POST"]))
        built.append(Route(f"{page}/resolve/{{revision:text}}/{{path:rest}}", endpoint(files.resolve), methods=["GET"]))
    return built


def keep_percent_encoding(app: ASGIApp) -> ASGIApp:
    """Route on the path as it was sent; the convertors unquote each piece after it is split at the slashes."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["raw_path"].decode("ascii")}
        await app(scope, receive, send)

    return call


def build_app(root: Path) -> ASGIApp:
    """The Hub over the repositories in `root`."""
    app = Starlette(routes=routes(), exception_handlers={HubError: answer_error})
    app.state.store = RepositoryStore(root, USERS)
    return FaultInjector(keep_percent_encoding(app))
