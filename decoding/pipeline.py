"""A translation pipeline for the transformers library, which has none of its own since version 5.

    TranslationPipeline(model=model, tokenizer=tokenizer)("Ein Satz.")        [{"translation_text": "A sentence."}]
    pipeline("metaphrase-translation", model="owner/name")(dataset["de"])     one dictionary a row, in order

It serves every encoder-decoder model with `generate`: this package's, Marian's, M2M100's, NLLB's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import islice
from typing import Any

from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pipelines import PIPELINE_REGISTRY, Pipeline

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.batches import is_blank
from metaphrase.decoding.engines import LENGTH_MARGIN
from metaphrase.decoding.mbr import least_risk
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.sentences import Piece, split_text
from metaphrase.decoding.translate import Translation, translate_n_best

TASK = "metaphrase-translation"
OURS = "metaphrase"
SENTENCE_LIMIT = 256
"""Sources up to so many tokens are translated in one piece, as far as the model can read them."""
LIBRARY_NAMES = {"num_return_sequences": "num_return", "max_new_tokens": "max_length"}
"""Fields of `SearchOptions` that the library calls otherwise; both names are understood."""
SEARCH_FIELDS = frozenset(field.name for field in fields(SearchOptions))


@dataclass(frozen=True)
class PipelineOptions:
    """What a call may ask for besides the fields of `SearchOptions`."""

    src_lang: str | None = None
    """Code of the source's language, for tokenizers of many languages (`deu_Latn` for NLLB, `de` for M2M100)."""
    tgt_lang: str | None = None
    """Code of the language to translate into, for the same."""
    prefix: str | Sequence[str] | None = None
    """Text with which the translation must begin: one for all, or one for each input."""
    max_source_tokens: int | None = None
    """Longer inputs are split at sentence ends; unset: 256, or less where the model reads less."""
    batch_tokens: int = 4096
    """Size of a batch: pieces x longest source, padding counted."""
    return_scores: bool | None = None
    """Add `score`; unset: when several translations are returned."""
    read_ahead: int = 256
    """How many inputs of a stream are read and sorted by length before the first is returned."""
    progress: bool = False
    """Show a bar on the error stream."""
    mbr: bool = False
    """Of `num_return_sequences` outputs give the one that the others resemble most (`mbr.py`); best of 16 samples or
    more."""
    engine: str | None = None
    """What searches: `fast`, `generate`, `ctranslate2`, `ctranslate2-float16` or `ctranslate2-int8`. Unset: `fast` for
    this package's models, the library's `generate` for others."""
    ensemble: Sequence[PreTrainedModel] = ()
    """Further models with the same vocabulary: the probabilities of all are averaged."""
    search: dict[str, Any] = field(default_factory=dict)
    """Fields of `SearchOptions`; `num_beams` and `length_penalty`, unset, are those of the model's generation_config,
    else 5 and 1."""

    def __post_init__(self) -> None:
        for name in ("max_source_tokens", "batch_tokens", "read_ahead"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise MetaphraseError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        texts = [] if self.prefix is None else [self.prefix] if isinstance(self.prefix, str) else self.prefix
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise MetaphraseError(f"prefix is {self.prefix!r}; it must be a text, or a list with a text for each input")


OWN_FIELDS = frozenset(field.name for field in fields(PipelineOptions)) - {"search"}


class TranslationPipeline(Pipeline):
    """Translates a string, a sequence of strings, a column of a dataset, or a stream of strings.

    | input                    | output                                                        |
    |--------------------------|---------------------------------------------------------------|
    | a string                 | a list of dictionaries, as many as `num_return_sequences`     |
    | a list, tuple or column  | a list with a dictionary for each, or a list of such lists    |
    | a generator or iterator  | a generator of the same, `read_ahead` inputs at a time        |

    A dictionary holds `translation_text` and, if asked for, `score`: the log-probability over the length penalty,
    summed over the pieces of a long text; None for greedy search and for a blank input, which gives "" without the
    model.
    Options are the fields of `PipelineOptions` and `SearchOptions`, given to the pipeline or to a call.
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any) -> None:
        """As the library's pipelines.

        Raises:
            MetaphraseError: model or tokenizer is not loaded, or an option is unknown.
        """
        if isinstance(model, str) or tokenizer is None:
            raise MetaphraseError(
                f"a TranslationPipeline needs a loaded model and its tokenizer; to load both by name: "
                f'pipeline("{TASK}", model="owner/name")'
            )
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)

    def __call__(self, inputs: str | Iterable[str], **kwargs: Any) -> Any:
        """Translates `inputs`.

        Raises:
            MetaphraseError: an option cannot be, an input is no string, or the tokenizer does not know a language.
        """
        if isinstance(inputs, (bytes, Mapping, Set)) or not isinstance(inputs, (Iterable, Sized)):
            raise MetaphraseError(
                f"the input is {type(inputs).__name__}; give a text, a list or a dataset's column of texts, or a stream"
            )
        options, search = self._options(kwargs)
        several = search.num_return > 1 and not options.mbr
        with_scores = several if options.return_scores is None else options.return_scores

        def show(found: list[Translation]) -> list[dict[str, Any]]:
            return [{"translation_text": one.text} | ({"score": one.score} if with_scores else {}) for one in found]

        def show_one(found: list[Translation]) -> Any:
            return show(found) if several else show(found)[0]

        if isinstance(inputs, str):
            return show(self._translate([inputs], options, search)[0])
        if isinstance(inputs, Sized):
            return [show_one(found) for found in self._translate(list(inputs), options, search)]
        if not (options.prefix is None or isinstance(options.prefix, str)):
            raise MetaphraseError("prefix is a list, and the inputs are a stream; give one string")
        return (show_one(found) for found in self._stream(iter(inputs), options, search))

    def _stream(
        self, inputs: Iterator[str], options: PipelineOptions, search: SearchOptions
    ) -> Iterator[list[Translation]]:
        while texts := list(islice(inputs, options.read_ahead)):
            yield from self._translate(texts, options, search)

    def _translate(self, texts: list[str], options: PipelineOptions, search: SearchOptions) -> list[list[Translation]]:
        """Texts to their best translations, in order."""
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                hint = "; give one column of the dataset" if isinstance(text, Mapping) else ""
                raise MetaphraseError(f"input {number + 1} is {type(text).__name__}, not text{hint}")
        prefixes = [options.prefix or ""] * len(texts) if _is_one(options.prefix) else list(options.prefix)
        if len(prefixes) != len(texts):
            raise MetaphraseError(f"there are {len(prefixes)} prefixes for {len(texts)} inputs")
        with self._languages(options):
            cut = [self.preprocess(text, options) for text in texts]
            # a forced beginning belongs to the first piece of its text
            beginnings = [
                "" if number else prefix
                for pieces, prefix in zip(cut, prefixes, strict=True)
                for number, _ in enumerate(pieces)
            ]
            found = iter(self._forward([piece for pieces in cut for piece in pieces], beginnings, options, search))
            results = [self.postprocess([(piece, next(found)) for piece in pieces], search) for pieces in cut]
        if not options.mbr:
            return results
        return [[outputs[least_risk([output.text for output in outputs])]] for outputs in results]

    # What the library's class asks for

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        own = {name: value for name, value in kwargs.items() if name in OWN_FIELDS}
        search = {LIBRARY_NAMES.get(name, name): value for name, value in kwargs.items() if name not in OWN_FIELDS}
        known = OWN_FIELDS | SEARCH_FIELDS
        for name in search:
            if name not in SEARCH_FIELDS:
                close = get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
                raise MetaphraseError(f"a translation pipeline has no option {name}{hint}")
        return {}, {**own, "search": search}, {}

    def _options(self, kwargs: dict[str, Any]) -> tuple[PipelineOptions, SearchOptions]:
        """The pipeline's own options with a call's on top of them."""
        call = self._sanitize_parameters(**kwargs)[1]
        search = {**self._forward_params.get("search", {}), **call["search"]}
        generation = self.model.generation_config
        if not search.get("sample"):
            beams = max(generation.num_beams or 5, search.get("num_return", 1))
            search.setdefault("num_beams", beams)
        else:
            search.setdefault("num_beams", 1)
        if generation.length_penalty is not None:
            search.setdefault("length_penalty", generation.length_penalty)
        options = PipelineOptions(**{**self._forward_params, **call, "search": search})
        if options.mbr and search.get("num_return", 1) < 2:
            raise MetaphraseError(
                "mbr chooses among outputs, and num_return_sequences is 1; ask for 16 samples or more"
            )
        return options, SearchOptions(**search)

    def preprocess(self, text: str, options: PipelineOptions) -> list[Piece]:
        """A text as pieces that the model can read; none of a blank one. A line end after it is not part of it."""
        if is_blank(text):
            return []
        limit = self._source_limit(options)
        line = text.rstrip("\r\n")
        try:
            return split_text(line, lambda piece: len(self.tokenizer(piece, verbose=False)["input_ids"]) <= limit)
        except ValueError:
            raise MetaphraseError(f"sources may have {limit} tokens, too few for a single character") from None

    def _forward(
        self, pieces: list[Piece], beginnings: list[str], options: PipelineOptions, search: SearchOptions
    ) -> list[list[Translation]]:
        """The best translations of each piece."""
        ours = self.model.config.model_type == OURS
        results: list[list[Translation]] = [[] for _ in pieces]
        # In other models the padding before a shorter beginning would count as positions.
        for group in [range(len(pieces))] if ours else _alike(beginnings):
            found = translate_n_best(
                [self.model, *options.ensemble],
                self.tokenizer,
                [pieces[index].text for index in group],
                options=search,
                batch_tokens=options.batch_tokens,
                progress=options.progress,
                prefixes=[beginnings[index] for index in group] if any(beginnings) else None,
                engine=options.engine or ("fast" if ours else "generate"),
            )
            for index, translations in zip(group, found, strict=True):
                results[index] = translations
        return results

    def postprocess(self, found: list[tuple[Piece, list[Translation]]], search: SearchOptions) -> list[Translation]:
        """The n best ways to put together the n best translations of each piece."""
        if not found:
            return [Translation("", None)] * search.num_return
        joined = [Translation("", 0.0)]
        for piece, translations in found:
            pairs = [_append(left, right, piece.gap) for left in joined for right in translations]
            joined = heapq.nlargest(search.num_return, pairs, key=lambda one: one.score or 0.0)
        return joined

    # Limits and languages

    def _source_limit(self, options: PipelineOptions) -> int:
        """Longest source of one piece: the output may be 50 tokens longer, and must have a position too."""
        positions = getattr(self.model.config, "max_position_embeddings", None) or SENTENCE_LIMIT + LENGTH_MARGIN
        if self.model.config.model_type != OURS:
            positions -= LENGTH_MARGIN + 2
        elif self.model.config.position_embedding_type != "learned":
            positions = SENTENCE_LIMIT if options.max_source_tokens is None else options.max_source_tokens
        return int(min(options.max_source_tokens or SENTENCE_LIMIT, positions, self.tokenizer.model_max_length))

    @contextmanager
    def _languages(self, options: PipelineOptions) -> Iterator[None]:
        """Tokenizer and model read `src_lang` and write `tgt_lang` inside, and what they did before outside."""
        changes: list[tuple[Any, str, Any]] = []
        for name in ("src_lang", "tgt_lang"):
            language = getattr(options, name)
            if language is not None:
                if not hasattr(self.tokenizer, name):
                    raise MetaphraseError(f"{name} is {language!r}, and the model's tokenizer knows no languages")
                number = self._language_id(language)
                changes.append((self.tokenizer, name, language))
                if name == "tgt_lang":
                    changes.append((self.model.generation_config, "forced_bos_token_id", number))
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        try:
            for owner, name, value in changes:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    def _language_id(self, language: str) -> int:
        codes = getattr(self.tokenizer, "lang_code_to_token", None)  # M2M100 writes `__de__` for `de`
        known = codes or {token: token for token in self.tokenizer.all_special_tokens}
        if language not in known:
            raise MetaphraseError(f"the model's tokenizer knows no language {language!r}")
        return self.tokenizer.convert_tokens_to_ids(known[language])


def _is_one(prefix: str | Sequence[str] | None) -> bool:
    return prefix is None or isinstance(prefix, str)


def _alike(beginnings: list[str]) -> list[list[int]]:
    """Indices of equal beginnings together."""
    groups: dict[str, list[int]] = {}
    for index, beginning in enumerate(beginnings):
        groups.setdefault(beginning, []).append(index)
    return list(groups.values())


def _append(left: Translation, right: Translation, gap: str) -> Translation:
    score = None if left.score is None or right.score is None else left.score + right.score
    return Translation(f"{left.text}{right.text}{gap}", score)


PIPELINE_REGISTRY.register_pipeline(TASK, TranslationPipeline, pt_model=AutoModelForSeq2SeqLM)
