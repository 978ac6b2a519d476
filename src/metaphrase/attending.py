"""The command `attend`: the page of one sentence, the health of every head over a corpus, or word alignments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .configuration.errors import MetaphraseError

if TYPE_CHECKING:
    from .inspection.alignment import HeadChoice
    from .inspection.attend import Attention

ALIGNED_AT_ONCE = 16


@dataclass
class AttendOptions:
    """Shows what a model attends to: a page for one sentence, a summary of its heads, or word alignments."""

    output: str | None = None
    """HTML file to write (-o for short). Unset: attention.html."""
    target: str | None = None
    """An output to look at in place of the model's own."""
    explain: str | None = None
    """A word to follow step by step through one head, in the page."""
    attention: Literal["encoder", "decoder", "cross"] | None = None
    """What is shown first, or explained. Unset: cross; the encoder for --explain."""
    layer: int | None = None
    """Layer, counted from 1. Unset: the last; the first for --explain."""
    head: int | None = None
    """Head, counted from 1. Unset: the mean of all; the first for --explain."""
    num_beams: int = 4
    """Beam width; a summary decodes greedily."""
    input: str | None = None
    """File with source lines, for --summary and --align."""
    reference: str | None = None
    """File with target lines: a summary tells what BLEU each head is worth; alignments are of these lines."""
    gold: str | None = None
    """File with gold alignments in Pharaoh format: the best head is chosen, and its error rate is told."""
    device: str | None = None
    """`cpu`, `cuda`, `cuda:1`, … Unset: a GPU where there is one."""


def attend_command(
    model_name: str, text: str | None, options: AttendOptions, *, png: bool, summary: bool, align: bool
) -> None:
    """Writes the page and prints its path; or prints a summary, or alignments.

    Raises:
        MetaphraseError: if words are missing, or a layer, head or token does not exist.
    """
    if summary and align:
        raise MetaphraseError("give --summary or --align, not both")
    lines = _lines(text, options, many=summary or align)
    references = None if options.reference is None else _read(options.reference)
    if references is not None and len(references) != len(lines):
        raise MetaphraseError(
            f"there are {len(lines)} source lines but {options.reference} has {len(references)}; line n of one must"
            " translate line n of the other"
        )
    _check_folder(model_name)
    from .using import _load

    model, tokenizer = _load(model_name, options.device)
    if summary:
        _summarize(model, tokenizer, lines, references)
    elif align:
        _align(model, tokenizer, lines, references, options)
    else:
        _write(model, tokenizer, lines[0], options, png)


def _write(model: Any, tokenizer: Any, text: str, options: AttendOptions, png: bool) -> None:
    from .inspection.attend import attend
    from .inspection.explain import explain
    from .inspection.heatmap import draw_head, draw_heads, save_png
    from .inspection.page import write_page

    how = {"target": options.target, "num_beams": options.num_beams}
    layer, head = (None if number is None else number - 1 for number in (options.layer, options.head))
    told = None
    if options.explain is None:
        kind = options.attention or "cross"
        attention = attend(model, tokenizer, text, **how)
    else:
        kind, layer, head = options.attention or "encoder", layer or 0, head or 0
        told = explain(model, tokenizer, text, options.explain, layer, head, kind=kind, **how)
        attention = told.attention
    layers, heads = attention.maps.of(kind).shape[:2]
    for name, number, count in (("layer", options.layer, layers), ("head", options.head, heads)):
        if number is not None and not 1 <= number <= count:
            raise MetaphraseError(f"there is no {name} {number}: the {kind} attention has {count}")
    path = Path(options.output or "attention.html").expanduser()
    print(write_page(attention, path, explanation=told, kind=kind, layer=layer, head=head))
    if png:
        shown = layers - 1 if layer is None else layer
        print(save_png(draw_head(attention, kind, shown, head), path.with_suffix(".png")))
        print(save_png(draw_heads(attention, kind), path.with_name(f"{path.stem}-heads.png")))


def _summarize(model: Any, tokenizer: Any, lines: Sequence[str], references: list[str] | None) -> None:
    from tqdm import tqdm

    from .decoding.translate import translate
    from .inspection.health import pruning_costs, summarize, table

    engine = "fast" if model.config.model_type == "metaphrase" else "generate"
    heads = summarize(model, tokenizer, lines)
    if references is not None:
        with tqdm(total=len(heads), unit="head", disable=not sys.stderr.isatty()) as bar:
            whole, heads = pruning_costs(
                model,
                lambda: translate(model, tokenizer, lines, num_beams=1, engine=engine),
                references,
                heads,
                progress=lambda _: bar.update(),
            )
        print(f"BLEU of the whole model, greedy: {whole:.2f}")
    print(table(heads))


def _align(
    model: Any, tokenizer: Any, lines: Sequence[str], references: list[str] | None, options: AttendOptions
) -> None:
    from .inspection.alignment import align, alignment_error_rate, choose_head, pharaoh, read_gold

    attentions = [_aligned(model, tokenizer, lines, references, i, options) for i in range(len(lines))]
    choice = _choice(attentions, options)
    if options.gold is not None:
        gold = read_gold(options.gold)
        if len(gold) != len(lines):
            raise MetaphraseError(f"{options.gold} has {len(gold)} lines but there are {len(lines)} sentences")
        pairs = [(one, links) for one, links in zip(attentions, gold, strict=True) if one is not None]
        if choice is None:
            choice, rate = choose_head([one for one, _ in pairs], [links for _, links in pairs])
        else:
            rate = alignment_error_rate([align(one, choice) for one, _ in pairs], [links for _, links in pairs])
        head = "the mean of all heads" if choice.head is None else f"head {choice.head + 1}"
        told = f"Alignment error rate {rate:.3f}, by {head} of layer {choice.layer + 1} when {choice.when} a word"
        print(told, file=sys.stderr)
    for attention in attentions:
        print("" if attention is None else pharaoh(align(attention, choice)))


def _aligned(
    model: Any, tokenizer: Any, lines: Sequence[str], references: list[str] | None, index: int, options: AttendOptions
) -> Attention | None:
    """A line's attention without the maps that alignment does not need; None for a blank line."""
    from .inspection.attend import attend

    target = None if references is None else references[index]
    if not lines[index].strip() or (target is not None and not target.strip()):
        return None
    attention = attend(model, tokenizer, lines[index], target=target, num_beams=options.num_beams)
    nothing = attention.maps.cross.new_zeros(0)
    return replace(attention, maps=replace(attention.maps, encoder=nothing, decoder=nothing))


def _choice(attentions: Sequence[Attention | None], options: AttendOptions) -> HeadChoice | None:
    """The head that the user named, checked; None to choose one."""
    from .inspection.alignment import HeadChoice, default_head

    first = next((one for one in attentions if one is not None), None)
    if first is None or (options.layer is None and options.head is None):
        return None
    layers, heads = first.maps.cross.shape[:2]
    for name, number, count in (("layer", options.layer, layers), ("head", options.head, heads)):
        if number is not None and not 1 <= number <= count:
            raise MetaphraseError(f"there is no {name} {number}: the cross attention has {count}")
    layer = default_head(first).layer if options.layer is None else options.layer - 1
    return HeadChoice(layer, None if options.head is None else options.head - 1, "writing")


def _lines(text: str | None, options: AttendOptions, *, many: bool) -> list[str]:
    if text is not None and options.input is not None:
        raise MetaphraseError("give a sentence or --input FILE, not both")
    if options.input is not None:
        if not many:
            raise MetaphraseError("--input is for --summary and --align; a page shows one sentence")
        return _read(options.input)
    if text is None:
        missing = (
            "which sentences? Give --input FILE" if many else 'which sentence? metaphrase attend MODEL "a sentence"'
        )
        raise MetaphraseError(missing)
    return [text]


def _read(name: str) -> list[str]:
    from .using import _read_file

    return _read_file(name)


def _check_folder(model: str) -> None:
    """Refuses what is neither a folder with a config.json nor an id of the Hub. Tokenizers may be of any kind here."""
    folder = Path(model).expanduser()
    if not folder.exists() and model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return
    if not (folder / "config.json").is_file():
        raise MetaphraseError(f"{model} is no model folder: it has no config.json")
