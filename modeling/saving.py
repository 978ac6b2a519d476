"""Saving leaves one set of weights, in a folder and on the Hub, and all that a whole model repo has beside it.

The library writes one file or, above a size, shards with an index, and leaves an earlier save in the other form where
it is: a stale single file is then loaded in place of the new shards, and a stale index names shards that are gone. It
also sends the model card in one commit with the weights, so that a card that the Hub refuses keeps them from arriving.
"""

import contextlib
import json
import os

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging
from transformers.utils.hub import hf_api

from .companions import (
    CARD,
    INDEX,
    RESULTS,
    RUN_RECORDS,
    SINGLE,
    TOKENIZER,
    WEIGHTS,
    Source,
    addressed,
    is_made,
    read_json,
    read_text,
    with_tags,
    write_companions,
)

logger = logging.get_logger(__name__)


def remove_stale_weights(folder: str | os.PathLike):
    """Removes the index if its shards are gone, and else the single file beside it; to be called after a save.

    A save in one file removes all shards, and a save in shards writes the index: so one of the two is stale.
    """
    index = os.path.join(folder, INDEX)
    if not os.path.isfile(index):
        return
    with open(index, encoding="utf-8") as file:
        shards = set(json.load(file)["weight_map"].values())
    whole = all(os.path.isfile(os.path.join(folder, shard)) for shard in shards)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder, SINGLE) if whole else index)


class OneSetOfWeights(PreTrainedModel):
    """A model whose `save_pretrained` and `push_to_hub` leave a whole repo, and nothing of an earlier save in it."""

    _source = Source()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, use_safetensors=None, **kwargs):
        """As the library's, but from safetensors alone: unpickling a `.bin` file runs what its writer likes.

        Raises:
            ValueError: if `use_safetensors` is False.
            OSError: if the place holds no safetensors.
        """
        if use_safetensors is False:
            raise ValueError(
                f"use_safetensors is False; {cls.__name__} is loaded from safetensors only, never a pickle."
            )
        try:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, use_safetensors=True, **kwargs)
        except OSError as error:
            if "file named" in str(error):  # the library would advise to unpickle
                raise OSError(f"{pretrained_model_name_or_path} has no {SINGLE} and no {INDEX}.") from None
            raise
        if pretrained_model_name_or_path is not None:
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            name = str(pretrained_model_name_or_path)
            model._source = Source(
                name=os.path.abspath(name) if os.path.isdir(name) else name,
                revision=kwargs.get("revision"),
                subfolder=kwargs.get("subfolder") or "",
                cache_dir=kwargs.get("cache_dir"),
                vocab_size=model.config.vocab_size,
            )
        return loaded

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        **kwargs,
    ):
        """As the library's; afterwards the folder holds either one file or shards with their index, and beside them
        results.json, a card, and the tokenizer as far as it is known. A card that somebody wrote stays."""
        sends = push_to_hub and self.should_save_on_this_rank(is_main_process)
        hub = {
            key: kwargs.pop(key)
            for key in ("repo_id", "private", "commit_message", "create_pr", "revision")
            if key in kwargs
        }
        os.makedirs(save_directory, exist_ok=True)
        before = self._get_files_timestamps(save_directory)
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if self.should_save_on_this_rank(is_main_process) and kwargs.get("variant") is None:
            remove_stale_weights(save_directory)
            write_companions(self, save_directory, self._source, os.path.basename(os.path.abspath(save_directory)))
        if sends:
            name, token = hub.pop("repo_id", os.path.basename(os.path.abspath(save_directory))), kwargs.get("token")
            repo = hf_api().create_repo(name, private=hub.pop("private", None), token=token, exist_ok=True)
            self._upload_modified_files(save_directory, repo.repo_id, before, token=token, **hub)

    def _upload_modified_files(
        self,
        working_dir: str | os.PathLike,
        repo_id: str,
        files_timestamps: dict[str, float],
        commit_message: str | None = None,
        token: bool | str | None = None,
        create_pr: bool = False,
        revision: str | None = None,
        commit_description: str | None = None,
    ) -> CommitInfo:
        """One commit with the new files, which also deletes weights that `working_dir` does not have, and records of
        the run that made other weights; then the card.

        A tokenizer that is on the Hub already stays, and so does a card that somebody wrote there.
        """
        if revision is not None and not revision.startswith("refs/"):
            with contextlib.suppress(*([HfHubHTTPError] if create_pr else [])):  # a proposer may not make branches
                hf_api().create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        present = set(hf_api().list_repo_files(repo_id, revision=revision, token=token))
        kept = {CARD, *(TOKENIZER if present.intersection(TOKENIZER) else ())}
        new = [name for name in _new_files(working_dir, files_timestamps) if name not in kept]
        saved = {name for name in os.listdir(working_dir) if WEIGHTS.fullmatch(name)}
        stale = {name for name in present - saved if WEIGHTS.fullmatch(name)} if saved else set()
        if RESULTS in present and saved:  # records of a run that made other weights
            before = read_json(hf_api().hf_hub_download(repo_id, RESULTS, revision=revision, token=token))
            now = read_json(os.path.join(working_dir, RESULTS))
            stale |= present.intersection(RUN_RECORDS) if before.get("weights") != now.get("weights") else set()
        additions = [CommitOperationAdd(name, os.path.join(working_dir, name)) for name in new]
        commit = hf_api().create_commit(
            repo_id,
            [*additions, *map(CommitOperationDelete, sorted(stale))],
            commit_message=commit_message or "Upload model",
            commit_description=commit_description,
            token=token,
            create_pr=create_pr,
            revision=revision,
        )
        tags = None
        if not files_timestamps:  # a new folder, in which the library's push has replaced the card
            tags = ModelCard(read_text(os.path.join(working_dir, CARD))).data.tags
            os.remove(os.path.join(working_dir, CARD))
            write_companions(self, working_dir, self._source, repo_id.split("/")[-1])
        card = read_text(os.path.join(working_dir, CARD))
        where = {"revision": commit.pr_revision or revision, "token": token}
        _send_card(card, tags, repo_id, there=CARD in present, create_pr=create_pr and not commit.pr_url, **where)
        return commit


def _send_card(card: str, tags: list[str] | None, repo_id: str, *, there: bool, create_pr: bool, **where):
    """Uploads the card with these tags too; one that somebody wrote, `there` on the Hub, is kept in its place. A Hub
    that refuses it leaves a warning."""
    try:
        present = read_text(hf_api().hf_hub_download(repo_id, CARD, **where)) if there else ""
        card = with_tags(present if there and not is_made(present) else card, tags)
        hf_api().upload_file(
            path_or_fileobj=addressed(card, repo_id).encode(),
            path_in_repo=CARD,
            repo_id=repo_id,
            commit_message="Add the model card",
            create_pr=create_pr,
            **where,
        )
    except (ValueError, HfHubHTTPError) as error:
        logger.warning(f"The model is at {repo_id} without its card, which the Hub refuses: {error}")


def _new_files(folder: str | os.PathLike, before: dict[str, float]) -> list[str]:
    """Names of the files in `folder` that are new, or newer than `before` says."""
    paths = {name: os.path.join(folder, name) for name in sorted(os.listdir(folder))}
    return [
        name
        for name, path in paths.items()
        if os.path.isfile(path) and (name not in before or os.path.getmtime(path) > before[name])
    ]
