"""Looks at parallel data before time is spent on it: what is wrong, how often, where, and how bad.

    diagnosis = examine(options.data)
    print(diagnosis.table())
    raise SystemExit(diagnosis.exit_code)

The data is read twice: once to survey it (which pairs come twice, which words each side uses, how long a translation
usually is), once to judge each pair. Nothing is changed; `cleaning.py` writes a cleaned copy by the same judgement.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions
from metaphrase.training.data.corpus import further
from metaphrase.training.data.languages import SAMPLE, Sides, contradiction
from metaphrase.training.data.line_checks import faults, folded
from metaphrase.training.data.locate import find_source
from metaphrase.training.data.sources import PairSource
from metaphrase.training.data.text import is_blank

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
LEARNED = 100_000
"""Pairs from which the words of each side are learned: the first of this number, then one in fifty."""
EXAMPLES = 5
SHORT = 20
"""Characters below which a length ratio says nothing."""
RATIO = 3.0
"""A pair is suspicious where its length ratio is this many times off the usual one."""


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong with a pair. It is a warning, or an error, from such a share of the pairs on."""

    meaning: str
    warning: float
    error: float
    fix: Literal["remove", "repair", None] = "remove"


CHECKS: dict[str, Check] = {
    "undecodable": Check("a side is not UTF-8", 0, 0.01),
    "malformed": Check("the line lacks a column or is no JSON object", 0, 0.1),
    "missing": Check("a side is missing", 0, 0.1),
    "blank": Check("a side has no visible character", 0.001, 0.1),
    "swapped": Check("source and target look exchanged", 0.001, 0.05),
    "copied": Check("source and target are the same text", 0.01, 0.2),
    "duplicate": Check("the pair stands in the corpus already", 0.05, 0.5),
    "ambiguous": Check("the source stands in the corpus already, with another target", 2, 2, None),
    "leaked_test": Check("the source stands in the test split too", 0, 0.01),
    "leaked_validation": Check("the source stands in the validation split too", 0, 0.05),
    "length_ratio": Check(f"one side is {RATIO:g} times longer than usual beside the other", 0.01, 0.2),
    "over_long": Check("a side has more words than data.max_length", 0.01, 0.2),
    "control": Check("control characters or line separators inside a line", 0, 0.05, "repair"),
    "unseen": Check("zero-width or directional marks, soft hyphens", 0.001, 0.2, "repair"),
    "misread": Check("UTF-8 that was read in another encoding (Ã¼ for ü)", 0, 0.05, "repair"),
    "lost": Check("U+FFFD: a character was lost in an earlier conversion", 0, 0.05),
    "not_nfc": Check("characters that are not composed (Unicode NFC)", 0.0005, 2, "repair"),
    "markup": Check("HTML entities or tags", 0.01, 2, None),
}
"""In the order of the table. A share above 1 is never reached."""


@dataclass
class Finding:
    """One kind of fault in one split."""

    check: str
    severity: Severity
    meaning: str
    split: str
    count: int
    share: float
    examples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Diagnosis:
    """Everything that was found. `pairs` counts what was looked at, a split each."""

    pairs: dict[str, int]
    findings: list[Finding]

    @property
    def severity(self) -> Severity:
        """The worst."""
        return max((finding.severity for finding in self.findings), key=SEVERITIES.index, default="note")

    @property
    def exit_code(self) -> int:
        """0: nothing worse than a note; 1: a warning; 3: an error (2 is that of a command that cannot run)."""
        return {"note": 0, "warning": 1, "error": 3}[self.severity]

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"severity": self.severity}, indent=1, ensure_ascii=False)

    def table(self) -> str:
        """For a terminal: the worst first."""
        lines = ["  ".join(f"{split}: {number:,} pairs" for split, number in self.pairs.items()), ""]
        if not self.findings:
            return "\n".join([*lines, "Nothing found."])
        lines.append(f"{'':8} {'check':18} {'split':10} {'pairs':>10} {'share':>8}  meaning")
        for finding in sorted(self.findings, key=lambda finding: -SEVERITIES.index(finding.severity)):
            share = f"{100 * finding.share:.2f} %"
            lines.append(
                f"{finding.severity:8} {finding.check:18} {finding.split:10} {finding.count:10,} {share:>8}  "
                f"{finding.meaning}"
            )
            if finding.examples:
                shown = finding.examples[0]
                lines.append(f"{'':8} {'':18} for one, {shown['file']}, line {shown['line']}: {_short(shown)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Judged:
    """A pair with the names of all that is wrong with it. `part` is 0 for the main corpus, then those of data.more."""

    part: int
    file: str
    line: int
    source: str
    target: str
    faults: tuple[str, ...]


def examine(data: DataOptions) -> Diagnosis:
    """Looks at every pair of every split.

    Raises:
        MetaphraseError: the data cannot be found, or its two files differ in their number of lines.
    """
    doctor = Doctor(data)
    pairs: dict[str, int] = {}
    findings = [*doctor.wrong_sides()]
    for split in doctor.splits:
        pairs[split], found = _count(doctor, split)
        findings += found
    return Diagnosis(pairs, findings + doctor.unknown_characters())


def _count(doctor: Doctor, split: str) -> tuple[int, list[Finding]]:
    """Pairs of a split, and what was found in it."""
    counts: Counter[str] = Counter()
    examples: dict[str, list[dict[str, Any]]] = {}
    pairs = 0
    for judged in doctor.judge(split):
        pairs += 1
        for fault in judged.faults:
            counts[fault] += 1
            if counts[fault] <= EXAMPLES:
                examples.setdefault(fault, []).append(_example(judged))
    found = [check for check in CHECKS if counts[check]]
    return pairs, [_finding(check, split, counts[check], pairs, examples[check]) for check in found]


class Doctor:
    """The survey of a corpus, and the judgement over its pairs."""

    def __init__(self, data: DataOptions) -> None:
        self.data = data
        self.splits: dict[str, list[PairSource]] = {}
        for role in ("train", "validation", "test"):
            source = find_source(data, role)
            if source is not None:
                self.splits[role] = [source]
        self.splits["train"] += [found for more in data.more if (found := find_source(further(data, more), "train"))]
        self.sides = Sides()
        self.samples: dict[str, list[tuple[str, str]]] = {}
        self.characters: dict[str, Counter[str]] = {}
        self.scored = {split: self._survey_scored(split) for split in self.splits if split != "train"}
        self._survey_train()

    def judge(self, split: str) -> Iterator[Judged]:
        """Every pair of a split, in order, with its faults."""
        for index, judged in enumerate(self._pairs(split)):
            found = list(judged.faults)
            if not found:
                found += dict.fromkeys(faults(judged.source) + faults(judged.target))
                found += self._beside_each_other(judged.source, judged.target)
                if split == "train":
                    found += self._among_others(index, judged)
            order = [check for check in CHECKS if check in found]
            yield Judged(judged.part, judged.file, judged.line, judged.source, judged.target, tuple(order))

    def wrong_sides(self) -> Iterator[Finding]:
        """Whole files in the wrong language, or exchanged against the training files."""
        for split, sample in self.samples.items():
            if not sample:
                continue
            if split != "train" and self._mostly_swapped(sample):
                yield Finding(
                    "sides_exchanged", "error", "source and target are exchanged against train", split, 1, 1.0
                )
            for side, code in enumerate((self.data.source, self.data.target)):
                seen = contradiction(code, [pair[side] for pair in sample])
                if seen is not None:
                    meaning = f"the side {code} looks like {seen}"
                    yield Finding("wrong_language", "error", meaning, split, 1, 1.0)

    def unknown_characters(self) -> list[Finding]:
        """Characters of validation and test that training never sees."""
        found = []
        for split, seen in self.characters.items():
            unknown = {character: number for character, number in seen.items() if character not in self._known}
            if split != "train" and unknown:
                listed = "".join(sorted(unknown, key=unknown.get, reverse=True)[:20])
                share = sum(unknown.values()) / max(seen.total(), 1)
                severity: Severity = "warning" if share > 0.001 else "note"
                meaning = f"characters that train does not have: {listed}"
                found.append(Finding("unknown_character", severity, meaning, split, len(unknown), share))
        return found

    def _pairs(self, split: str) -> Iterator[Judged]:
        """Every pair as it was read; faults of the line itself are noted already."""
        for part, source in enumerate(self.splits[split]):
            for record in source.records():
                file = record.file or _first_file(source)
                for target in record.targets:
                    found = record.problem
                    if found is None and (is_blank(record.source) or is_blank(target)):
                        found = "blank"
                    yield Judged(part, file, record.line, record.source, target, (found,) if found else ())

    def _survey_scored(self, split: str) -> set[int]:
        """Hashes of the sources of a split that is scored."""
        seen: Counter[str] = Counter()
        sample, hashes = [], set()
        for pair in self._pairs(split):
            if not pair.faults:
                hashes.add(hash(folded(pair.source)))
                seen.update(pair.source + pair.target)
                sample.append((pair.source, pair.target))
        self.samples[split] = sample[:SAMPLE]
        self.characters[split] = seen
        return hashes

    def _survey_train(self) -> None:
        sources, pairs, ratios = array("q"), array("q"), array("f")
        self._known: set[str] = set()
        self.samples["train"] = []
        for index, pair in enumerate(self._pairs("train")):
            source = folded(pair.source)
            sources.append(hash(source))
            pairs.append(hash((source, folded(pair.target))))
            if pair.faults:
                continue
            self._known.update(pair.source, pair.target)
            if max(len(pair.source), len(pair.target)) >= SHORT:
                ratios.append(math.log(len(pair.target) / len(pair.source)))
            if index < LEARNED or index % 50 == 0:
                self.sides.learn(pair.source, pair.target)
            if len(self.samples["train"]) < SAMPLE:
                self.samples["train"].append((pair.source, pair.target))
        if not sources:
            raise MetaphraseError(f"there is no pair in {self.splits['train'][0].name}")
        self._duplicate = _again(pairs)
        self._ambiguous = _again(sources) & ~self._duplicate
        self._usual = float(np.median(np.frombuffer(ratios, np.float32))) if ratios else 0.0

    def _beside_each_other(self, source: str, target: str) -> Iterator[str]:
        """Faults of two texts as a pair."""
        if source.strip() == target.strip() and any(map(str.isalpha, source)):
            yield "copied"
        elif self.sides.swapped(source, target):
            yield "swapped"
        if max(len(source), len(target)) >= SHORT:
            off = abs(math.log(len(target) / len(source)) - self._usual)
            if off > math.log(RATIO):
                yield "length_ratio"
        if max(source.count(" "), target.count(" ")) >= self.data.max_length:
            yield "over_long"

    def _among_others(self, index: int, pair: Judged) -> Iterator[str]:
        """Faults of a training pair beside all other pairs."""
        if self._duplicate[index]:
            yield "duplicate"
        if self._ambiguous[index]:
            yield "ambiguous"
        key = hash(folded(pair.source))
        for split, hashes in self.scored.items():
            if key in hashes:
                yield f"leaked_{split}"

    def _mostly_swapped(self, sample: list[tuple[str, str]]) -> bool:
        return sum(self.sides.swapped(*pair) for pair in sample) > len(sample) / 2


def _again(hashes: array) -> np.ndarray:
    """True at every place whose hash stood at an earlier one."""
    whole = np.frombuffer(hashes, np.int64)
    again = np.ones(len(whole), dtype=bool)
    again[np.unique(whole, return_index=True)[1]] = False
    return again


def _finding(check: str, split: str, count: int, of: int, examples: list[dict[str, Any]]) -> Finding:
    rule = CHECKS[check]
    share = count / of
    severity: Severity = "error" if share >= rule.error else "warning" if share >= rule.warning else "note"
    if split != "train" and check in ("undecodable", "malformed", "missing"):
        severity = "error"  # a run refuses to score such a split
    return Finding(check, severity, rule.meaning, split, count, share, examples)


def _example(judged: Judged) -> dict[str, Any]:
    return {"file": judged.file, "line": judged.line, "source": judged.source[:200], "target": judged.target[:200]}


def _first_file(source: PairSource) -> str:
    return str(getattr(source, "source_file", source.name))


def _short(example: dict[str, Any]) -> str:
    texts = (repr(example[side])[1:-1][:40] for side in ("source", "target"))
    return " ||| ".join(itertools.chain(texts))
