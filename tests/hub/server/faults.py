"""Failures on demand: the next requests that match a rule get an error, half a body, or no answer; and a request log.

A test posts a rule to `/_test/faults`; each rule is used up after `times` requests. `/_test/requests` lists what the
clients asked, so that a test can see what was sent again and what was not.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class Fault:
    """One rule: which requests fail, how, and how often."""

    method: str
    path: str
    """Regular expression that is searched in the request's path."""
    kind: Literal["status", "half_body", "stalled_body", "drop_upload", "stalled_upload", "slow"]
    status: int = 500
    times: int = 1
    retry_after: int | None = None
    seconds: float = 0.0

    def matches(self, method: str, path: str) -> bool:
        return self.times > 0 and method == self.method and re.search(self.path, path) is not None


class ConnectionLost(Exception):
    """Ends a request in the middle; uvicorn then closes the connection."""


class FaultInjector:
    """ASGI middleware around the Hub."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.faults: list[Fault] = []
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method, path = scope["method"], scope["raw_path"].decode()
        if path.startswith("/_test/"):
            await (await self._control(Request(scope, receive)))(scope, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        entry = {"method": method, "path": path, "range": headers.get("range"), "status": None}
        self.requests.append(entry)

        async def log_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
            await send(message)

        fault = next((fault for fault in self.faults if fault.matches(method, path)), None)
        if fault is None:
            await self.app(scope, receive, log_status)
            return
        fault.times -= 1
        await self._fail(fault, scope, receive, log_status)

    async def _control(self, request: Request) -> Response:
        if request.url.path == "/_test/requests":
            return JSONResponse(self.requests)
        if request.method == "DELETE":
            self.faults.clear()
            self.requests.clear()
            return JSONResponse({})
        self.faults.append(Fault(**json.loads(await request.body())))
        return JSONResponse({})

    async def _fail(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        if fault.kind == "status":
            headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            response = JSONResponse({"error": "injected failure"}, fault.status, headers)
            await response(scope, receive, send)
        elif fault.kind == "drop_upload":
            await receive()
            raise ConnectionLost
        elif fault.kind == "half_body":
            await self.app(scope, receive, _half_body(send))
        elif fault.kind == "stalled_body":
            await self.app(scope, receive, _half_body(send, stall=fault.seconds))
        elif fault.kind == "stalled_upload":
            await receive()
            await asyncio.sleep(fault.seconds)
            raise ConnectionLost
        else:
            await asyncio.sleep(fault.seconds)
            await self.app(scope, receive, send)


def _half_body(send: Send, stall: float = 0.0) -> Send:
    """A `send` that announces the whole body, passes half of it on, and after `stall` seconds loses the connection."""
    left = 0

    async def send_half(message: Message) -> None:
        nonlocal left
        if message["type"] == "http.response.start":
            length = next(int(value) for name, value in message["headers"] if name.lower() == b"content-length")
            left = length // 2
            await send(message)
            return
        body = message.get("body", b"")[:left]
        left -= len(body)
        await send({**message, "body": body, "more_body": True})
        if left <= 0:
            await asyncio.sleep(stall)
            raise ConnectionLost

    return send_half
