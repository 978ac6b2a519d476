"""The test Hub answers the real client as the Hub does. The functions that take no fixture run in client processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Answer, Hub

Client = Callable[..., Any]
BIG = 14_000_000


def error_name(action: Callable[[], Any]) -> str:
    """Name of the exception that `action` raises, with the HTTP status where it has one."""
    try:
        action()
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", "")
        return f"{type(error).__name__} {status}".strip()
    return "no error"


# Tokens, private repos, foreign namespaces


def use_tokens(bad: str) -> dict[str, Any]:
    from huggingface_hub import HfApi

    alice, bob, reader = HfApi(token="hf_alice"), HfApi(token="hf_bob"), HfApi(token="hf_alice_read")
    anonymous = HfApi(token=False)
    alice.create_repo("alice/secret", private=True)
    alice.upload_file(path_or_fileobj=b"hidden", path_in_repo="note.txt", repo_id="alice/secret")
    found = {
        "who": alice.whoami()["name"],
        "bad token": error_name(HfApi(token=bad).whoami),
        "owner reads": Path(alice.hf_hub_download("alice/secret", "note.txt")).read_text(),
        "stranger": error_name(lambda: bob.model_info("alice/secret")),
        "anonymous": error_name(lambda: anonymous.model_info("alice/secret")),
        "foreign namespace": error_name(lambda: bob.create_repo("alice/mine")),
        "read token writes": error_name(
            lambda: reader.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="alice/secret")
        ),
        "twice": error_name(lambda: alice.create_repo("alice/secret")),
        "twice, allowed": str(alice.create_repo("alice/secret", exist_ok=True)),
        "missing": error_name(lambda: alice.model_info("alice/none")),
    }
    alice.update_repo_settings("alice/secret", private=False)
    found["published"] = anonymous.model_info("alice/secret").private
    alice.move_repo("alice/secret", "alice/known")
    found["moved"] = anonymous.file_exists("alice/known", "note.txt")
    alice.delete_repo("alice/known")
    found["deleted"] = alice.repo_exists("alice/known")
    return found


def test_tokens_decide_who_reads_and_writes(client: Client, hub: Hub) -> None:
    assert client(use_tokens, token=None, bad="hf_unknown") == {
        "who": "alice",
        "bad token": "HfHubHTTPError 401",
        "owner reads": "hidden",
        "stranger": "RepositoryNotFoundError 404",
        "anonymous": "RepositoryNotFoundError 401",
        "foreign namespace": "HfHubHTTPError 403",
        "read token writes": "HfHubHTTPError 403",
        "twice": "HfHubHTTPError 409",
        "twice, allowed": f"{hub.url}/alice/secret",
        "missing": "RepositoryNotFoundError 404",
        "published": False,
        "moved": True,
        "deleted": False,
    }


# Revisions, tags, pull requests, stale parents


def use_revisions() -> dict[str, Any]:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, repo = HfApi(), "alice/versions"
    api.create_repo(repo)

    def put(text: str, **where: Any) -> Any:
        return api.upload_file(path_or_fileobj=text.encode(), path_in_repo="a/b.txt", repo_id=repo, **where)

    def read(revision: str | None = None) -> str:
        return Path(api.hf_hub_download(repo, "a/b.txt", revision=revision)).read_text()

    first = put("one").oid
    api.create_tag(repo, tag="v1")
    api.create_branch(repo, branch="dev/x")
    put("on a branch", revision="dev/x")
    put("two")
    request = put("proposed", create_pr=True)
    found = {
        "main": read(),
        "tag": read("v1"),
        "branch": read("dev/x"),
        "commit": read(first),
        "pull request": read(request.pr_revision),
        "number": request.pr_num,
        "stale": error_name(lambda: put("late", parent_commit=first)),
        "unknown revision": error_name(lambda: read("v2")),
        "unknown file": error_name(lambda: api.hf_hub_download(repo, "none.txt")),
        "branch twice": error_name(lambda: api.create_branch(repo, branch="dev/x")),
        "titles": [commit.title for commit in api.list_repo_commits(repo)],
    }
    refs = api.list_repo_refs(repo, include_pull_requests=True)
    found["refs"] = [sorted(ref.ref for ref in group) for group in (refs.branches, refs.tags, refs.pull_requests)]
    operations = [CommitOperationDelete("a/"), CommitOperationAdd("c.txt", b"c")]
    api.create_commit(repo, operations, commit_message="Replace", commit_description="all of it")
    found["files"] = sorted(api.list_repo_files(repo))
    found["tree"] = [item.path for item in api.list_repo_tree(repo, revision="v1")]
    found["paths"] = [item.path for item in api.get_paths_info(repo, ["a", "a/b.txt", "no"], revision="v1")]
    api.delete_tag(repo, tag="v1")
    api.delete_branch(repo, branch="dev/x")
    found["after"] = error_name(lambda: api.model_info(repo, revision="v1"))
    return found


def test_revisions_tags_branches_and_pull_requests(client: Client, hub: Hub) -> None:
    found = client(use_revisions)
    assert found == {
        "main": "two",
        "tag": "one",
        "branch": "on a branch",
        "commit": "one",
        "pull request": "proposed",
        "number": 1,
        "stale": "HfHubHTTPError 412",
        "unknown revision": "RevisionNotFoundError 404",
        "unknown file": "RemoteEntryNotFoundError 404",
        "branch twice": "HfHubHTTPError 409",
        "titles": ["Upload a/b.txt with huggingface_hub"] * 2 + ["initial commit"],
        "refs": [["refs/heads/dev/x", "refs/heads/main"], ["refs/tags/v1"], ["refs/pr/1"]],
        "files": [".gitattributes", "c.txt"],
        "tree": ["a", ".gitattributes"],
        "paths": ["a", "a/b.txt"],
        "after": "RevisionNotFoundError 404",
    }
    repository = hub.repository("alice/versions")
    assert git(repository, "fsck", "--strict", "--full", "--no-dangling") == ""
    assert git(repository, "log", "--format=%s", "main").splitlines() == ["Replace", *found["titles"]]


def git(repository: Path, *arguments: str) -> str:
    """What git itself says about a repository; AssertionError when it fails."""
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Large files, failures, resumption


def upload_large(repo: str, seed: int, size: int = BIG) -> str:
    import hashlib
    import random

    from huggingface_hub import HfApi

    data = random.Random(seed).randbytes(size)
    api = HfApi()
    api.create_repo(repo, exist_ok=True)
    Path("folder").mkdir(exist_ok=True)
    Path("folder/model.safetensors").write_bytes(data)
    Path("folder/config.json").write_text("{}")
    api.upload_folder(repo_id=repo, folder_path="folder")
    return hashlib.sha256(data).hexdigest()


def download_large(repo: str) -> str:
    import hashlib

    from huggingface_hub import hf_hub_download

    return hashlib.sha256(Path(hf_hub_download(repo, "model.safetensors")).read_bytes()).hexdigest()


def sent(hub: Hub, method: str, piece: str) -> list[dict[str, Any]]:
    return [request for request in hub.requests() if request["method"] == method and piece in request["path"]]


def test_large_file_goes_up_in_parts_and_only_once(client: Client, hub: Hub) -> None:
    digest = client(upload_large, repo="alice/large", seed=1)
    assert [request["path"].rsplit("/", 1)[1] for request in sent(hub, "PUT", "/part/")] == ["1", "2", "3"]
    assert (
        hub.repository("alice/large") / ".git/lfs/objects" / digest[:2] / digest[2:4] / digest
    ).stat().st_size == BIG
    hub.reset()
    assert client(upload_large, repo="alice/large", seed=1) == digest
    assert sent(hub, "PUT", "/lfs/") == [] and sent(hub, "POST", "/commit/") == []


def test_upload_survives_500_429_and_a_lost_connection(client: Client, hub: Hub) -> None:
    hub.fail("PUT", "/part/1", "status", status=500)
    hub.fail("PUT", "/part/2", "status", status=429, retry_after=1)
    hub.fail("PUT", "/part/3", "drop_upload")
    digest = client(upload_large, repo="alice/tried", seed=2)
    assert client(download_large, repo="alice/tried") == digest
    parts = [(request["path"].rsplit("/", 1)[1], request["status"]) for request in sent(hub, "PUT", "/part/")]
    assert parts == [("1", 500), ("1", 200), ("2", 429), ("2", 200), ("3", None), ("3", 200)]


def test_interrupted_upload_goes_on_without_sending_the_weights_again(run_client: Client, hub: Hub) -> None:
    hub.fail("POST", "/commit/", "status", status=403)
    with pytest.raises(AssertionError, match="403"):
        run_client(upload_large, repo="alice/stopped", seed=3)
    hub.reset()
    digest = run_client(upload_large, repo="alice/stopped", seed=3).value
    assert sent(hub, "PUT", "/lfs/") == []
    assert run_client(download_large, repo="alice/stopped").value == digest


def test_download_resumes_after_half_a_body(run_client: Client, hub: Hub) -> None:
    """The client writes 10 MiB at a time, and goes on after the last that it has written."""
    digest = run_client(upload_large, repo="alice/halved", seed=4, size=24_000_000).value
    hub.reset()
    hub.fail("GET", "/resolve/.*/model.safetensors", "half_body")
    answer: Answer = run_client(download_large, repo="alice/halved")
    assert answer.value == digest
    gets = sent(hub, "GET", "/resolve/")
    assert [(get["range"], get["status"]) for get in gets] == [(None, 200), ("bytes=10485760-", 206)]


def test_download_tries_again_after_429(client: Client, hub: Hub) -> None:
    digest = client(upload_large, repo="alice/limited", seed=5)
    hub.fail("GET", "/resolve/.*/model.safetensors", "status", status=429, retry_after=1)
    assert client(download_large, repo="alice/limited") == digest


# Cards and datasets


def push_cards() -> dict[str, str]:
    from huggingface_hub import HfApi, ModelCard

    HfApi().create_repo("alice/cards")
    good = "---\nlanguage: [en, de]\nlicense: apache-2.0\n---\n# A model\n"
    bad = "---\nlanguage: [null]\nlicense: apache-2.0\n---\n# A model\n"
    return {
        "good": error_name(lambda: ModelCard(good).push_to_hub("alice/cards")),
        "refused by validation": error_name(lambda: ModelCard(bad).push_to_hub("alice/cards")),
        "refused at the commit": error_name(
            lambda: HfApi().upload_file(path_or_fileobj=bad.encode(), path_in_repo="README.md", repo_id="alice/cards")
        ),
        "loaded": ModelCard.load("alice/cards").data.license,
    }


def test_a_card_with_empty_metadata_is_refused(client: Client) -> None:
    assert client(push_cards) == {
        "good": "no error",
        "refused by validation": "ValueError",
        "refused at the commit": "ValueError",
        "loaded": "apache-2.0",
    }


def push_corpus() -> list[Any]:
    """A corpus goes up as a private dataset, comes down by the library, and is read by id for training."""
    from datasets import Dataset, load_dataset

    from metaphrase.configuration.options import DataOptions
    from metaphrase.training.data.corpus import read_corpus

    pairs = {"source": [f"a {n}" for n in range(50)], "target": [f"b {n}" for n in range(50)]}
    Dataset.from_dict(pairs).push_to_hub("alice/corpus", private=True)
    for split in ("validation", "test"):
        Dataset.from_dict({"source": ["x"], "target": [split]}).push_to_hub("alice/corpus", split=split)
    loaded = load_dataset("alice/corpus")
    corpus = read_corpus(DataOptions(path="alice/corpus"), Path("cache"))
    return [
        {split: len(loaded[split]) for split in sorted(loaded)},
        loaded["train"][49],
        [len(corpus.train), corpus.train[49]["source"], corpus.validation.references, corpus.read_test().references],
    ]


def test_a_corpus_is_pushed_and_read_for_training(client: Client) -> None:
    sizes, last, corpus = client(push_corpus)
    assert sizes == {"test": 1, "train": 50, "validation": 1}
    assert last == {"source": "a 49", "target": "b 49"}
    assert corpus == [50, "a 49", [["validation"]], [["test"]]]
