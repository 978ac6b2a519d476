"""The account of what was read: each line not learned from is counted, and listed with file, line and reason."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any


@dataclass
class CorpusReport:
    """Counts of one reading. `listing` is a JSONL file of {"file", "line", "reason", "detail"}, one for each drop."""

    read: int = 0
    """Lines of the source (rows of the dataset, words of the dictionary)."""
    kept: int = 0
    """Pairs that came of them; a line with several translations makes several pairs."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Lines left out, by reason: blank, missing, undecodable, malformed; later too_long, counted in pairs."""
    notes: list[str] = field(default_factory=list)
    """What else a reader should know, a sentence each."""
    listing: str | None = None

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

    def drops(self) -> list[dict[str, Any]]:
        """The listing, read back."""
        if self.listing is None or not Path(self.listing).is_file():
            return []
        return [json.loads(line) for line in Path(self.listing).read_text(encoding="utf-8").split("\n") if line]


class DropList:
    """Writes the listing and counts into the report."""

    def __init__(self, report: CorpusReport, file: IO[str]) -> None:
        self.report, self.file = report, file

    def add(self, file: str, line: int, reason: str, detail: str = "") -> None:
        self.report.count(reason)
        entry = {"file": file, "line": line, "reason": reason, "detail": detail[:200]}
        self.file.write(json.dumps(entry, ensure_ascii=False) + "\n")
