"""What stands in the way of loading from the Hub is told in one sentence, with exit code 2, and quotes no token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import Answer


def refuse() -> dict[str, list[Any]]:
    """What `metaphrase translate` tells of repos that cannot be loaded: exit code and sentence."""
    import contextlib
    import io
    import os
    from pathlib import Path

    import torch
    from huggingface_hub import HfApi
    from tiny import save_tiny

    from metaphrase.cli import main
    from metaphrase.training.publish import publish

    api = HfApi(token="hf_alice")
    save_tiny("tiny")
    for name in ("private", "gated"):
        publish("tiny", f"alice/{name}", token="hf_alice", private=name == "private", tell=lambda line: None)
    api.update_repo_settings("alice/gated", gated="manual")
    for name, config in (("nothing", None), ("martian", '{"model_type": "martian"}'), ("torch_only", None)):
        api.create_repo(f"alice/{name}")
        if config:
            api.upload_file(path_or_fileobj=config.encode(), path_in_repo="config.json", repo_id=f"alice/{name}")
    torch.save({}, "pytorch_model.bin")
    for file in ("pytorch_model.bin", "tiny/config.json"):
        api.upload_file(path_or_fileobj=file, path_in_repo=Path(file).name, repo_id="alice/torch_only")
    Path("in").write_text("a b\n")
    told = {}
    for name, token in (
        *(("missing", "hf_alice"), ("private", "hf_bob"), ("gated", "hf_bob"), ("private", "hf_of_nobody")),
        *(("nothing", "hf_alice"), ("martian", "hf_alice"), ("torch_only", "hf_alice")),
    ):
        os.environ["HF_TOKEN"] = token
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            code = main(["translate", f"alice/{name}", "--input", "in", "--output", "out"])
        told[f"{name} {token}"] = [code, printed.getvalue().splitlines()]
    return told


def test_one_sentence_for_what_cannot_be_loaded(run_client: Callable[..., Answer]) -> None:
    answer = run_client(refuse, token=None)
    unseen = (
        "there is no folder alice/{0}, and no model alice/{0} on the Hub that you may see; log in with `hf auth login`"
    )
    unknown = "alice/{} holds no known model: its config.json is missing, or names no known model_type"
    expected = {
        "missing hf_alice": unseen.format("missing"),
        "private hf_bob": unseen.format("private"),
        "gated hf_bob": "alice/gated is open to those whom its owner admits; ask on its page, and log in with "
        "`hf auth login`",
        "private hf_of_nobody": "the Hub does not know this token; log in with `hf auth login`",
        "nothing hf_alice": unknown.format("nothing"),
        "martian hf_alice": unknown.format("martian"),
        "torch_only hf_alice": "alice/torch_only has no model.safetensors and no model.safetensors.index.json",
    }
    assert answer.value == {name: [2, [f"metaphrase: {sentence}"]] for name, sentence in expected.items()}
    assert "hf_of_nobody" not in answer.output and "hf_alice" not in answer.output


def load_nowhere() -> list[Any]:
    import contextlib
    import io
    from pathlib import Path

    from metaphrase.cli import main

    Path("in").write_text("a b\n")
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        code = main(["translate", "alice/private", "--input", "in", "--output", "out"])
    return [code, printed.getvalue().splitlines()]


def test_offline_without_a_cache(client: Callable[..., Any]) -> None:
    sentence = "metaphrase: HF_HUB_OFFLINE is set, and alice/private is not whole in the cache"
    assert client(load_nowhere, offline=True) == [2, [sentence]]
