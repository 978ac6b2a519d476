"""The test Hub, running, and client processes that speak to it with the real libraries.

`huggingface_hub` reads its endpoint when it is imported, so everything that talks to the Hub runs in a child process:
a test hands one of its file's functions to `client(function, ...)` and gets the function's value back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WATCHDOG_SECONDS = 400
LIBRARY_SETTINGS = ("HF_", "HUGGING", "TRANSFORMERS_")


@dataclass
class Hub:
    """The running server: its address, and the folder with its git repositories."""

    url: str
    root: Path

    def repository(self, repo_id: str, kind: str = "models") -> Path:
        """The git working folder behind a repo."""
        return self.root / kind / repo_id

    def fail(self, method: str, path: str, kind: str, **details: Any) -> None:
        """Let the next request of `method` to a path that matches `path` fail: see `server/faults.py`."""
        self._call("POST", "faults", {"method": method, "path": path, "kind": kind, **details})

    def requests(self) -> list[dict[str, Any]]:
        """What was asked since the last `reset`."""
        return self._call("GET", "requests")

    def reset(self) -> None:
        """Forget failures and requests."""
        self._call("DELETE", "faults")

    def _call(self, method: str, name: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/_test/{name}", data, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@dataclass
class Answer:
    """What a client process left: its function's value, and everything that it printed."""

    value: Any
    output: str


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """One server a test session, on a free port. It ends with this process, whatever happens to it."""
    root = tmp_path_factory.mktemp("hub")
    command = [sys.executable, "-m", "server", str(root)]
    with subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        assert first_line.startswith("PORT "), "the test Hub did not start"
        yield Hub(f"http://127.0.0.1:{int(first_line.split()[1])}", root)
        process.communicate(timeout=30)


@pytest.fixture
def hub(hub_server: Hub) -> Hub:
    """The server without failures left over from another test."""
    hub_server.reset()
    return hub_server


def client_environment(url: str, home: Path, token: str | None, offline: bool) -> dict[str, str]:
    """The environment of a machine that knows only this Hub."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LIBRARY_SETTINGS)}
    environment |= {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    if token is not None:
        environment["HF_TOKEN"] = token
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def run_in_child(
    hub: Hub,
    folder: Path,
    function: Callable[..., Any],
    /,
    *,
    token: str | None = "hf_alice",
    offline: bool = False,
    blocked: tuple[str, ...] = (),
    home: Path | None = None,
    **arguments: Any,
) -> Answer:
    """Call `function(**arguments)` in a new process that works in `folder` and knows only this Hub.

    Raises AssertionError with the process's output when the function raises, TimeoutExpired when it hangs.
    """
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    command = child_command(hub, folder, function, token, offline, home)
    done = subprocess.run(
        **command, input=child_task(folder, function, arguments, blocked), timeout=WATCHDOG_SECONDS, capture_output=True
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{function.__name__} failed in its process:\n{output[-6000:]}"
    return Answer(json.loads(answer.read_text(encoding="utf-8")), output)


def kill_in_child(
    hub: Hub, folder: Path, function: Callable[..., Any], /, *, when: Callable[[], bool], **arguments: Any
) -> None:
    """Call `function(**arguments)` in a new process, and end it with SIGKILL as soon as `when()` is true.

    Raises AssertionError when the process ends before, TimeoutError when `when()` does not become true.
    """
    command = child_command(hub, folder, function, "hf_alice", False, None)
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(**command, **streams) as process:
        try:
            process.stdin.write(child_task(folder, function, arguments, ()))
            process.stdin.close()
            deadline = time.monotonic() + WATCHDOG_SECONDS
            while not when():
                assert process.poll() is None, f"{function.__name__} ended before it was to be killed"
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{function.__name__} did not come so far as to be killed")
                time.sleep(0.05)
        finally:
            process.kill()


def child_command(
    hub: Hub, folder: Path, function: Callable[..., Any], token: str | None, offline: bool, home: Path | None
) -> dict[str, Any]:
    """Arguments of `subprocess.run` for a process that works in `folder` and knows only this Hub."""
    return {
        "args": [sys.executable, str(HERE / "child.py")],
        "env": client_environment(hub.url, home or folder / "hf_home", token, offline),
        "cwd": folder,
        "text": True,
    }


def child_task(folder: Path, function: Callable[..., Any], arguments: dict[str, Any], blocked: tuple[str, ...]) -> str:
    """What `child.py` reads."""
    file = sys.modules[function.__module__].__file__
    task = {"file": file, "function": function.__name__, "arguments": arguments, "blocked": blocked}
    return json.dumps({**task, "answer": str(folder / "answer.json")}, default=str)


@pytest.fixture
def run_client(hub: Hub, tmp_path: Path) -> Callable[..., Answer]:
    """`run_client(function, token=, offline=, blocked=, home=, **arguments)` -> `Answer`."""
    return partial(run_in_child, hub, tmp_path)


@pytest.fixture
def client(run_client: Callable[..., Answer]) -> Callable[..., Any]:
    """`run_client`, for tests that want the value alone."""
    return lambda function, **options: run_client(function, **options).value


@pytest.fixture
def kill_client(hub: Hub, tmp_path: Path) -> Callable[..., None]:
    """`kill_client(function, when=, **arguments)`."""
    return partial(kill_in_child, hub, tmp_path)


@pytest.fixture(scope="session")
def prepare(hub_server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Answer]:
    """`run_client` for fixtures that many tests share; it works in a folder of the session."""
    return partial(run_in_child, hub_server, tmp_path_factory.mktemp("prepared"))
