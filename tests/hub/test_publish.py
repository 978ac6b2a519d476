"""`publish` leaves a whole repo on the Hub; what goes wrong is told in one sentence, and no token leaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Answer, Hub

CODE = {path.name for path in (Path(__file__).parents[2] / "modeling").glob("[!_]*.py")} | {"presets.py"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
RECORDS = ("README.md", "results.json", "recipe.yaml", "train_log.jsonl")
WHOLE = {".gitattributes", "config.json", "generation_config.json", *RECORDS, *CODE, *TOKENIZER}


def make(folder: str) -> None:
    from tiny import save_tiny

    from metaphrase.training.card import write_card

    save_tiny(folder)
    place = "/home/me/secret place"
    results = json.loads((Path(folder) / "results.json").read_text())
    results["command"] = f"metaphrase train tiny --data '{place}/corpus' --output={place.replace(' ', '_')}/runs/tiny"
    (Path(folder) / "results.json").write_text(json.dumps(results))
    (Path(folder) / "recipe.yaml").write_text(f"data:\n  path: {place}/corpus\nseed: 1\n")
    record = {"kind": "evaluation", "chrf": 1.5, "samples": [{"source": "a secret line"}]}
    (Path(folder) / "train_log.jsonl").write_text(json.dumps(record) + "\n")
    write_card(Path(folder), results)


@pytest.fixture(scope="module")
def result_folder(prepare: Callable[..., Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result folder whose name has a dot. Tests do not change it."""
    folder = tmp_path_factory.mktemp("results") / "tiny.v1"
    prepare(make, folder=folder)
    return folder


def publish_all(folder: str) -> dict[str, Any]:
    import shutil

    from huggingface_hub import HfApi, ModelCard
    from safetensors.torch import load_file
    from tiny import tiny_model, tiny_tokenizer

    from metaphrase.training.publish import publish

    api, lines = HfApi(), []
    found: dict[str, Any] = {"url": publish(folder, "alice/tiny", private=True, tell=lines.append), "told": lines}
    found["files"] = sorted(api.list_repo_files("alice/tiny"))
    texts = {name: Path(api.hf_hub_download("alice/tiny", name)).read_text() for name in RECORDS}
    found["secrets"] = sorted(name for name, text in texts.items() if "secret" in text or "/home" in text)
    found["command"] = json.loads(texts["results.json"])["command"]
    found["command on the card"] = found["command"] in texts["README.md"]
    found["private"] = api.model_info("alice/tiny").private
    found["titles"] = [commit.title for commit in api.list_repo_commits("alice/tiny")]
    card = ModelCard.load("alice/tiny").data
    found["card"] = [card.license, card.language, card.eval_results[0].metric_value, card.model_name]
    found["branch"] = on_command_line("publish", folder, "tiny", "--private", "--revision", "dev/one")
    # The other way round: in shards, and back in one file
    shutil.copytree(folder, "sharded")
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), seed=5)
    for size, name in (("20KB", "in shards"), ("1GB", "in one file")):
        model.save_pretrained("sharded", max_shard_size=size)
        found[f"folder {name}"] = weight_names(Path("sharded").iterdir())
        publish("sharded", "alice/tiny")
        found[f"hub {name}"] = weight_names(map(Path, api.list_repo_files("alice/tiny")))
        model.push_to_hub("alice/pushed", max_shard_size=size)
        found[f"pushed {name}"] = weight_names(map(Path, api.list_repo_files("alice/pushed")))
    weights = load_file(api.hf_hub_download("alice/tiny", "model.safetensors"))
    found["newest weights"] = bool((weights["model.shared.weight"] == model.model.shared.weight).all())
    found["pull request"] = publish(folder, "alice/tiny", create_pr=True)
    found["pull request files"] = sorted(api.list_repo_files("alice/tiny", revision="refs/pr/1"))
    (Path("sharded") / "README.md").write_text("---\nlanguage: de\n---\n# Only the card is new\n")
    found["card alone"] = publish("sharded", "alice/tiny", create_pr=True)
    found["main card"] = "Only the card" in Path(api.hf_hub_download("alice/tiny", "README.md")).read_text()
    tokenizer.push_to_hub("alice/pushed")
    found["pushed"] = sorted(api.list_repo_files("alice/pushed"))
    return found


def on_command_line(*words: str) -> str:
    import contextlib
    import io

    from metaphrase.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(words) == 0
    return printed.getvalue().strip()


def weight_names(paths: Any) -> list[str]:
    return sorted(path.name for path in paths if ".safetensors" in path.name)


def test_a_published_repo_is_whole(client: Callable[..., Any], hub: Hub, result_folder: Path) -> None:
    found = client(publish_all, folder=result_folder)
    whole = sorted({*WHOLE, "model.safetensors"})
    assert found["files"] == found["pull request files"] == whole
    assert found["url"] == f"{hub.url}/alice/tiny" and found["branch"] == f"{hub.url}/alice/tiny/tree/dev/one"
    assert found["pull request"] == f"{hub.url}/alice/tiny/discussions/1"
    assert found["card alone"] == f"{hub.url}/alice/tiny/discussions/2" and not found["main card"]
    assert found["told"] == ["not published: checkpoints/"]
    assert found["private"] is True
    assert found["secrets"] == [] and found["command on the card"]
    assert found["command"] == "metaphrase train tiny --data corpus --output=tiny"
    assert found["titles"] == ["Add the model card", "Upload model, tokenizer and code", "initial commit"]
    assert found["card"] == ["cc-by-nc-4.0", ["de", "en"], 12.5, 'tiny: a "test" model']
    for place in ("folder", "hub", "pushed"):
        shards = found[f"{place} in shards"]
        assert len(shards) >= 3 and shards[-1] == "model.safetensors.index.json"
        assert all(name.startswith("model-0000") for name in shards[:-1])
        assert found[f"{place} in one file"] == ["model.safetensors"]
    assert found["newest weights"]
    assert set(found["pushed"]) == {*whole} - {"recipe.yaml", "train_log.jsonl"}


def run_snippet(repo: str, number: int) -> str:
    """What one of the Python snippets of the repo's card prints. It is copied from the card as a reader would."""
    import contextlib
    import io
    import re

    from huggingface_hub import hf_hub_download

    card = Path(hf_hub_download(repo, "README.md")).read_text()
    snippet = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[number]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(snippet, {})
    return printed.getvalue()


def publish_simply(folder: str, repo: str) -> None:
    from metaphrase.training.publish import publish

    publish(folder, repo, tell=lambda line: None)


def test_the_snippets_of_a_card_run_as_they_stand(client: Callable[..., Any], result_folder: Path) -> None:
    """With the package, and by the repo's own code; for a repo with an odd name."""
    repo = "alice/Odd.name_1-x"
    client(publish_simply, folder=result_folder, repo=repo)
    ours = client(run_snippet, repo=repo, number=0, token=None)
    alone = client(run_snippet, repo=repo, number=1, token=None, blocked=("metaphrase",))
    assert ours.strip() and alone.strip()
    assert "custom code" not in ours + alone  # the library asks whether it may run it


def publish_badly(folder: str, kinds: list[str]) -> dict[str, Any]:
    """Publish with something wrong, by kind: the sentence that comes, and the files that the repo then holds."""
    return {kind: try_bad(folder, kind, f"alice/{kind.replace(' ', '-')}") for kind in kinds}


def try_bad(folder: str, kind: str, repo: str) -> list[Any]:
    import shutil

    from huggingface_hub import HfApi

    from metaphrase.configuration.errors import MetaphraseError
    from metaphrase.training.publish import publish

    work = Path("work")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder, work)
    repo = {"foreign": "bob/theirs", "bad name": "alice/a/b"}.get(kind, repo)
    if kind == "bad card":
        (work / "README.md").write_text("---\nlanguage: [null]\nlicense: Mine!\n---\n# x\n")
    elif kind == "public":
        HfApi().create_repo(repo)
    elif kind == "missing code":
        (work / "loss.py").unlink()
    elif kind == "missing shard":
        shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (work / "model.safetensors").rename(work / shards["a"])
        (work / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    elif kind == "other weights":
        (work / "results.json").write_text(json.dumps({"weights": "0" * 64, "test": {"chrf": {"score": 99.0}}}))
    elif kind == "broken weights":
        (work / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    elif kind == "no tokenizer":
        (work / "tokenizer_config.json").unlink()
    try:
        publish(work, repo, private=True if kind == "public" else None, tell=lambda line: None)
        sentence = "no error"
    except MetaphraseError as error:
        sentence = f"{type(error).__name__}: {error}"
    known = repo.count("/") == 1 and HfApi().repo_exists(repo)
    return [sentence, HfApi().list_repo_files(repo) if known else []]


BAD = {
    "bad card": "CardRefused: the model is at {url}/alice/bad-card without its card, as README.md breaks a rule: "
    "language[0] is empty",
    "public": "MetaphraseError: alice/public is there already, and public; make it private first, or take another name",
    "missing code": "MetaphraseError: work has no loss.py, which the model's code needs; save the model there with "
    "save_pretrained",
    "missing shard": "MetaphraseError: work has no model-00002-of-00002.safetensors, which "
    "model.safetensors.index.json names",
    "no tokenizer": "MetaphraseError: work is not a whole model, it has no tokenizer_config.json; save model and "
    "tokenizer there with save_pretrained",
    "other weights": "MetaphraseError: work/results.json speaks of other weights than lie beside it; save the model "
    "there with save_pretrained, or remove results.json and README.md",
    "broken weights": "MetaphraseError: the weights in work are no safetensors; save the model there again",
    "foreign": "MetaphraseError: this token may not write to bob/theirs",
    "bad name": "MetaphraseError: 'alice/a/b' is no name of a repo; it must be like owner/name",
}


def test_what_is_wrong_is_told_in_one_sentence(client: Callable[..., Any], hub: Hub, result_folder: Path) -> None:
    found = client(publish_badly, folder=result_folder, kinds=list(BAD))
    assert {kind: sentence for kind, (sentence, _) in found.items()} == {
        kind: sentence.format(url=hub.url) for kind, sentence in BAD.items()
    }
    assert "model.safetensors" in found["bad card"][1] and "README.md" not in found["bad card"][1]
    assert all(files in ([], [".gitattributes"]) for kind, (_, files) in found.items() if kind != "bad card")


def publish_loudly(folder: str, wishes: list[tuple[str, str]]) -> list[str]:
    """Publish to (repo, with token) with every logger at its loudest: what is told at the end of each."""
    import logging

    from metaphrase.configuration.errors import MetaphraseError
    from metaphrase.training.publish import publish

    logging.basicConfig(level=logging.DEBUG)
    told = []
    for repo, token in wishes:
        try:
            told.append(publish(folder, repo, token=token))
        except MetaphraseError as error:
            assert error.__cause__ is None and error.__suppress_context__
            told.append(str(error))
    return told


def test_a_failing_hub_loses_no_weights_and_no_token_is_logged(
    run_client: Callable[..., Answer], hub: Hub, result_folder: Path
) -> None:
    hub.fail("POST", "/api/validate-yaml", "status", status=400)
    hub.fail("POST", "/alice/failing/commit/", "status", status=503)
    wishes = [("alice/refused", "hf_alice"), ("alice/failing", "hf_alice"), ("alice/failing", "hf_of_nobody")]
    answer = run_client(publish_loudly, folder=result_folder, wishes=wishes, token=None)
    assert answer.value == [
        f"the model is at {hub.url}/alice/refused without its card: Invalid metadata in README.md.",
        "the Hub fails with status 503; publish again later, what has been sent is not sent twice",
        "the Hub does not know this token, or there is none; log in with `hf auth login`",
    ]
    assert len(list((hub.repository("alice/refused") / ".git/lfs/objects").glob("*/*/*"))) == 1
    assert "hf_alice" not in answer.output and "hf_of_nobody" not in answer.output
    assert "/alice/refused" in answer.output  # the loggers did speak
