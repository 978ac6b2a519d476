"""Publishing from the library's Trainer: a callback in place of its `push_to_hub`.

The Trainer's own push is one commit with everything that lies in its folder: weights of an earlier push stay beside
the new ones if they were cut in another way, its arguments go up as a pickle (with the token, if one is among them),
and a card that the Hub refuses keeps the weights from arriving.
"""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments
from transformers.utils import logging

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training.publish import publish

logger = logging.get_logger(__name__)


class PublishCallback(TrainerCallback):
    """`Seq2SeqTrainer(..., callbacks=[PublishCallback("owner/name")])` publishes the model when training is over.

    Model and tokenizer are saved to the Trainer's `output_dir`, and from there go the way of `publish`. What the Hub
    refuses is logged in one sentence; the script goes on, and the model can be published later.

    Args:
        repo_id, private, revision, create_pr: as for `publish`.
    """

    def __init__(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None, create_pr: bool = False
    ) -> None:
        self.repo_id = repo_id
        self.where = {"private": private, "revision": revision, "create_pr": create_pr}

    def on_train_end(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | None = None,
        **others: object,
    ) -> None:
        """Saves and publishes, on the main process."""
        if not state.is_world_process_zero:
            return
        model.save_pretrained(args.output_dir)
        if processing_class is not None:
            processing_class.save_pretrained(args.output_dir)
        try:
            url = publish(args.output_dir, self.repo_id, **self.where, tell=lambda line: logger.info(line))
        except MetaphraseError as error:
            logger.warning(f"Not all is published: {error}. Later: metaphrase publish {args.output_dir} {self.repo_id}")
        else:
            logger.info(f"Published: {url}")
