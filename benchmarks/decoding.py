"""Decoding speed on one thread: our search beside `generate` of transformers, and CTranslate2 where it is installed.

    python benchmarks/decoding.py MODEL SOURCE [--reference FILE] [--sentences 1000] [--single 100] [--rounds 3]

All contenders get the same batches (so many sentences, sorted by length) with the same limit, and take turns. Wall
and processor time are both kept: on a machine that others use, the second is the fairer one. "Same ids" counts
sentences on which a contender's token ids equal those of `generate` at the same setting; for CTranslate2, whose beam
search stops like `early_stopping=True`, those of our search with that. The others are listed in the
record with the model's own score of both outputs (log-probability a token); ties are those within 1e-5 of each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import Measurements, bar_chart, keep, machine, ratios, take_turns
from transformers import AutoTokenizer

from metaphrase.decoding.engines import make_engine
from metaphrase.decoding.options import SearchOptions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

Batch = list[list[int]]
ENGINES = {
    "generate": "generate",
    "metaphrase": "fast",
    "ctranslate2 float32": "ctranslate2",
    "ctranslate2 int8": "ctranslate2-int8",
}
REFERENCE, OURS = "generate", "metaphrase"
LIMIT = 100
TIE = 1e-5
CLOCKS = ("processor", "wall")


class Contender:
    """One engine on one set of batches: measures itself, and keeps what it found."""

    def __init__(self, engine: Callable[..., Any], start: int, end: int, batches: list[Batch]):
        self.engine, self.start, self.end, self.batches = engine, start, end, batches
        self.outputs: Batch = []
        self.processor: list[float] = []
        self.run(batches[:1])

    def run(self, batches: list[Batch]) -> Batch:
        """Token ids of the best outputs, without `</s>`."""
        found = [best[0].tokens for batch in batches for best in self.engine(batch, [[self.start]] * len(batch))]
        return [until(tokens, self.end) for tokens in found]

    def __call__(self) -> float:
        """Sentences a second of wall-clock time; those of processor time are kept beside."""
        wall, processor = time.perf_counter(), time.process_time()
        self.outputs = self.run(self.batches)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        self.processor.append(len(self.outputs) / processor)
        return len(self.outputs) / wall


def until(tokens: list[int], end: int) -> list[int]:
    """Tokens before `end`."""
    return tokens[: tokens.index(end)] if end in tokens else tokens


def compare(
    outputs: Batch, reference: Batch, sources: Batch, model: MetaphraseForConditionalGeneration
) -> dict[str, Any]:
    """How many outputs have the reference's ids; those that have not, with both scores."""
    differing = [
        {"sentence": number, "scores": [own_score(model, source, ids) for ids in (own, other)]}
        for number, (own, other, source) in enumerate(zip(outputs, reference, sources, strict=True))
        if own != other
    ]
    ties = [one for one in differing if abs(one["scores"][0] - one["scores"][1]) < TIE]
    return {"same": len(outputs) - len(differing), "of": len(outputs), "ties": len(ties), "differing": differing}


@torch.inference_mode()
def own_score(model: MetaphraseForConditionalGeneration, source: list[int], ids: list[int]) -> float:
    """log P(output | source) over its length, by the model's own forward."""
    target = [*ids, model.config.eos_token_id][:LIMIT]
    inputs = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]], device=model.device)
    logits = model(input_ids=torch.tensor([source], device=model.device), decoder_input_ids=inputs).logits
    log_probs = logits[0].log_softmax(-1).cpu()
    return float(log_probs.gather(1, torch.tensor(target)[:, None]).mean())


def measure(
    model: MetaphraseForConditionalGeneration, sources: Batch, beams: int, size: int, rounds: int, engines: list[str]
) -> dict[str, Any]:
    """All engines at one setting."""
    config, options = model.config, SearchOptions(num_beams=beams, max_length=LIMIT)
    batches = [sources[first : first + size] for first in range(0, len(sources), size)]
    contenders = {
        name: Contender(
            make_engine(ENGINES[name], [model], options), config.decoder_start_token_id, config.eos_token_id, batches
        )
        for name in engines
    }
    wall = take_turns(contenders, rounds)
    references = dict.fromkeys(engines, contenders[REFERENCE].outputs)
    if theirs := [name for name in engines if "ctranslate2" in name]:
        early = make_engine("fast", [model], replace(options, early_stopping=True))
        found = Contender(early, config.decoder_start_token_id, config.eos_token_id, batches).run(batches)
        references.update(dict.fromkeys(theirs, found))
    return {
        "beams": beams,
        "batch": size,
        "sentences": len(sources),
        "wall": wall,
        "processor": {name: contender.processor for name, contender in contenders.items()},
        "ids": {name: compare(one.outputs, references[name], sources, model) for name, one in contenders.items()},
        "outputs": {name: contender.outputs for name, contender in contenders.items()},
    }


def bleu(outputs: list[list[int]], references: list[str], tokenizer: Any) -> float:
    """sacreBLEU, cased and detokenised."""
    from sacrebleu.metrics import BLEU

    return BLEU().corpus_score(tokenizer.batch_decode(outputs, skip_special_tokens=True), [references]).score


def table(settings: list[dict[str, Any]]) -> list[str]:
    """A Markdown table, a row for each contender at each setting."""
    lines = [
        "| | sentences/s of processor time | x generate | sentences/s | x generate | same ids | ties | BLEU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in settings:
        for name in one["wall"]:
            processor, wall = (f"{told(one[clock][name])} | {told(against(one, clock, name), 2)}" for clock in CLOCKS)
            ids, score = one["ids"][name], one["bleu"].get(name)
            lines.append(
                f"| {label(one, name)} | {processor} | {wall} | {ids['same']:,} of {ids['of']:,} | {ids['ties']} | "
                f"{'' if score is None else f'{score:.2f}'} |"
            )
    return lines


def against(setting: dict[str, Any], clock: str, name: str) -> list[float]:
    return ratios(setting[clock], name, REFERENCE)


def told(values: list[float], digits: int = 1) -> str:
    """Median, and the range where there were several rounds."""
    median = f"{statistics.median(values):,.{digits}f}"
    return median if len(values) == 1 else f"{median} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def label(setting: dict[str, Any], name: str) -> str:
    search = "greedy" if setting["beams"] == 1 else f"beam {setting['beams']}"
    return f"{search}, batch {setting['batch']}: {name}"


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = MetaphraseForConditionalGeneration.from_pretrained(arguments.model).eval()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    lines = arguments.source.read_text(encoding="utf-8").split("\n")[: arguments.sentences]
    encoded = tokenizer(lines)["input_ids"]
    order = sorted((number for number, line in enumerate(lines) if line.strip()), key=lambda n: len(encoded[n]))
    references = arguments.reference.read_text(encoding="utf-8").split("\n") if arguments.reference else None
    settings = []
    for size in arguments.batches:
        chosen = order if size > 1 else order[:: max(1, len(order) // arguments.single)]
        for beams in arguments.beams:
            print(f"\nbeams {beams}, batch {size}, {len(chosen)} sentences")
            one = measure(model, [encoded[n] for n in chosen], beams, size, arguments.rounds, arguments.engines)
            outputs, one["bleu"] = one.pop("outputs"), {}
            if references and len(chosen) == len(order):
                told = [references[n] for n in chosen]
                one["bleu"] = {name: bleu(ids, told, tokenizer) for name, ids in outputs.items()}
            settings.append(one)
    config = model.config
    shape = {name: getattr(config, name) for name in ("vocab_size", "d_model", "encoder_layers", "decoder_layers")}
    facts = machine(1)
    print("\n".join(["", f"{facts['cpu']}, 1 thread, {facts['date']}, {facts['commit']}; {shape}", *table(settings)]))
    path = keep(
        arguments.name,
        {
            "machine": facts,
            "command": f"python benchmarks/decoding.py MODEL {arguments.source.name} --sentences {arguments.sentences} "
            f"--single {arguments.single} --rounds {arguments.rounds}",
            "model": {**shape, "parameters": model.num_parameters()},
            "unit": "sentences a second",
            "settings": settings,
        },
    )
    bars: Measurements = {label(one, name): values for one in settings for name, values in one[CLOCKS[0]].items()}
    unit = "sentences a second of processor time"
    bar_chart(path.with_suffix(".png"), bars, OURS, unit, "Decoding speed, one thread, same weights")
    print(f"Kept in {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a trained metaphrase model")
    parser.add_argument("source", type=Path, help="text file, a sentence a line")
    parser.add_argument("--reference", type=Path, help="its translation, for BLEU")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--single", type=int, default=100, help="how many of them at batch 1 (default: 100)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=engines_here())
    parser.add_argument("--name", default="decoding", help="name of the record (default: decoding)")
    arguments = parser.parse_args()
    if REFERENCE not in arguments.engines:
        arguments.engines.insert(0, REFERENCE)
    return arguments


def engines_here() -> list[str]:
    try:
        import ctranslate2  # noqa: F401
    except ImportError:
        return [REFERENCE, OURS]
    return list(ENGINES)


if __name__ == "__main__":
    main()
