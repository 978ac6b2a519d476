"""`python -m server ROOT`: serve on a free loopback port, print `PORT n`, end when standard input closes.

The process that started it holds the other end of standard input, so the Hub never outlives it.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import uvicorn

from .app import build_app


def main(root: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(root), log_level="critical", lifespan="off"))

    def stop_with_parent() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop_with_parent, daemon=True).start()
    print(f"PORT {listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
