"""The account of what was read: each line not learned from is counted, and listed with file, line and reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any


@dataclass
class CorpusReport:
    """Counts of one reading."""

    read: int = 0
    """Lines of the source (rows of the dataset, words of the dictionary)."""
    kept: int = 0
    """Pairs that came of them; a line with several translations makes several pairs."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Lines left out, by reason: blank, missing, undecodable, malformed; later too_long, counted in pairs."""
    notes: list[str] = field(default_factory=list)
    """What else a reader should know, a sentence each."""
    listings: list[str] = field(default_factory=list)
    """JSONL files of {"file", "line", "reason", "detail"}, one line for each drop."""

    def count(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def summary(self) -> str:
        """One line for the terminal: '29,000 lines read, 28,998 pairs kept; 2 blank'."""
        drops = ", ".join(f"{number:,} {reason}" for reason, number in sorted(self.dropped.items()))
        return f"{self.read:,} lines read, {self.kept:,} pairs kept" + (f"; left out: {drops}" if drops else "")

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> CorpusReport:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def drops(self) -> Iterator[dict[str, Any]]:
        """The listings, read back."""
        for listing in self.listings:
            with open(listing, encoding="utf-8", newline="\n") as file:
                yield from map(json.loads, file)

    @classmethod
    def merged(cls, reports: Iterable[CorpusReport]) -> CorpusReport:
        """One account of several readings."""
        whole = cls()
        for report in reports:
            whole.read += report.read
            whole.kept += report.kept
            whole.notes += report.notes
            whole.listings += report.listings
            for reason, number in report.dropped.items():
                whole.dropped[reason] = whole.dropped.get(reason, 0) + number
        return whole


class DropList:
    """Writes the listing and counts into the report."""

    def __init__(self, report: CorpusReport, file: IO[str]) -> None:
        self.report, self.file = report, file

    def add(self, file: str, line: int, reason: str, detail: str = "") -> None:
        self.report.count(reason)
        entry = {"file": file, "line": line, "reason": reason, "detail": detail[:200]}
        self.file.write(json.dumps(entry, ensure_ascii=False) + "\n")
