"""The library's logits processors inside the fast search: scores of the whole vocabulary, changed before the choice."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

from metaphrase.decoding.beam import Continue
from metaphrase.decoding.greedy import Choose, Task
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.scorers import Candidates, Scorer, best_continuations, best_tokens

ROW_BY_ROW = tuple(
    getattr(logits_process, name)
    for name in (
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
    )
)
"""Processors that look at each row by itself, so that finished rows may leave the batch. Of others nobody knows."""


class ShortestOutput(LogitsProcessor):
    """No `</s>` before so many tokens have been chosen; prompts may differ in length."""

    def __init__(self, task: Task, shortest: int, beams: int):
        self.until = (task.prompt_lengths + shortest).repeat_interleave(beams)
        self.ends = task.ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[N, T], [N, V] -> [N, V]"""
        early = (input_ids.shape[1] < self.until)[:, None]
        return scores.index_copy(1, self.ends, scores[:, self.ends].masked_fill(early, -torch.inf))


def asked_processors(
    model: PreTrainedModel, options: SearchOptions, task: Task, input_ids: torch.Tensor
) -> LogitsProcessorList:
    """What the options and the model's generation_config.json ask for, as `generate` would make it of them.

    Args:
        input_ids: the sources, [B, S]; some processors look at them.
    """
    config, _ = model._prepare_generation_config(
        None,
        num_beams=options.num_beams,
        no_repeat_ngram_size=options.no_repeat_ngram_size or None,
        min_length=None,
        max_length=task.width,
        do_sample=options.sample,
        **(
            {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
            if options.sample
            else {}
        ),
    )
    model._prepare_special_tokens(config, True, device=input_ids.device)
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=int(task.prompt_lengths.min()),
        encoder_input_ids=input_ids,
        device=input_ids.device,
    )
    if options.min_length:
        processors.insert(0, ShortestOutput(task, options.min_length, options.num_beams))
    return processors


def look_at_rows_alone(processors: LogitsProcessorList) -> bool:
    """Whether finished rows may leave the batch under these processors."""
    return all(type(processor) in ROW_BY_ROW for processor in processors)


def processed_best(processors: LogitsProcessorList) -> Choose:
    """The most likely token after the processors had their say; they see logits, as in `generate`."""

    def choose(scorer: Scorer, so_far: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return best_tokens(processors(so_far, scorer.logits(so_far[:, -1:])))

    return choose


def processed_continuations(processors: LogitsProcessorList) -> Continue:
    """The best continuations of each source after the processors had their say; they see log-probabilities, as in
    `generate`."""

    def continuations(scorer: Scorer, so_far: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates:
        log_probs = processors(so_far.flatten(0, 1), scorer.logits(so_far[:, :, -1]).log_softmax(-1))
        return best_continuations(log_probs.unflatten(0, scores.shape), scores, count)

    return continuations
