"""The commands that use a model: `translate` lines of text, `score` against references."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from .configuration.errors import MetaphraseError

LINES_AT_ONCE = 16384
"""Lines read before they are sorted by length and translated: memory stays flat however long the input is."""


@dataclass
class TranslateSearch:
    """What is looked for, beside --num_beams and --length_penalty."""

    num_return: int = 1
    """Outputs a line: the n best of a beam search, or so many samples. More than 1 are written as
    `line<TAB>rank<TAB>score<TAB>text`, line and rank counted from 1; score is `-` where the search counts none."""
    length_norm: Literal["length", "gnmt"] = "length"
    """Divide a log-probability by |Y|^alpha, or by ((5 + |Y|) / 6)^alpha (Wu et al., 2016)."""
    coverage_penalty: float = 0.0
    """Beta of Wu et al. (2016): how much a source token without attention costs."""
    early_stopping: Literal["true", "false", "never"] = "false"
    """When a line is done. true: as soon as num_beams outputs are complete. false: when its best open beam is no better
    than the worst of them. never: when it could not become better at any length."""
    max_length: int | None = None
    """Longest output in tokens, `</s>` counted. Unset: the source's length + 50."""
    min_length: int = 0
    """Shortest output in tokens, `</s>` not counted."""
    no_repeat_ngram_size: int = 0
    """No run of so many tokens comes twice in an output; 0: any may."""
    sample: bool = False
    """Draw tokens at random in place of looking for the best; --num_beams is then 1, if unset."""
    temperature: float = 1.0
    """Scores are divided by it before a token is drawn."""
    top_k: int = 0
    """Draw from the k best tokens only; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities sum to p or more."""
    seed: int | None = None
    """Seed of the draws: the same seed and line give the same samples, whatever else is translated."""
    mbr: bool = False
    """Of num_return outputs write the one that the others resemble most (minimum Bayes risk); of 16 samples or more."""
    prefixes: str | None = None
    """File with a beginning that each output must have, one a line; a blank line for none."""
    ensemble: list[str] = field(default_factory=list)
    """Further models with the same vocabulary, comma-separated: the probabilities of all are averaged."""


@dataclass
class TranslateOptions:
    """Translates lines of text with a model: one line in, one line out, a blank line for a blank line."""

    input: str | None = None
    """File to read. Unset: the standard input."""
    output: str | None = None
    """File to write. Unset: the standard output."""
    num_beams: int | None = None
    """Beam width. Unset: what the model's generation_config.json says."""
    length_penalty: float | None = None
    """Exponent of the length penalty. Unset: what the model's generation_config.json says."""
    batch_tokens: int = 4096
    """Largest size of a batch: sentences x longest source, padding counted."""
    engine: Literal["fast", "generate", "ctranslate2", "ctranslate2-float16", "ctranslate2-int8"] | None = None
    """What searches. Unset: this package's fast search for its own models, the library's `generate` for others.
    `ctranslate2` is an engine in C++ (`pip install 'metaphrase[export]'`)."""
    device: str | None = None
    """`cpu`, `cuda`, `cuda:1`, … Unset: a GPU where there is one."""
    progress: bool | None = None
    """Show a progress bar on the standard error. Unset: where that is a terminal."""
    search: TranslateSearch = field(default_factory=TranslateSearch)
    """What is looked for, beside --num_beams and --length_penalty."""


@dataclass
class ScoreOptions:
    """Translates a test set with a model and scores the outputs against references; prints JSON."""

    source: str | None = None
    """File with the source lines."""
    reference: list[str] = field(default_factory=list)
    """File with the reference lines, or several files, comma-separated."""
    metrics: list[Literal["sacrebleu", "chrf", "word_error_rate", "unit_error_rate"]] = field(
        default_factory=lambda: ["sacrebleu", "chrf"]
    )
    """What is scored."""
    num_beams: int = 5
    """Beam width."""
    length_penalty: float = 1.0
    """Exponent of the length penalty."""
    batch_tokens: int = 4096
    """Largest size of a batch: sentences x longest source, padding counted."""
    progress: bool | None = None
    """Show a progress bar on the standard error. Unset: where that is a terminal."""


def check_model_name(model: str) -> None:
    """Refuses a name that is neither a folder with a model nor an id of the Hub, before torch is imported.

    Raises:
        MetaphraseError: the sentence names the folder and what it lacks.
    """
    folder = Path(model).expanduser()
    if not folder.exists():
        like_an_id = model.count("/") == 1 and not model.startswith((".", "/", "~"))
        if like_an_id and not folder.parent.is_dir():  # where `runs` lies here, `runs/typo` is no id of the Hub
            return
        raise MetaphraseError(f"there is no model folder {model}")
    if not folder.is_dir():
        raise MetaphraseError(f"{model} is a file; give the folder of the model")
    weights = ("model.safetensors", "model.safetensors.index.json")
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in weights):
        missing.append(weights[0])
    if missing:
        unfinished = "; its training is not finished: go on with --resume" if (folder / "checkpoints").is_dir() else ""
        raise MetaphraseError(f"{model} is not a model folder: it has no {', no '.join(missing)}{unfinished}")


def translate_command(model_name: str, options: TranslateOptions) -> None:
    """Translates the input, line by line in its order, to the output.

    Raises:
        MetaphraseError: a file is not there or not UTF-8 text, or a value is impossible.
    """
    _check_positive(batch_tokens=options.batch_tokens, num_beams=options.num_beams)
    _check_search(options)
    for name in options.search.ensemble:
        check_model_name(name)
    with (
        _reading(options.input) as source,
        _beginnings(options.search.prefixes) as prefixes,
        _writing(options.output) as target,
    ):
        models, tokenizer = _load_all([model_name, *options.search.ensemble], options.device)
        search = _search(options, models[0])
        at_once = LINES_AT_ONCE
        if source.isatty():
            print("Type a line and press Enter; Ctrl-D ends.", file=sys.stderr)
            at_once = 1
        lines = _decoded(source, options.input or "standard input")
        done = 0
        while batch := list(islice(lines, at_once)):
            further: dict[str, Any] = {"progress": at_once > 1 and _wants_bar(options.progress)}
            if prefixes is not None:
                further["prefixes"] = _as_many(prefixes, len(batch), done, options.search.prefixes)
            outputs = _written(models, tokenizer, batch, done, options, search | further)
            target.writelines(f"{output}\n".encode() for output in outputs)
            target.flush()
            done += len(batch)
        if prefixes is not None and next(prefixes, None) is not None:
            raise MetaphraseError(f"{options.search.prefixes} has more lines than the input, which has {done}")


def _written(
    models: list, tokenizer: Any, lines: list[str], done: int, options: TranslateOptions, search: dict[str, Any]
) -> Iterator[str]:
    """What is written for these lines, after `done` lines before them: a line for each, or n for each."""
    from .decoding.translate import translate, translate_n_best

    model = models[0] if len(models) == 1 else models
    common = {"batch_tokens": options.batch_tokens, **search}
    if options.search.num_return == 1 or options.search.mbr:
        yield from map(_one_line, translate(model, tokenizer, lines, **common))
        return
    from .decoding.options import SearchOptions

    own = {name: common.pop(name) for name in list(common) if name in SearchOptions.__dataclass_fields__}
    found = translate_n_best(model, tokenizer, lines, options=SearchOptions(**own), **common)
    for number, outputs in enumerate(found, done + 1):
        for rank, output in enumerate(outputs, 1):
            score = "-" if output.score is None else f"{output.score:.6f}"
            yield "\t".join([str(number), str(rank), score, _one_line(output.text).replace("\t", " ")])


def _check_search(options: TranslateOptions) -> None:
    """Refuses what cannot be, before a model is loaded."""
    from .decoding.options import SearchOptions

    search = options.search
    if search.mbr and search.num_return < 2:
        raise MetaphraseError(
            f"search.mbr chooses among outputs, and search.num_return is {search.num_return}; ask for 16 samples: "
            "--search.sample true --search.num_return 16"
        )
    if search.sample and (options.num_beams or 1) > 1:
        raise MetaphraseError(f"num_beams is {options.num_beams} and search.sample is true; samples need no beams")
    SearchOptions(**_search_fields(search), num_beams=1 if search.sample else options.num_beams or 2**31)


def _search_fields(search: TranslateSearch) -> dict[str, Any]:
    """What was asked for, as fields of `SearchOptions`; what was not is left to its defaults."""
    asked = {name: value for name, value in vars(search).items() if value != getattr(TranslateSearch(), name)}
    for name in ("mbr", "prefixes", "ensemble"):
        asked.pop(name, None)
    if "early_stopping" in asked:
        asked["early_stopping"] = True if search.early_stopping == "true" else search.early_stopping
    return asked


def _search(options: TranslateOptions, model) -> dict[str, Any]:
    """How to search: what the command line says, else what the model's generation_config.json says."""
    search = _search_fields(options.search)
    for name in ("num_beams", "length_penalty"):
        given = getattr(options, name)
        value = given if given is not None else getattr(model.generation_config, name, None)
        if value is not None:
            search[name] = value
    if options.num_beams is None:
        if options.search.sample:
            search["num_beams"] = 1
        elif options.search.num_return > 1:
            search["num_beams"] = max(search.get("num_beams") or 5, options.search.num_return)
    if options.search.mbr:
        search["mbr"] = True
    own = model.config.model_type == "metaphrase"
    return {"engine": options.engine or ("fast" if own else "generate"), **search}


@contextmanager
def _beginnings(name: str | None) -> Iterator[Iterator[str] | None]:
    """The lines of the file with prefixes; None where there is no such file."""
    if name is None:
        yield None
        return
    with _reading(name) as file:
        yield _decoded(file, name)


def _as_many(prefixes: Iterator[str], count: int, done: int, name: str | None) -> list[str]:
    found = list(islice(prefixes, count))
    if len(found) < count:
        raise MetaphraseError(
            f"{name} has {done + len(found)} lines, and the input has more; give one for each, blank for no prefix"
        )
    return found


def score_command(model_name: str, options: ScoreOptions) -> None:
    """Prints the scores of a model on a test set, with their signatures, as JSON.

    Raises:
        MetaphraseError: a file is missing, not given or not UTF-8 text, or the numbers of lines differ.
    """
    if options.source is None:
        raise MetaphraseError("which source lines? Give --source FILE")
    if not options.reference:
        raise MetaphraseError("which references? Give --reference FILE, or several files, comma-separated")
    _check_positive(batch_tokens=options.batch_tokens, num_beams=options.num_beams)
    sources = _read_file(options.source)
    columns = [_read_file(name) for name in options.reference]
    for name, lines in zip(options.reference, columns, strict=True):
        if len(lines) != len(sources):
            raise MetaphraseError(
                f"{options.source} has {len(sources)} lines but {name} has {len(lines)}; line n of one must translate "
                "line n of the other"
            )
    if not sources:
        raise MetaphraseError(f"{options.source} is empty: there is nothing to score")

    from .training.evaluate import score

    _no_loading_bar()
    scores = score(
        model_name,
        sources,
        [list(line) for line in zip(*columns, strict=True)],
        metrics=options.metrics,
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
        batch_tokens=options.batch_tokens,
        progress=_wants_bar(options.progress),
    )
    print(json.dumps(scores, ensure_ascii=False, indent=2))


def _load(model_name: str, device: str | None) -> tuple:
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise MetaphraseError(f'device is "{device}"; it must be cpu, cuda, cuda:1 or the like') from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise MetaphraseError(f"device is {device}, but torch sees no GPU here")
    _no_loading_bar()
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(model_name, use_safetensors=True)  # no pickles
        tokenizer = AutoTokenizer.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        from .training.hub_answers import loading_sentence

        raise MetaphraseError(loading_sentence(error, model_name)) from None
    return model.to(place).eval(), tokenizer


def _load_all(names: list[str], device: str | None) -> tuple[list, Any]:
    """Models that share a vocabulary, and the first one's tokenizer."""
    (model, tokenizer), *further = [_load(name, device) for name in names]
    for name, (_, other) in zip(names[1:], further, strict=True):
        if other.get_vocab() != tokenizer.get_vocab():
            raise MetaphraseError(f"the vocabularies of {names[0]} and {name} differ; an ensemble needs one for all")
    return [model, *(other for other, _ in further)], tokenizer


def _no_loading_bar() -> None:
    """The library's bar of loading weights stands in the way of ours, and of an error stream that means errors."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@contextmanager
def _reading(name: str | None) -> Iterator[BinaryIO]:
    if name is None:
        yield sys.stdin.buffer
        return
    with Path(name).expanduser().open("rb") as file:
        yield file


@contextmanager
def _writing(name: str | None) -> Iterator[BinaryIO]:
    """The output. A file appears whole, under its name, when all is written."""
    if name is None:
        sys.stdout.flush()
        yield sys.stdout.buffer
        return
    path = Path(name).expanduser()
    partial = path.with_name(f"{path.name}.part")
    with partial.open("wb") as file:
        yield file
    os.replace(partial, path)


def _decoded(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Lines as text, by the rule of the corpus reader: a line ends at the byte 0x0A and nowhere else."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise MetaphraseError(f"{name}, line {number}: not UTF-8 text (byte {error.start + 1})") from None


def _read_file(name: str) -> list[str]:
    with _reading(name) as file:
        return list(_decoded(file, name))


def _one_line(text: str) -> str:
    """One line in, one line out: a line feed that a model writes would shift every line after it."""
    return text.replace("\n", " ")


def _wants_bar(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise MetaphraseError(f"{name} is {value}; it must be 1 or more")
