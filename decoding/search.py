"""The fast search: the outputs of `generate`, sooner.

    weights = read_weights(model)
    search([weights], input_ids, attention_mask, SearchOptions(), Task(…))          token ids in, hypotheses out
    model.generate(…, custom_generate=fast_search)                                  from the library: `custom.py`
    translate(model, tokenizer, texts)                                              text in, text out: `translate.py`

What makes it fast: `weights.py` (fused projections, built once), `step.py` (a cache that is never reordered; a source's
keys and values once for all its beams), `scorers.py` (the best tokens before the softmax), `beam.py` and `greedy.py`
(finished sources leave the batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from metaphrase.decoding.beam import Hypothesis, beam_search, plain_continuations
from metaphrase.decoding.greedy import Task, choose_best, one_by_one
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.processors import (
    look_at_rows_alone,
    processed_best,
    processed_continuations,
)
from metaphrase.decoding.sampling import draw, uniform_streams
from metaphrase.decoding.scorers import EnsembleScorer, ModelScorer, Scorer
from metaphrase.decoding.step import encode
from metaphrase.decoding.weights import ModelWeights


@torch.inference_mode()
def search(
    models: Sequence[ModelWeights],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    options: SearchOptions,
    task: Task,
    processors: LogitsProcessorList | Sequence[LogitsProcessor] = (),
    encoded: Sequence[torch.Tensor] | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses of each source, the best first; or its samples.

    Args:
        models: weights of one model, or of several that share a vocabulary: their probabilities are averaged.
        input_ids: sources, [B, S].
        attention_mask: [B, S], 0 at padding.
        options: what to look for.
        task: where the outputs of the B sources start, and where they end.
        processors: change the scores of the vocabulary before a token is chosen.
            With `sample` they include what `temperature`, `top_k` and `top_p` ask for: see `asked_processors`.
        encoded: each model's encoder output, [B, S, d_model], where it is at hand.
    """
    encoded = encoded or [encode(model.encoder, input_ids, attention_mask) for model in models]
    samples = options.num_return if options.sample else 1
    if samples > 1:
        encoded = [states.repeat_interleave(samples, 0) for states in encoded]
        task = task.repeat(samples)
    scorer = make_scorer(models, encoded, attention_mask.repeat_interleave(samples, 0), options)
    task = replace(task, drop=task.drop and look_at_rows_alone(processors))
    if options.num_beams > 1:
        continuations = processed_continuations(processors) if processors else plain_continuations
        return beam_search(scorer, task, options, continuations)
    if options.sample:
        sources = [row[real].tolist() for row, real in zip(input_ids, attention_mask.bool(), strict=True)]
        choose = draw(uniform_streams(sources, samples, task.width, options.seed), LogitsProcessorList(processors))
    else:
        choose = processed_best(processors) if processors else choose_best
    outputs = [Hypothesis(output) for output in one_by_one(scorer, task, choose)]
    return [outputs[first : first + samples] for first in range(0, len(outputs), samples)]


def make_scorer(
    models: Sequence[ModelWeights], encoded: Sequence[torch.Tensor], mask: torch.Tensor, options: SearchOptions
) -> Scorer:
    """One model's scorer, or that of an ensemble."""
    watch = options.coverage_penalty > 0
    scorers = [
        ModelScorer(model, states, mask, options.num_beams, watch)
        for model, states in zip(models, encoded, strict=True)
    ]
    return scorers[0] if len(scorers) == 1 else EnsembleScorer(scorers)
