"""Scores: the loss of a validation set, and metrics of generated text, at any number of processes.

Every line counts exactly once. Work is cut into the same batches however many processes share it, and their sums are
added in the same order, so a score does not depend on the number of processes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import load_file

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training.data.batching import collate
from metaphrase.training.data.corpus import EvaluationSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

METRICS = {
    "sacrebleu": ("metaphrase.training.metrics.sacrebleu", "SacreBLEU"),
    "chrf": ("metaphrase.training.metrics.chrf", "ChrF"),
    "word_error_rate": ("metaphrase.training.metrics.word_error_rate", "WordErrorRate"),
    "unit_error_rate": ("metaphrase.training.metrics.unit_error_rate", "UnitErrorRate"),
}
LOWER_IS_BETTER = {"loss", "word_error_rate", "unit_error_rate"}


def score_texts(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], metrics: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Hold raw text against raw references: `{metric: {"score": …, "signature": …, …}}`.

    Raises:
        MetaphraseError: a metric is unknown, there is no line, or the counts of lines differ.
    """
    if len(hypotheses) != len(references):
        raise MetaphraseError(f"There are {len(hypotheses)} hypotheses but {len(references)} lines of references.")
    if not hypotheses:
        raise MetaphraseError("There is nothing to score: the set has no line.")
    results = {}
    for name in metrics:
        if name not in METRICS:
            raise MetaphraseError(f"Unknown metric {name!r}; known are {', '.join(METRICS)}.")
        module, kind = METRICS[name]
        metric = getattr(importlib.import_module(module), kind)(keep_in_memory=True)
        results[name] = metric.compute(predictions=list(hypotheses), references=[list(line) for line in references])
    return results


@dataclass
class LossBatches:
    """A validation set as padded batches, the same ones however many processes share them."""

    pairs: list[tuple[list[int], list[int]]]
    batches: list[list[int]]
    cut: int = 0
    """Lines that the model's positions cannot hold whole; their beginnings are scored."""


def loss_batches(
    texts: EvaluationSet, tokenizer: PreTrainedTokenizerFast, *, tokens: int, longest: int | None = None
) -> LossBatches:
    """Encode a validation set; of several references of a line the first one counts for the loss.

    Args:
        tokens: budget of a batch, sentences x longest side.
        longest: positions that the model has; None where it has no limit.
    """
    sides = [
        [_ended(ids, tokenizer.eos_token_id) for ids in tokenizer(lines)["input_ids"]]
        for lines in (list(texts.sources), [line[0] for line in texts.references])
    ]
    pairs = list(zip(*sides, strict=True))
    cut = 0
    if longest is not None:
        cut = sum(max(map(len, pair)) > longest for pair in pairs)
        pairs = [tuple(side if len(side) <= longest else side[: longest - 1] + side[-1:] for side in p) for p in pairs]
    order = sorted(range(len(pairs)), key=lambda i: (len(pairs[i][1]), len(pairs[i][0]), i))
    batches: list[list[int]] = []
    widest = 0
    for index in order:
        widest = max(widest, *map(len, pairs[index])) if batches else 0
        if not batches or widest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            widest = max(map(len, pairs[index]))
        batches[-1].append(index)
    return LossBatches(pairs, batches, cut)


@torch.no_grad()
def validation_loss(model: PreTrainedModel, data: LossBatches, accelerator: Accelerator) -> dict[str, float]:
    """Cross-entropy a target token over the whole set, without label smoothing, and its perplexity.

    Every process calls it, and every one gets the same result.
    """
    sums = torch.zeros(len(data.batches), dtype=torch.float64)
    counts = torch.zeros(len(data.batches), dtype=torch.float64)
    for number in range(accelerator.process_index, len(data.batches), accelerator.num_processes):
        batch = collate([data.pairs[i] for i in data.batches[number]], pad=model.config.pad_token_id)
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        with accelerator.autocast():
            sums[number] = model(**batch, num_items_in_batch=1).loss.double().cpu()
        counts[number] = (batch["labels"] >= 0).sum()
    if accelerator.num_processes > 1:
        both = accelerator.reduce(torch.stack([sums, counts]).to(accelerator.device, torch.float64)).cpu()
        sums, counts = both[0], both[1]
    loss = float(sums.sum() / counts.sum())
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": int(counts.sum())}


def translate_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    sources: Sequence[str],
    accelerator: Accelerator | None = None,
    **search: Any,
) -> list[str]:
    """Translate lines on all processes together; every process gets all outputs, in the order of the lines.

    Lines of near-equal length come to one process together. `search` goes to `decoding.translate`.
    """
    from metaphrase.decoding.translate import translate

    if accelerator is None or accelerator.num_processes == 1:
        return translate(model, tokenizer, list(sources), **search)
    order = sorted(range(len(sources)), key=lambda i: (len(sources[i]), i))
    mine = order[accelerator.process_index :: accelerator.num_processes]
    done = list(zip(mine, translate(model, tokenizer, [sources[i] for i in mine], **search), strict=True))
    outputs = [""] * len(sources)
    for index, text in gather_object(done):
        outputs[index] = text
    return outputs


def score_set(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    texts: EvaluationSet,
    metrics: Sequence[str],
    accelerator: Accelerator,
    **search: Any,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Translate a set and score it; every process gets the scores and the outputs."""
    outputs = translate_all(model, tokenizer, texts.sources, accelerator, **search)
    scores = [score_texts(outputs, texts.references, metrics) if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(scores)
    return scores[0], outputs


def score(
    model_dir: str | Path,
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    metrics: Sequence[str] = ("sacrebleu", "chrf"),
    num_beams: int = 5,
    length_penalty: float = 1.0,
    batch_tokens: int = 4096,
    progress: bool = False,
) -> dict[str, Any]:
    """Translate with a saved model and score the outputs: `{"lines": n, metric: {"score", "signature", …}, …}`.

    Raises:
        MetaphraseError: the counts of sources and references differ, or there is no line.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    if len(sources) != len(references):
        raise MetaphraseError(f"There are {len(sources)} source lines but {len(references)} lines of references.")
    model = AutoModelForSeq2SeqLM.from_pretrained(model_dir, use_safetensors=True).eval()  # no pickles
    if torch.cuda.is_available():
        model.to("cuda")
    outputs = translate_all(
        model,
        AutoTokenizer.from_pretrained(model_dir),
        sources,
        num_beams=num_beams,
        length_penalty=length_penalty,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    return {"lines": len(outputs), "num_beams": num_beams, **score_texts(outputs, references, metrics)}


def average(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Mean of the weights in several safetensors files, added in float64; two models are in memory at a time."""
    sums: dict[str, torch.Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            kinds[name] = tensor.dtype
            sums[name] = sums[name].add_(tensor) if name in sums else tensor.double()
    return {name: (total / len(files)).to(kinds[name]) for name, total in sums.items()}


def _ended(ids: Sequence[int], end: int) -> list[int]:
    ids = list(ids)
    return ids if ids and ids[-1] == end else [*ids, end]
