"""A cleaned copy of a corpus, and the list of all that was taken out or changed."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions
from metaphrase.training.data.cache import new_folder
from metaphrase.training.data.doctor import CHECKS, Doctor, Judged
from metaphrase.training.data.line_checks import mend
from metaphrase.training.data.text import is_blank

REMOVED, REPAIRED = "removed.jsonl", "repaired.jsonl"


@dataclass
class Cleaned:
    """What was done; `removed` and `repaired` count pairs by the check that led to it (the first, for a removal)."""

    folder: Path
    kept: dict[str, int] = field(default_factory=dict)
    removed: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """For a terminal."""
        kept = ", ".join(f"{split} {number:,}" for split, number in self.kept.items())
        lines = [f"{self.folder}: {kept} pairs"]
        for name, counts, file in (("removed", self.removed, REMOVED), ("repaired", self.repaired, REPAIRED)):
            listed = ", ".join(f"{number:,} {check}" for check, number in sorted(counts.items())) or "none"
            lines.append(f"{name}: {listed} (listed in {file})")
        return "\n".join(lines)


def refuse_existing(folder: Path) -> None:
    """Raises where `folder` exists: a cleaned copy never overwrites anything."""
    if folder.exists():
        raise MetaphraseError(f"{folder} exists already; a cleaned copy needs a new folder")


def clean(data: DataOptions, folder: str | Path) -> Cleaned:
    """Writes line-aligned text files into a new folder: train.SOURCE and train.TARGET, and so on.

    Training pairs are removed or repaired as `CHECKS` says. Validation and test are copied as they are, one reference
    a line, for their scores must stay comparable. Corpora of `data.more` become train-1, train-2 ….

    Raises:
        MetaphraseError: the folder exists, or the data cannot be read.
    """
    folder = Path(folder)
    refuse_existing(folder)
    doctor = Doctor(data)
    cleaned = Cleaned(folder)
    with new_folder(folder) as unfinished, ExitStack() as files:

        def opened(name: str):
            return files.enter_context((unfinished / name).open("w", encoding="utf-8", newline="\n"))

        removed, repaired = opened(REMOVED), opened(REPAIRED)
        for split, sources in doctor.splits.items():
            names = [split if part == 0 else f"{split}-{part}" for part in range(len(sources))]
            sides = [[opened(f"{name}.{side}") for side in (data.source, data.target)] for name in names]
            cleaned.kept[split] = 0
            for judged in doctor.judge(split):
                texts = _treated(judged, split, cleaned, removed, repaired)
                if texts is None:
                    continue
                for file, text in zip(sides[judged.part], texts, strict=True):
                    file.write(text + "\n")
                cleaned.kept[split] += 1
    return cleaned


def _treated(judged: Judged, split: str, cleaned: Cleaned, removed, repaired) -> tuple[str, str] | None:
    """The pair as it goes into the copy; None where it does not."""
    texts = judged.source, judged.target
    if split != "train":
        return tuple(text.replace("\n", " ") for text in texts)
    for check in judged.faults:
        if CHECKS[check].fix == "remove":
            return _remove(judged, check, cleaned, removed)
    to_repair = [check for check in judged.faults if CHECKS[check].fix == "repair"]
    if not to_repair:
        return texts
    mended = tuple(map(mend, texts))
    if any(map(is_blank, mended)):
        return _remove(judged, "blank", cleaned, removed)
    cleaned.repaired.update(to_repair)
    repaired.write(_entry(judged, to_repair, mended_source=mended[0], mended_target=mended[1]))
    return mended


def _remove(judged: Judged, check: str, cleaned: Cleaned, removed) -> None:
    cleaned.removed[check] += 1
    removed.write(_entry(judged, [check]))


def _entry(judged: Judged, checks: list[str], **more: str) -> str:
    entry = {
        "file": judged.file, "line": judged.line, "reason": ", ".join(checks), "source": judged.source,
        "target": judged.target,
    }  # fmt: skip
    return json.dumps(entry | more, ensure_ascii=False) + "\n"
