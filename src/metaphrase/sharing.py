"""The command that shares a model: `publish`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PublishOptions:
    """Uploads a result folder to the Hugging Face Hub: weights, code, tokenizer, results, and last its card."""

    revision: str | None = None
    """Branch to write to, made if it is not there. Unset: `main`."""


def publish_command(model: str, repo: str, options: PublishOptions, *, private: bool, create_pr: bool) -> None:
    """Publishes, and prints the address. The token is that of `hf auth login`, or of the variable HF_TOKEN.

    Raises:
        MetaphraseError: the folder is not whole, or the Hub refuses; the sentence says which, and what would help.
    """
    from .training.publish import publish

    print(publish(model, repo, private=private or None, revision=options.revision, create_pr=create_pr))
