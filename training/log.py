"""What a run tells while it goes on: a progress bar, `train_log.jsonl`, and Accelerate's trackers."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from tqdm import tqdm

from metaphrase.training.checkpoint import explain_full_disk, write_file

if TYPE_CHECKING:
    from metaphrase.training.loop import Outcome, Progress
    from metaphrase.training.stream import Stream

NAME = "train_log.jsonl"
REFRESH = 0.5 if sys.stderr.isatty() else 20.0
"""Seconds between two drawings of the progress bar; in a file each drawing is a line."""


class TrainLog:
    """Writes on the main process only; on the others it keeps the sums."""

    def __init__(self, folder: Path, accelerator: Accelerator, *, every: int, show: bool = True) -> None:
        self.path, self.accelerator, self.every = folder / NAME, accelerator, every
        self.remaining = lambda progress: 0.0
        self.window_started = 0.0
        self.drawn = 0.0
        self.rate = 0.0
        show = show and accelerator.is_main_process
        style = "{percentage:3.0f}%|{bar:20}| {desc}"
        self.bar = tqdm(total=1.0, disable=not show, file=sys.stderr, bar_format=style, delay=1.0)  # no bar over errors
        self.file = None

    def open(self, after: int) -> None:
        """Begin to write; records of updates after `after` are from a part of the run that was lost, and go."""
        if not self.accelerator.is_main_process:
            return
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["update"] <= after]
            if len(kept) < len(lines):
                write_file(self.path, "".join(kept))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def close(self) -> None:
        if not self.bar.disable and self.bar.n:
            self.bar.clear()  # what is said next begins a line, an error among it
        self.bar.close()
        if self.file is not None:
            self.file.close()

    def update(self, progress: Progress, stream: Stream, outcome: Outcome) -> None:
        """Take note of an update, and write a record each `every` updates."""
        window = progress.window
        if outcome.made:
            window["loss"] = window.get("loss", 0.0) + outcome.loss * outcome.tokens
            window["tokens"] = window.get("tokens", 0.0) + outcome.tokens
        window["seconds"] = progress.training_seconds - window.setdefault("since", 0.0)
        now = time.monotonic()
        if now - self.drawn > REFRESH:
            self.drawn = now
            self._draw(progress, stream, outcome)
        if outcome.made and progress.updates % self.every == 0 and window["tokens"]:
            self.write(
                {
                    "kind": "training",
                    "update": progress.updates,
                    "epoch": round(stream.epochs, 4),
                    "pairs": stream.position.seen,
                    "tokens": progress.target_tokens,
                    "loss": self._everywhere(window["loss"]) / window["tokens"],
                    "lr": outcome.rate,
                    "grad_norm": outcome.norm,
                    "tokens_per_second": round(window["tokens"] / max(1e-9, window["seconds"]), 1),
                    "seconds": round(progress.seconds, 2),
                    "skipped": progress.skipped,
                    "out_of_memory": progress.out_of_memory,
                    "batches": stream.position.digest,
                }
            )
            progress.window = {"since": progress.training_seconds}

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, and hand its numbers to the trackers."""
        if self.file is not None:
            with explain_full_disk(self.path):
                self.file.write(json.dumps(record) + "\n")
                self.file.flush()
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "update"}
        self.accelerator.log({f"{record['kind']}/{k}": v for k, v in numbers.items()}, step=record["update"])

    def say(self, text: str) -> None:
        """A line for the person at the terminal, above the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)

    def settle(self, progress: Progress) -> None:
        """Before a checkpoint: force the log to the disk, and give the main process the sums of all."""
        if self.file is not None:
            os.fsync(self.file.fileno())
        if "loss" in progress.window:
            total = self._everywhere(progress.window["loss"])
            progress.window["loss"] = total if self.accelerator.is_main_process else 0.0

    def _everywhere(self, value: float) -> float:
        if self.accelerator.num_processes == 1:
            return value
        import torch

        total = torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)
        torch.distributed.all_reduce(total)
        return float(total)

    def _draw(self, progress: Progress, stream: Stream, outcome: Outcome) -> None:
        if self.bar.disable or outcome.loss is None:
            return
        speed = progress.window.get("tokens", 0.0) / max(1e-9, progress.window["seconds"])
        left = self.remaining(progress)
        spent = progress.seconds
        time_left = tqdm.format_interval(spent * left / max(1e-9, 1 - left)) if left < 1 else "?"
        self.bar.n = 1 - left
        loss = outcome.loss * self.accelerator.num_processes
        self.bar.set_description_str(
            f"epoch {stream.epochs:.2f}, update {progress.updates}: loss {loss:.3f}, lr {outcome.rate:.2e}, "
            f"{speed:,.0f} tok/s, {time_left} left"
        )
