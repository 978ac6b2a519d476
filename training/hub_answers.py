"""What the Hub answered, in one sentence for whoever wants to load a model from it. No sentence quotes a request."""

from __future__ import annotations

from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError


def hub_answer(error: BaseException | None) -> HfHubHTTPError | None:
    """The answer of the Hub that `error` stands for; libraries wrap it, once or more."""
    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__ or error.__context__
    return error


def loading_sentence(error: BaseException, name: str) -> str:
    """Why the model `name` could not be loaded."""
    answer = hub_answer(error)
    said = " ".join(str(error).split())
    if isinstance(answer, GatedRepoError):
        return f"{name} is open to those whom its owner admits; ask on its page, and log in with `hf auth login`"
    if isinstance(answer, RepositoryNotFoundError):
        return (
            f"there is no folder {name}, and no model {name} on the Hub that you may see; log in with `hf auth login`"
        )
    if answer is not None and answer.response.status_code == 401:
        return "the Hub does not know this token; log in with `hf auth login`"
    if answer is not None and answer.response.status_code >= 500:
        return f"the Hub fails with status {answer.response.status_code}; load {name} again later"
    if "model_type" in said or "model type" in said:
        return f"{name} holds no known model: its config.json is missing, or names no known model_type"
    if "couldn't connect" in said or "offline" in said.lower():
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        return f"{why}, and {name} is not whole in the cache"
    return said.rstrip(".")
