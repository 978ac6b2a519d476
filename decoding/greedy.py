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
    rows = torch.arange(task.prompts.shape[0], device=task.prompts.device)
    so_far = task.prompts.new_full((len(rows), task.width), task.pad)
    so_far[:, : task.prompts.shape[1]] = task.prompts[:, : task.width]
    starts, limits, ends = task.prompt_lengths.tolist(), task.limits.tolist(), set(task.ends.tolist())
    outputs: list[list[int]] = [[] for _ in starts]
    places = list(range(len(starts)))  # of the rows that are in the batch
    is_open = [True] * len(starts)
    for step in range(1, task.width):
        tokens = choose(scorer, so_far[:, :step], rows)
        if step < max(starts):
            tokens = torch.where(step < task.prompt_lengths[rows], so_far[:, step], tokens)
        so_far[:, step] = tokens
        some_ended = False
        for place, (row, token) in enumerate(zip(places, tokens.tolist(), strict=True)):
            if step < starts[row]:
                continue
            if is_open[row]:
                outputs[row].append(token)
                is_open[row] = token not in ends and len(outputs[row]) < limits[row]
                some_ended |= not is_open[row]
            elif not task.drop:  # something looks at finished rows, too
                so_far[place, step] = task.pad
        if some_ended:
            stay = [place for place, row in enumerate(places) if is_open[row]]
            if not stay:
                break
            if task.drop and 16 * len(stay) <= 15 * len(places):
                places = [places[place] for place in stay]
                chosen = torch.tensor(stay, device=rows.device)
                scorer.keep(chosen)
                rows, so_far = rows[chosen], so_far[chosen]
    return outputs
