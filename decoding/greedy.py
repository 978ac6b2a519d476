"""One token after another for each row of a batch: the most likely one, or whichever `choose` gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from metaphrase.decoding.scorers import Scorer

Choose = Callable[[Scorer, torch.Tensor, torch.Tensor], torch.Tensor]
"""(scorer, tokens so far [N, T], numbers of these rows in the whole batch [N]) -> next tokens [N]"""


@dataclass(frozen=True)
class Task:
    """What a search starts from, and where it ends.

    Both lengths count tokens of one output; N is the number of sources, or of samples.
    """

    prompts: torch.Tensor
    """First inputs of the decoder, the start token and perhaps a forced beginning, [N, P], padded on the right."""
    prompt_lengths: torch.Tensor
    """How many of them are real, [N]."""
    limits: torch.Tensor
    """Most tokens that the search may choose for a row, [N]."""
    ends: torch.Tensor
    """The tokens that end an output, [E]."""
    pad: int = 0
    """What finished rows are filled with while they are in the batch."""
    drop: bool = True
    """Take finished rows out of the batch. Not where something counts on seeing all of them."""

    def is_end(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which tokens end an output, of any shape."""
        return tokens == self.ends if self.ends.numel() == 1 else torch.isin(tokens, self.ends)

    def repeat(self, copies: int) -> Task:
        """The same for so many rows a source, side by side."""
        names = ("prompts", "prompt_lengths", "limits")
        return replace(self, **{name: getattr(self, name).repeat_interleave(copies, 0) for name in names})

    @property
    def width(self) -> int:
        """Places that a row can fill, prompt and output."""
        return int((self.prompt_lengths + self.limits).max())


def choose_best(scorer: Scorer, so_far: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The most likely token."""
    return scorer.best(so_far[:, -1:])


def one_by_one(scorer: Scorer, task: Task, choose: Choose = choose_best) -> list[list[int]]:
    """The tokens that were chosen for each row, `</s>` included where it came."""
    count = task.prompts.shape[0]
    rows = torch.arange(count, device=task.prompts.device)
    finished = task.prompts.new_full((count, task.width), task.pad)
    so_far = finished.clone()
    so_far[:, : task.prompts.shape[1]] = task.prompts[:, : task.width]
    lengths = task.prompt_lengths + task.limits
    first_limit, longest_prompt = int(lengths.min()), int(task.prompt_lengths.max())
    prompt_lengths, is_open = task.prompt_lengths, torch.ones_like(rows, dtype=torch.bool)
    for step in range(1, task.width):
        tokens = choose(scorer, so_far[:, :step], rows)
        if step < longest_prompt:
            given = step < prompt_lengths
            tokens = torch.where(given, so_far[:, step], tokens)
            ending = task.is_end(tokens) & ~given
        else:
            ending = task.is_end(tokens)
        so_far[:, step] = torch.where(is_open, tokens, task.pad)
        if step + 1 >= first_limit:
            ending |= lengths[rows] <= step + 1
        ending &= is_open
        if not bool(ending.any()):
            continue
        lengths[rows[ending]] = step + 1
        is_open &= ~ending
        still = int(is_open.sum())
        if still == 0:
            break
        if task.drop and 16 * still <= 15 * len(rows):
            finished[rows] = so_far
            stay = is_open.nonzero().squeeze(1)
            scorer.keep(stay)
            rows, so_far, prompt_lengths = rows[stay], so_far[stay], prompt_lengths[stay]
            is_open = torch.ones_like(rows, dtype=torch.bool)
    finished[rows] = so_far
    starts, ends = task.prompt_lengths.tolist(), lengths.tolist()
    return [row[start:end] for row, start, end in zip(finished.tolist(), starts, ends, strict=True)]
