"""Text in, text out: many texts to their translations, in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.batches import is_blank, length_sorted_batches

LENGTH_MARGIN = 50
"""Section 6.1 of the paper: an output may be this much longer than its source."""


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    num_beams: int = 5,
    length_penalty: float = 1.0,
    batch_tokens: int = 4096,
    max_length: int | None = None,
    progress: bool = False,
) -> list[str]:
    """Translates texts; one output for each, in the same order.

    A text without a visible character gives "", and the model is not asked.

    Args:
        model: an encoder-decoder model. It is left in the mode (training or not) in which it came.
        texts: sources, each a sentence or so.
        num_beams: width of the beam search; 1 is greedy.
        length_penalty: a hypothesis' log-probability is divided by its length to this power.
        batch_tokens: size of a batch, sources x beams x longest source.
        max_length: longest output, in tokens, `</s>` counted; None: the source's length + 50 (section 6.1).
        progress: show a bar on the error stream.

    Raises:
        MetaphraseError: a text is longer than the model's learned positions reach, or an option cannot be.
    """
    if isinstance(texts, str):
        raise MetaphraseError("texts is one string; give a list of strings")
    outputs = [""] * len(texts)
    spoken = [index for index, text in enumerate(texts) if not is_blank(text)]
    sources = encode_sources(model, tokenizer, [texts[index] for index in spoken], spoken)
    batches = length_sorted_batches([len(source) for source in sources], batch_tokens, num_beams)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), tqdm(total=len(sources), unit="text", disable=not progress) as bar:
            for batch in batches:
                inputs = tokenizer.pad({"input_ids": [sources[i] for i in batch]}, return_tensors="pt").to(model.device)
                limit = max_length or inputs["input_ids"].shape[1] + LENGTH_MARGIN
                ids = model.generate(
                    **inputs,
                    num_beams=num_beams,
                    length_penalty=length_penalty if num_beams > 1 else None,
                    max_new_tokens=limit,
                )
                for index, text in zip(batch, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
                    outputs[spoken[index]] = text
                bar.update(len(batch))
    finally:
        model.train(training)
    return outputs


def encode_sources(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], numbers: Sequence[int]
) -> list[list[int]]:
    """Token ids of each text, `</s>` last.

    Raises:
        MetaphraseError: a text is longer than the model's learned positions reach; it is named by its number.
    """
    if not texts:
        return []
    sources = tokenizer(list(texts), verbose=False)["input_ids"]
    if getattr(model.config, "position_embedding_type", None) == "learned":
        room = model.config.max_position_embeddings
        for number, source in zip(numbers, sources, strict=True):
            if len(source) > room:
                raise MetaphraseError(
                    f"text {number + 1} is {len(source)} tokens long, and the model's learned positions end at {room}; "
                    "split it into sentences"
                )
    return sources
