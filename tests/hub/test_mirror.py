"""A mirror server that was not written here reads the test Hub's git repositories, and answers the client alike.

`olah` (PyPI) wants older libraries than this project, so it lives in an environment of its own, which `make test-slow`
sets up; elsewhere the variable OLAH_CLI may say where its command is.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Hub

OLAH = shutil.which(os.environ.get("OLAH_CLI") or "olah-cli")
CONFIGURATION = """
[basic]
host = "127.0.0.1"
port = {port}
repos-path = "{folder}/cache"
mirrors-path = ["{root}"]
[accessibility]
offline = true
"""


@pytest.fixture
def mirror(hub: Hub, tmp_path: Path) -> Iterator[str]:
    """Address of an olah server over the repositories of the test Hub, cut off from any other."""
    if OLAH is None:
        pytest.skip("there is no olah-cli; `make test-slow` installs it")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    configuration = tmp_path / "olah.toml"
    configuration.write_text(CONFIGURATION.format(port=port, folder=tmp_path, root=hub.root))
    command = [OLAH, "--config", str(configuration), "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(
        [*command, "--log-path", str(tmp_path / "logs")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait_for(url: str, seconds: float = 60.0) -> None:
    """Return once a server answers at `url`, with whatever status."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"nothing answers at {url}")


def fill_repo() -> None:
    from huggingface_hub import HfApi

    api, repo = HfApi(), "alice/mirrored"
    api.create_repo(repo)
    folder = Path("mirrored")
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
    (folder / "config.json").write_text('{"model_type": "metaphrase"}')
    (folder / "sub" / "text.txt").write_text("naïve\n")
    api.upload_folder(repo_id=repo, folder_path=folder)
    api.create_tag(repo, tag="v1")
    api.upload_file(path_or_fileobj=b"changed", path_in_repo="config.json", repo_id=repo)


def read_repo() -> dict[str, Any]:
    """What a client reads from the repo: ids, files with hashes, references, contents.

    The list of commits is left out: olah 0.5.4 answers it without the field that the client reads.
    """
    import hashlib

    from huggingface_hub import HfApi, snapshot_download

    api, repo = HfApi(), "alice/mirrored"
    found: dict[str, Any] = {}
    for revision in ("main", "v1"):
        info = api.model_info(repo, revision=revision)
        tree = api.list_repo_tree(repo, recursive=True, revision=revision)
        # A mirror that is read only by commit, as transformers reads after the first answer
        folder = Path(snapshot_download(repo, revision=info.sha))
        files = [path for path in folder.rglob("*") if path.is_file()]
        found[revision] = {
            "sha": info.sha,
            "files": sorted(sibling.rfilename for sibling in info.siblings),
            "tree": sorted([item.path, item.size, item.blob_id] for item in tree if hasattr(item, "blob_id")),
            "contents": {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
        }
    refs = api.list_repo_refs(repo)
    found["refs"] = sorted([ref.ref, ref.target_commit] for ref in [*refs.branches, *refs.tags])
    return found


@pytest.mark.slow
def test_an_independent_mirror_reads_the_same(
    client: Callable[..., Any], hub: Hub, mirror: str, tmp_path: Path
) -> None:
    client(fill_repo)
    ours = client(read_repo, token=None, home=tmp_path / "ours")
    hub.url, address = mirror, hub.url
    try:
        theirs = client(read_repo, token=None, home=tmp_path / "theirs")
    finally:
        hub.url = address
    assert ours["main"]["sha"] != ours["v1"]["sha"] and len(ours["main"]["contents"]) == 4
    assert theirs == ours
