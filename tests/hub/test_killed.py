"""SIGKILL while a model goes up or comes down: the repo is never half-written, and the next try finishes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Hub

LARGE_VOCABULARY = 400_000
"""Makes weights of 25.6 MB: five parts to send, and more than the 10 MiB that the client writes at a time."""


def make_and_publish() -> dict[str, Any]:
    """Two models, of which the small one is published: what each is when loaded."""
    from tiny import save_tiny, tiny_model

    save_tiny("small", seed=1)
    save_tiny("large", seed=2)
    tiny_model(LARGE_VOCABULARY, seed=2).save_pretrained("large")
    publish_folder("small")
    return {name: load(name) for name in ("small", "large")}


def publish_folder(folder: str) -> None:
    from metaphrase.training.publish import publish

    publish(folder, "alice/killed", tell=lambda line: None)


def load(repo: str, **where: Any) -> list[Any]:
    """Size of the vocabulary and a digest of the weights, as they are loaded."""
    import hashlib

    from transformers import AutoModelForSeq2SeqLM

    import metaphrase  # noqa: F401

    model = AutoModelForSeq2SeqLM.from_pretrained(repo, **where)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return [model.config.vocab_size, digest]


def load_again() -> list[Any]:
    """From what the killed process left, which must not do; then from the Hub."""
    try:
        load("alice/killed", local_files_only=True)
    except OSError:
        return load("alice/killed")
    return ["half a file was taken for whole"]


def asked(hub: Hub, method: str, piece: str) -> list[dict[str, Any]]:
    return [row for row in hub.requests() if row["method"] == method and piece in row["path"]]


def tree(hub: Hub) -> str:
    """What the repo holds, as git names it, in a repository that is sound."""
    place = hub.repository("alice/killed")
    for words in (["fsck", "--strict", "--full", "--no-dangling"], ["rev-parse", "main^{tree}"]):
        done = subprocess.run(["git", *words], cwd=place, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.mark.slow
def test_killed_on_the_way_up_and_on_the_way_down(
    client: Callable[..., Any], kill_client: Callable[..., None], hub: Hub, tmp_path: Path
) -> None:
    models = client(make_and_publish)
    small = tree(hub)

    # While the weights of another version go up: the version before stays, whole
    hub.reset()
    hub.fail("PUT", "/part/3", "stalled_upload", seconds=5)
    kill_client(publish_folder, folder="large", when=lambda: bool(asked(hub, "PUT", "/part/3")))
    assert tree(hub) == small and asked(hub, "POST", "/commit/") == []

    # Between the weights and the card: the new version is there, with the card of the old one
    hub.reset()
    hub.fail("POST", "/validate-yaml", "slow", seconds=5)
    kill_client(publish_folder, folder="large", when=lambda: bool(asked(hub, "POST", "/validate-yaml")))
    assert tree(hub) != small and [row["status"] for row in asked(hub, "POST", "/commit/")] == [200]
    hub.reset()
    client(publish_folder, folder="large")
    assert asked(hub, "PUT", "/lfs/") == []  # the weights are not sent twice

    # While it comes down: half a file is not taken for whole. (The client shares no halves between processes.)
    hub.reset()
    hub.fail("GET", "/resolve/.*/model.safetensors", "stalled_body", seconds=5)
    halves = "hf_home/hub/**/*.incomplete"
    kill_client(
        load,
        repo="alice/killed",
        when=lambda: any(file.stat().st_size >= 10_485_760 for file in tmp_path.glob(halves)),
    )
    assert client(load_again) == models["large"] != models["small"]
