"""Text in, text out: many texts to their translations, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.batches import is_blank, length_sorted_batches
from metaphrase.decoding.beam import Hypothesis
from metaphrase.decoding.engines import LENGTH_MARGIN as LENGTH_MARGIN
from metaphrase.decoding.engines import learned_positions, make_engine
from metaphrase.decoding.mbr import minimum_bayes_risk
from metaphrase.decoding.options import SearchOptions

Models = PreTrainedModel | Sequence[PreTrainedModel]


@dataclass(frozen=True)
class Translation:
    """One output for a text."""

    text: str
    score: float | None
    """Log-probability over length divisor, plus coverage penalty; None where the search did not count it."""


def translate(
    model: Models,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    num_beams: int = 5,
    length_penalty: float = 1.0,
    batch_tokens: int = 4096,
    max_length: int | None = None,
    progress: bool = False,
    prefixes: Sequence[str] | None = None,
    engine: str = "fast",
    mbr: bool = False,
    **options: Any,
) -> list[str]:
    """Translates texts; one output for each, in the same order.

    A text without a visible character gives "", and the model is not asked.

    Args:
        model: a metaphrase model, or several that share the vocabulary: their probabilities are averaged. Models are
            left in the mode (training or not) in which they came.
        texts: sources, each a sentence or so.
        num_beams: width of the beam search; 1 is greedy.
        length_penalty: exponent of the length penalty.
        batch_tokens: size of a batch, sources x longest source.
        max_length: longest output, in tokens, `</s>` counted; None: the source's length + 50 (section 6.1).
        progress: show a bar on the error stream.
        prefixes: a beginning that each output must have; "" for none.
        engine: "fast" is this package's search. "generate" is the library's; it takes any encoder-decoder model.
            "ctranslate2", "ctranslate2-float16" and "ctranslate2-int8" are an engine in C++, if it is installed.
        mbr: of `num_return` samples give the one that the others resemble most (`mbr.py`).
        options: further fields of `SearchOptions`.

    Raises:
        MetaphraseError: a text is longer than the model's learned positions reach, or an option cannot be.
    """
    asked = _options(num_beams=num_beams, length_penalty=length_penalty, max_length=max_length, **options)
    if mbr and asked.num_return < 2:
        raise MetaphraseError(f"mbr chooses among samples, and num_return is {asked.num_return}; ask for 16 or more")
    found = translate_n_best(
        model,
        tokenizer,
        texts,
        options=asked,
        batch_tokens=batch_tokens,
        progress=progress,
        prefixes=prefixes,
        engine=engine,
    )
    if mbr:
        return [minimum_bayes_risk([output.text for output in outputs]) for outputs in found]
    return [outputs[0].text for outputs in found]


def translate_n_best(
    model: Models,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    options: SearchOptions | None = None,
    batch_tokens: int = 4096,
    progress: bool = False,
    prefixes: Sequence[str] | None = None,
    engine: str = "fast",
) -> list[list[Translation]]:
    """The `options.num_return` best translations of each text with their scores, the best first; or its samples.

    Arguments and errors are those of `translate`.
    """
    options = options or SearchOptions()
    models = [model] if isinstance(model, PreTrainedModel) else list(model)
    if isinstance(texts, str):
        raise MetaphraseError("texts is one string; give a list of strings")
    if prefixes is not None and len(prefixes) != len(texts):
        raise MetaphraseError(f"there are {len(texts)} texts and {len(prefixes)} prefixes; give one for each")
    spoken = [index for index, text in enumerate(texts) if not is_blank(text)]
    results = [[Translation("", None)] * options.num_return for _ in texts]
    if not spoken:
        return results
    sources = encode_sources(models, tokenizer, [texts[index] for index in spoken], spoken)
    prompts = _encode_prompts(
        models[0], tokenizer, [prefixes[index] for index in spoken] if prefixes else None, sources
    )
    batches = length_sorted_batches([len(source) for source in sources], batch_tokens, options.num_return)
    run = make_engine(engine, models, options)
    with tqdm(total=len(sources), unit="text", disable=not progress) as bar:
        for batch in batches:
            found = run([sources[i] for i in batch], [prompts[i] for i in batch])
            for index, hypotheses in zip(batch, found, strict=True):
                results[spoken[index]] = _texts(tokenizer, prompts[index], hypotheses)
            bar.update(len(batch))
    return results


def encode_sources(
    models: Sequence[PreTrainedModel], tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], numbers: Sequence[int]
) -> list[list[int]]:
    """Token ids of each text, `</s>` last.

    Raises:
        MetaphraseError: a text is longer than a model's learned positions reach; it is named by its number.
    """
    sources = tokenizer(list(texts), verbose=False)["input_ids"]
    room = min(learned_positions(model) for model in models)
    for number, source in zip(numbers, sources, strict=True):
        if len(source) > room:
            raise MetaphraseError(
                f"text {number + 1} is {len(source)} tokens long, and the model's learned positions end at {room:.0f}; "
                "split it into sentences"
            )
    return sources


def _options(**given: Any) -> SearchOptions:
    known = [field.name for field in fields(SearchOptions)]
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise MetaphraseError(f"translate has no option {name!r}{hint}; there are {', '.join(known)}")
    return SearchOptions(**given)


def _encode_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prefixes: Sequence[str] | None,
    sources: Sequence[Sequence[int]],
) -> list[list[int]]:
    """What the decoder is given for each source: the start token, and the beginning that was asked for."""
    start = model.generation_config.decoder_start_token_id
    start = model.config.decoder_start_token_id if start is None else start
    if prefixes is None:
        return [[start] for _ in sources]
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id}
    encoded = tokenizer(text_target=list(prefixes))["input_ids"]
    return [
        [start, *(token for token in ids if prefix and token not in ends)]
        for prefix, ids in zip(prefixes, encoded, strict=True)
    ]


def _texts(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], hypotheses: Sequence[Hypothesis]
) -> list[Translation]:
    texts = tokenizer.batch_decode([[*prompt, *found.tokens] for found in hypotheses], skip_special_tokens=True)
    return [Translation(text, found.score) for text, found in zip(texts, hypotheses, strict=True)]
