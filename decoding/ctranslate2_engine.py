"""CTranslate2 behind `translate`: an engine in C++, in float32, float16 or int8."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.beam import Hypothesis
from metaphrase.decoding.options import SearchOptions

ITS_OWN = ("num_beams", "num_return", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size")
"""Options that the engine has as well."""


def ctranslate2_engine(models: Sequence[PreTrainedModel], options: SearchOptions, quantization: str, margin: int):
    """Converts the model in passing and searches with the engine, on as many threads as torch uses.

    Its beam search stops as ours does with `early_stopping` True, whether that is asked for or not: then, and in greedy
    search, float32 gives the same ids.

    Args:
        quantization: "float32", "float16" or "int8".
        margin: an output may be so much longer than its source, where no `max_length` is given.

    Raises:
        MetaphraseError: CTranslate2 is not installed, or lacks something that the options or the model ask for.
    """
    try:
        import ctranslate2

        from metaphrase.conversion.to_ctranslate2 import save
    except ImportError:
        raise MetaphraseError("engine 'ctranslate2' needs the package ctranslate2: pip install ctranslate2") from None
    if len(models) > 1:
        raise MetaphraseError(f"engine 'ctranslate2' takes one model, and {len(models)} were given; use engine 'fast'")
    for name, value in vars(SearchOptions()).items():
        own = name in ITS_OWN or (name == "early_stopping" and options.early_stopping is True)
        if not own and getattr(options, name) != value:
            raise MetaphraseError(f"engine 'ctranslate2' does not know {name} {getattr(options, name)!r}; use 'fast'")
    model = models[0]
    tokens = [str(number) for number in range(model.config.vocab_size)]  # the engine wants strings, and any will do
    with tempfile.TemporaryDirectory() as folder:
        save(model, tokens, Path(folder), quantization)
        translator = ctranslate2.Translator(
            folder,
            device="cuda" if model.device.type == "cuda" else "cpu",
            compute_type="default",  # as stored; float16 is computed as float32 where a processor lacks it
            intra_threads=torch.get_num_threads() if model.device.type == "cpu" else 0,
        )

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
