"""Saving leaves one set of weights, in a folder and on the Hub.

The library writes one file or, above a size, shards with an index, and leaves an earlier save in the other form where
it is: a stale single file is then loaded in place of the new shards, and a stale index names shards that are gone.
"""

import contextlib
import json
import os
import re

from transformers.modeling_utils import PreTrainedModel
from transformers.utils.hub import hf_api

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


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
    """A model whose `save_pretrained` and `push_to_hub` remove what an earlier save in the other form left."""

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, *args, **kwargs):
        """As the library's; afterwards the folder holds either one file or shards with their index."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if self.should_save_on_this_rank(is_main_process) and kwargs.get("variant") is None:
            remove_stale_weights(save_directory)

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args, **kwargs):
        """As the library's; a second commit deletes the weights on the Hub that `working_dir` does not have."""
        remove_stale_weights(working_dir)
        commit = super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)
        saved = {name for name in os.listdir(working_dir) if WEIGHTS.fullmatch(name)}
        where = {"revision": commit.pr_revision or kwargs.get("revision"), "token": kwargs.get("token")}
        present = hf_api().list_repo_files(repo_id, **where)
        stale = [name for name in present if WEIGHTS.fullmatch(name) and name not in saved]
        if saved and stale:
            hf_api().delete_files(repo_id, stale, commit_message="Remove the weights of an earlier save", **where)
        return commit
