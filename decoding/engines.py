"""Who does the searching behind `translate`: this package's fast search, the library's `generate`, or CTranslate2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.beam import Hypothesis
from metaphrase.decoding.ctranslate2_engine import ctranslate2_engine
from metaphrase.decoding.greedy import Task
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.processors import asked_processors
from metaphrase.decoding.search import search
from metaphrase.decoding.weights import read_weights
from metaphrase.modeling.generation import LENGTH_MARGIN

Tokens = Sequence[Sequence[int]]
Engine = Callable[[Tokens, Tokens], list[list[Hypothesis]]]
"""(sources, prompts) -> hypotheses of each source; a prompt is the start token and perhaps a forced beginning."""


def make_engine(name: str, models: Sequence[PreTrainedModel], options: SearchOptions) -> Engine:
    """The engine of that name for these models.

    Raises:
        MetaphraseError: there is none, or it cannot do what the options ask.
    """
    engines = {
        "fast": fast_engine,
        "generate": generate_engine,
        "ctranslate2": partial(ctranslate2_engine, quantization="float32", margin=LENGTH_MARGIN),
        "ctranslate2-float16": partial(ctranslate2_engine, quantization="float16", margin=LENGTH_MARGIN),
        "ctranslate2-int8": partial(ctranslate2_engine, quantization="int8", margin=LENGTH_MARGIN),
    }
    if name not in engines:
        raise MetaphraseError(f"engine is {name!r}; it must be one of {', '.join(engines)}")
    room = min(map(learned_positions, models))
    if options.max_length is not None and options.max_length > room:
        raise MetaphraseError(
            f"max_length is {options.max_length}, and the model's learned positions end at {room:.0f}"
        )
    return engines[name](models, options)


def learned_positions(model: PreTrainedModel) -> float:
    """Positions that the model has learned; infinity where they are computed."""
    learned = getattr(model.config, "position_embedding_type", None) == "learned"
    return model.config.max_position_embeddings if learned else float("inf")


def fast_engine(models: Sequence[PreTrainedModel], options: SearchOptions) -> Engine:
    """`search.py`, on weights that are read once."""
    weights = [read_weights(model) for model in models]
    first, room = models[0], min(map(learned_positions, models))
    pad, ends = _padding(first), _ends(first)
    # Whether there are processors does not depend on the batch; what they are may, so they are made anew for each.
    probe = Task(ends.new_ones(1, 1), ends.new_ones(1), ends.new_ones(1), ends, pad)
    plain = not asked_processors(first, options, probe, ends.new_ones(1, 1))

    def run(sources: Tokens, prompts: Tokens) -> list[list[Hypothesis]]:
        input_ids, mask = pad_right(sources, pad, first.device)
        starts, starts_mask = pad_right(prompts, pad, first.device)
        limits = [
            min(options.max_length or len(source) + LENGTH_MARGIN, room + 1 - len(prompt))
            for source, prompt in zip(sources, prompts, strict=True)
        ]
        task = Task(starts, starts_mask.sum(1), input_ids.new_tensor(limits, dtype=torch.long), ends, pad)
        processors = [] if plain else asked_processors(first, options, task, input_ids)
        return search(weights, input_ids, mask, options, task, processors)

    return run


def generate_engine(models: Sequence[PreTrainedModel], options: SearchOptions) -> Engine:
    """The library's `generate`, for any encoder-decoder model. Its default limit counts a batch's longest source."""
    if len(models) > 1:
        raise MetaphraseError(f"engine 'generate' takes one model, and {len(models)} were given; use engine 'fast'")
    defaults = SearchOptions()
    for name in ("length_norm", "coverage_penalty", "seed"):
        if getattr(options, name) != getattr(defaults, name):
            raise MetaphraseError(f"engine 'generate' does not know {name}; use engine 'fast'")
    model = models[0]
    pad = _padding(model)
    beam = {"length_penalty": options.length_penalty, "early_stopping": options.early_stopping}
    sample = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    settings = {
        "num_beams": options.num_beams,
        "num_return_sequences": options.num_return,
        "do_sample": options.sample,
        "no_repeat_ngram_size": options.no_repeat_ngram_size or None,
        "min_new_tokens": options.min_length or None,
        **(beam if options.num_beams > 1 else {}),
        **(sample if options.sample else {}),
    }

    @torch.inference_mode()
    def run(sources: Tokens, prompts: Tokens) -> list[list[Hypothesis]]:
        input_ids, mask = pad_right(sources, pad, model.device)
        starts, starts_mask = (
            part.flip(1) for part in pad_right([prompt[::-1] for prompt in prompts], pad, model.device)
        )
        width = starts.shape[1]
        limit = options.max_length or min(input_ids.shape[1] + LENGTH_MARGIN, learned_positions(model) + 1 - width)
        training = model.training
        model.eval()
        try:
            found = model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                decoder_input_ids=starts,
                **({} if bool(starts_mask.all()) else {"decoder_attention_mask": starts_mask}),
                max_new_tokens=int(limit),
                return_dict_in_generate=True,
                output_scores=options.num_beams > 1,
                **settings,
            )
        finally:
            model.train(training)
        scores = [None] * len(found.sequences) if options.num_beams == 1 else found.sequences_scores.tolist()
        outputs = [
            Hypothesis(tokens[width:], score) for tokens, score in zip(found.sequences.tolist(), scores, strict=True)
        ]
        return [outputs[first : first + options.num_return] for first in range(0, len(outputs), options.num_return)]

    return run


def pad_right(rows: Tokens, pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens -> ids and mask, [B, T] each."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, (torch.arange(longest, device=device) < lengths[:, None]).long()


def _padding(model: PreTrainedModel) -> int:
    pad = model.generation_config.pad_token_id
    pad = model.config.pad_token_id if pad is None else pad
    return 0 if pad is None else pad


def _ends(model: PreTrainedModel) -> torch.Tensor:
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    return torch.tensor(ends, dtype=torch.long, device=model.device)
