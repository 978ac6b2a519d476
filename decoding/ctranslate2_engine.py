"""CTranslate2 behind `translate`: an engine in C++, in float32, float16 or int8."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.beam import Hypothesis
from metaphrase.decoding.options import SearchOptions

ITS_OWN = ("num_beams", "num_return", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size")
"""Options that the engine has as well."""


def ctranslate2_engine(models: Sequence[PreTrainedModel], options: SearchOptions, quantization: str, margin: int):
    """Converts the model, once for its weights, and searches with the engine, on as many threads as torch uses.

    Its beam search stops as ours does with `early_stopping` True, whether that is asked for or not: then, and in greedy
    search, float32 gives the same best ids. With beams, a prefix counts in its length penalty, and probabilities are
    shared out anew after `min_length` and `no_repeat_ngram_size`; there outputs may differ.

    Args:
        quantization: "float32", "float16" or "int8".
        margin: an output may be so much longer than its source, where no `max_length` is given.

    Raises:
        MetaphraseError: CTranslate2 is not installed, or lacks something that the options or the model ask for.
    """
    if len(models) > 1:
        raise MetaphraseError(f"engine 'ctranslate2' takes one model, and {len(models)} were given; use engine 'fast'")
    for name, value in vars(SearchOptions()).items():
        own = name in ITS_OWN or (name == "early_stopping" and options.early_stopping is True)
        if not own and getattr(options, name) != value:
            raise MetaphraseError(f"engine 'ctranslate2' does not know {name} {getattr(options, name)!r}; use 'fast'")
    tokens = _tokens(models[0])
    translator = converted(models[0], quantization)

    def run(sources: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        longest = options.max_length or max(map(len, sources)) + margin
        prefixes = [[tokens[token] for token in prompt[1:]] for prompt in prompts]
        found = translator.translate_batch(
            [[tokens[token] for token in source] for source in sources],
            target_prefix=prefixes if any(prefixes) else None,
            beam_size=options.num_beams,
            num_hypotheses=options.num_return,
            length_penalty=options.length_penalty,
            max_decoding_length=longest + max(map(len, prefixes)),
            min_decoding_length=options.min_length,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
            max_input_length=0,
            return_scores=options.num_beams > 1,
            return_end_token=True,
        )
        return [
            [
                Hypothesis([int(token) for token in hypothesis[len(prefix) :]], score)
                for hypothesis, score in zip(
                    result.hypotheses, result.scores or [None] * len(result.hypotheses), strict=True
                )
            ]
            for result, prefix in zip(found, prefixes, strict=True)
        ]

    return run


def _tokens(model: PreTrainedModel) -> list[str]:
    """The engine wants strings, and any will do."""
    return [str(number) for number in range(model.config.vocab_size)]


def converted(model: PreTrainedModel, quantization: str) -> Any:
    """A `ctranslate2.Translator` of the model: made anew only where weights, device or threads have changed since.

    Raises:
        MetaphraseError: CTranslate2 is not installed, or cannot express the model.
    """
    try:
        import ctranslate2

        from metaphrase.conversion.to_ctranslate2 import save
    except ImportError:
        raise MetaphraseError("engine 'ctranslate2' needs the package ctranslate2: pip install ctranslate2") from None
    threads = torch.get_num_threads() if model.device.type == "cpu" else 0
    weights = tuple((parameter.data_ptr(), parameter._version) for parameter in model.parameters())
    state, known = (threads, weights), _converted.setdefault(model, {})
    if known.get(quantization, (None,))[0] != state:
        with tempfile.TemporaryDirectory() as folder:
            save(model, _tokens(model), Path(folder), quantization)
            translator = ctranslate2.Translator(
                folder,
                device="cuda" if model.device.type == "cuda" else "cpu",
                compute_type="default",  # as stored; float16 is computed as float32 where a processor lacks it
                intra_threads=threads,
            )
        known[quantization] = (state, translator)
    return known[quantization][1]


_converted: WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = WeakKeyDictionary()
"""Of each model that is still there: its translators by quantization, and of what weights they were made."""
