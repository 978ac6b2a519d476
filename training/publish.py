"""Publishing: a result folder becomes a repo on the Hugging Face Hub that loads with this package and without it.

Weights, code, tokenizer and results go up in one commit, which also removes weights of an earlier upload that the
folder does not have; the card follows in a second one, so that a refused card costs nothing but itself. Nothing is
unpickled or executed here, and the token goes to `huggingface_hub` and nowhere else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.modeling.companions import (
    CARD,
    INDEX,
    RESULTS,
    RUN_RECORDS,
    SINGLE,
    WEIGHTS,
    Source,
    addressed,
    plain_card,
    weights_digest,
)
from metaphrase.training.card import render_card
from metaphrase.training.card_rules import card_faults
from metaphrase.training.hub_answers import hub_answer
from metaphrase.training.public import PUBLIC, public_card

REQUIRED = ("config.json", "generation_config.json", "tokenizer_config.json")
PUBLISHED = (
    *("config.json", "generation_config.json", "results.json", "recipe.yaml", "train_log.jsonl", "curves.png"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.spm"),
    *("sentencepiece*.model", "spiece.model", "LICENSE*", ".gitattributes"),
)
PLAIN_CARD = """---
library_name: transformers
---

# {name}

A sequence-to-sequence model. Nothing was recorded of its training.
"""
PICKLES = ("training_args.bin",)
"""What the library's Trainer leaves in a repo: its arguments, a token among them if one was given."""
REFUSALS = (OSError, ValueError, RuntimeError, HTTPError)
"""What `huggingface_hub` raises when the Hub, the network or the caller's values are in the way."""


class CardRefused(MetaphraseError):
    """The model is published, its card is not. `url` is where the model is."""

    def __init__(self, sentence: str, url: str) -> None:
        super().__init__(sentence)
        self.url = url


@dataclass(frozen=True)
class Release:
    """What of a folder is published: its files by name, the card's text, and what stays behind.

    A file is a path, or its content where that is not what lies in the folder: see `public.py`.
    """

    files: dict[str, Path | bytes]
    card: str
    left_out: list[str]


def publish(
    model_dir: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> str:
    """Uploads a result folder to a repo of the Hub, which is made if it is not there.

    Args:
        model_dir: folder with a saved model, its tokenizer and, from a training run, card and results.
        repo_id: `owner/name`; a name alone stands for one's own namespace.
        private: whether a new repo is private; None: as the account has it.
        revision: branch to write to, made if it is not there; None: `main`.
        create_pr: propose the upload as a pull request in place of writing to the branch.
        token: access token; None: the one of `hf auth login`, or of the variable HF_TOKEN.
        tell: takes the lines that report what is done.

    Returns:
        The address of the repo, or of the pull request.

    Raises:
        CardRefused: the model is published, and the Hub does not take its card.
        MetaphraseError: the folder is not whole, or the Hub refuses; the sentence says which, and what would help.
    """
    release = read_release(Path(model_dir))
    faults = card_faults(release.card)
    if faults:
        tell(f"{CARD} breaks the Hub's rules, so the model goes up without it: {'; '.join(faults)}")
    if release.left_out:
        tell(f"not published: {', '.join(release.left_out)}")
    api = HfApi(token=token, library_name="metaphrase")
    try:
        repo_id = _make_repo(api, repo_id, private, None if create_pr else revision)
        commit = _upload_model(api, repo_id, release, revision, create_pr)
    except REFUSALS as error:
        raise MetaphraseError(_sentence(error, api, repo_id)) from None
    url = commit.pr_url or f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")
    if faults:
        raise CardRefused(f"the model is at {url} without its card, as {CARD} breaks a rule: {faults[0]}", url)
    try:
        card_commit = _upload_card(
            api, repo_id, release, commit.pr_revision or revision, create_pr and not commit.pr_url
        )
    except REFUSALS as error:
        raise CardRefused(f"the model is at {url} without its card: {_sentence(error, api, repo_id)}", url) from None
    return card_commit.pr_url or url


def read_release(folder: Path) -> Release:
    """What is to be published of a folder; reads names, the config and the code, and no weights.

    Raises:
        MetaphraseError: the folder is not a whole model; the sentence names what is missing.
    """
    if not folder.is_dir():
        raise MetaphraseError(f"there is no model folder {folder}")
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise MetaphraseError(
            f"{folder} is not a whole model, it has no {', no '.join(missing)}; save model and tokenizer there with "
            "save_pretrained"
        )
    files = {name for name in names if any(fnmatch(name, pattern) for pattern in PUBLISHED)}
    files |= _weight_files(folder) | _code_files(folder)
    _check_results(folder)
    everything = [path.name + "/" * path.is_dir() for path in sorted(folder.iterdir())]
    left_out = [name for name in everything if name not in files and name not in (CARD, "__pycache__/")]
    contents = {name: _public(folder / name) if name in PUBLIC else folder / name for name in sorted(files)}
    return Release(contents, public_card(_card(folder)), left_out)


def _public(path: Path) -> bytes:
    """A record of the run as everybody may see it."""
    try:
        return PUBLIC[path.name](path.read_text(encoding="utf-8")).encode()
    except (ValueError, AttributeError, yaml.YAMLError) as error:
        raise MetaphraseError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _check_results(folder: Path) -> None:
    """Scores are published only with the weights that they were measured on.

    Raises:
        MetaphraseError: results.json speaks of other weights, or the weights are broken.
    """
    speaks_of = _read_json(folder / RESULTS).get("weights") if (folder / RESULTS).is_file() else None
    try:
        digest = weights_digest(folder)
    except (ValueError, KeyError, AttributeError):
        raise MetaphraseError(f"the weights in {folder} are no safetensors; save the model there again") from None
    if speaks_of is not None and speaks_of != digest:
        raise MetaphraseError(
            f"{folder / RESULTS} speaks of other weights than lie beside it; save the model there with "
            f"save_pretrained, or remove {RESULTS} and {CARD}"
        )


def _card(folder: Path) -> str:
    """The folder's card; where there is none, one that is made from results.json, or one that promises nothing."""
    if (folder / CARD).is_file():
        return (folder / CARD).read_text(encoding="utf-8")
    name = folder.resolve().name
    results = {"name": name, **_read_json(folder / RESULTS)} if (folder / RESULTS).is_file() else {}
    if "training" in results:
        return render_card(results, curves=(folder / "curves.png").is_file())
    return plain_card(results, Source(), name) if "model" in results else PLAIN_CARD.format(name=name)


def _weight_files(folder: Path) -> set[str]:
    """The one set of weights: a single file, or an index with all its shards."""
    single, index = folder / SINGLE, folder / INDEX
    shards = set(_read_json(index).get("weight_map", {}).values()) if index.exists() else set()
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if single.exists() and (not shards or missing):
        return {SINGLE}
    if single.exists():
        raise MetaphraseError(f"{folder} holds both {SINGLE} and {INDEX} with its shards; remove the older of the two")
    if missing:
        raise MetaphraseError(f"{folder} has no {missing[0]}, which {INDEX} names")
    if not shards:
        raise MetaphraseError(f"{folder} has no {SINGLE}; save the model there with save_pretrained")
    return {INDEX, *shards}


def _code_files(folder: Path) -> set[str]:
    """Code that the config's `auto_map` names, and everything that it imports, all in the folder."""
    from transformers.dynamic_module_utils import get_relative_import_files

    config = _read_json(folder / "config.json")
    auto_map = config.get("auto_map") or {}
    if not auto_map and config.get("model_type") == "metaphrase":
        raise MetaphraseError(f"{folder / 'config.json'} has no auto_map; save the model there with save_pretrained")
    modules = {str(reference).split("--")[-1].split(".")[0] for reference in auto_map.values()}
    try:
        paths = [Path(path) for module in modules for path in get_relative_import_files(folder / f"{module}.py")]
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise MetaphraseError(
            f"{folder} has no {missing}, which the model's code needs; save the model there with save_pretrained"
        ) from None
    return {f"{module}.py" for module in modules} | {path.name for path in paths}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MetaphraseError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise MetaphraseError(f"{path} must hold one JSON object")
    return content


def _make_repo(api: HfApi, repo_id: str, private: bool | None, revision: str | None) -> str:
    """The full id of the repo, which is there when this returns, with the branch.

    Raises:
        MetaphraseError: the repo is public and was to be private: its weights would be seen by everybody.
    """
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(repo_id).private:
        raise MetaphraseError(f"{repo_id} is there already, and public; make it private first, or take another name")
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id


def _upload_model(api: HfApi, repo_id: str, release: Release, revision: str | None, create_pr: bool) -> CommitInfo:
    """One commit with everything but the card, and without weights and records of an earlier upload that the folder
    lacks."""
    present = api.list_repo_files(repo_id, revision=revision)
    old = (RESULTS, *RUN_RECORDS, *PICKLES)
    stale = [name for name in present if (WEIGHTS.fullmatch(name) or name in old) and name not in release.files]
    additions = [CommitOperationAdd(name, content) for name, content in release.files.items()]
    return api.create_commit(
        repo_id,
        [*additions, *map(CommitOperationDelete, stale)],
        commit_message="Upload model, tokenizer and code",
        revision=revision,
        create_pr=create_pr,
    )


def _upload_card(api: HfApi, repo_id: str, release: Release, revision: str | None, create_pr: bool) -> CommitInfo:
    return api.upload_file(
        path_or_fileobj=addressed(release.card, repo_id).encode(),
        path_in_repo=CARD,
        repo_id=repo_id,
        revision=revision,
        create_pr=create_pr,
        commit_message="Add the model card",
    )


def _sentence(error: BaseException, api: HfApi, repo_id: str) -> str:
    """One sentence for what the Hub, or the way to it, refused. It quotes no request, so that no token can be in it."""
    if isinstance(error, HFValidationError):
        return f"{repo_id!r} is no name of a repo; it must be like owner/name"
    if isinstance(error, ValueError) and not isinstance(error, HfHubHTTPError):
        return " ".join(str(error).split())
    answer = hub_answer(error)
    if answer is not None:
        return _status_sentence(answer, repo_id)
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token; log in with `hf auth login`"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and publishing needs the Hub"
    return f"the Hub at {api.endpoint} cannot be reached ({type(error).__name__})"


def _status_sentence(answer: HfHubHTTPError, repo_id: str) -> str:
    status = answer.response.status_code
    reasons = {
        401: "the Hub does not know this token, or there is none; log in with `hf auth login`",
        403: f"this token may not write to {repo_id}",
        404: f"there is no {repo_id}, or no such revision of it, for this token",
        412: f"{repo_id} was changed by somebody else at the same time; publish again",
        429: "the Hub asks to send less; publish again in some minutes",
    }
    if status >= 500:
        return f"the Hub fails with status {status}; publish again later, what has been sent is not sent twice"
    said = " ".join((answer.server_message or "it gives no reason").split())
    return reasons.get(status, f"the Hub refuses with status {status}: {said}")
