"""Beam search, counted step for step as `generate` of transformers counts it, so that both find the same hypotheses.

B sources · K beams of a source · C = 2 K candidates of a source · W places of an output, its prompt included
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from metaphrase.decoding.greedy import Task
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.scorers import Candidates, Scorer
from metaphrase.decoding.scoring import coverage_penalty, length_divisor

NEVER = -1.0e9
"""Added to the score of what may not be chosen."""

Continue = Callable[[Scorer, torch.Tensor, torch.Tensor, int], Candidates]
"""(scorer, tokens so far [B, K, T], scores of the beams [B, K], count) -> the best continuations of each source"""


@dataclass(frozen=True)
class Hypothesis:
    """An output that a search chose."""

    tokens: list[int]
    """What it chose after the prompt, `</s>` included where it came."""
    score: float | None = None
    """Log-probability over length divisor, plus coverage penalty; None where the search did not count it."""


@dataclass(slots=True)
class Beams:
    """What the search knows of each source in the batch. Beams and hypotheses are ordered from the best on."""

    rows: torch.Tensor
    """The sources' numbers in the whole batch, [B]."""
    starts: torch.Tensor
    """Length of each prompt, [B, 1]."""
    ends: torch.Tensor
    """Places that an output may fill at most, [B, 1]."""
    tokens: torch.Tensor
    """Open beams, [B, K, W]."""
    scores: torch.Tensor
    """Their log-probabilities, [B, K]."""
    done_tokens: torch.Tensor
    """Complete hypotheses, [B, K, W]."""
    done_scores: torch.Tensor
    """Their scores, [B, K]; NEVER where there is none yet."""
    done_lengths: torch.Tensor
    """Places that they fill, [B, K]."""
    coverage: torch.Tensor | None
    """Attention that each source token has got in all, [B, K, S]."""

    def keep(self, stay: torch.Tensor) -> None:
        """Drops all sources but those at `stay`."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value.index_select(0, stay))


def plain_continuations(scorer: Scorer, so_far: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates:
    """The most likely continuations of each source. On the first step all its beams are one."""
    beams = 1 if so_far.shape[2] == 1 else so_far.shape[1]
    return scorer.top(so_far[:, :beams, -1], scores[:, :beams], count)


def beam_search(
    scorer: Scorer, task: Task, options: SearchOptions, continuations: Continue = plain_continuations
) -> list[list[Hypothesis]]:
    """The `options.num_return` best hypotheses of each source, the best first."""
    beams = _open(task, options)
    results: list[list[Hypothesis]] = [[] for _ in range(task.prompts.shape[0])]
    is_open = torch.ones_like(beams.rows, dtype=torch.bool)
    count = max(2, 1 + task.ends.numel()) * options.num_beams
    first_end, longest_prompt = int(beams.ends.min()), int(beams.starts.max())
    some_complete = False
    for step in range(1, task.width):
        scores, parents, ids = continuations(scorer, beams.tokens[:, :, :step], beams.scores, count)
        if beams.coverage is not None:
            beams.coverage = beams.coverage + scorer.attention
        ending = task.is_end(ids)
        if step + 1 >= first_end:
            ending |= beams.ends <= step + 1
        if step < longest_prompt:
            ending &= beams.starts <= step
        if bool(ending.any()):
            some_complete = True
            _complete(beams, step, scores, parents, ids, ending & is_open[:, None], scorer, options)
            scores, best = torch.where(ending, scores + NEVER, scores).topk(options.num_beams)
            parents, ids = parents.gather(1, best), ids.gather(1, best)
        _advance(beams, scorer, step, scores, parents, ids)
        if step < longest_prompt:
            _force(beams, task, step)
        if some_complete:
            is_open &= _may_improve(beams, step, options)
            still = int(is_open.sum())
            if still == 0:
                break
            if task.drop and 16 * still <= 15 * len(is_open):
                _collect(beams, ~is_open, options.num_return, results)
                stay = is_open.nonzero().squeeze(1)
                scorer.keep(stay)
                beams.keep(stay)
                is_open = is_open[stay]
    _collect(beams, torch.ones_like(is_open), options.num_return, results)
    return results


def _open(task: Task, options: SearchOptions) -> Beams:
    """Before the first step all beams of a source are one: the others' scores keep them out."""
    count, beams = task.prompts.shape[0], options.num_beams
    tokens = task.prompts.new_full((count, beams, task.width), task.pad)
    tokens[:, :, : task.prompts.shape[1]] = task.prompts[:, None]
    scores = torch.full((count, beams), NEVER, device=tokens.device)
    return Beams(
        rows=torch.arange(count, device=tokens.device),
        starts=task.prompt_lengths[:, None],
        ends=(task.prompt_lengths + task.limits)[:, None],
        tokens=tokens,
        scores=scores.index_fill(1, tokens.new_zeros(1), 0.0),
        done_tokens=tokens,
        done_scores=scores,
        done_lengths=tokens.new_zeros(count, beams),
        coverage=torch.zeros((), device=tokens.device) if options.coverage_penalty else None,
    )


def _complete(
    beams: Beams,
    step: int,
    scores: torch.Tensor,
    parents: torch.Tensor,
    ids: torch.Tensor,
    ending: torch.Tensor,
    scorer: Scorer,
    options: SearchOptions,
) -> None:
    """Lets the candidates that end here compete with the complete hypotheses. Only the first K candidates may: the
    others stand by so that K beams stay open."""
    beams_per_source = options.num_beams
    parents, ids, ending = (part[:, :beams_per_source] for part in (parents, ids, ending))
    ranked = scores[:, :beams_per_source] / length_divisor(step + 1 - beams.starts, options)
    if beams.coverage is not None:
        penalty = coverage_penalty(beams.coverage, scorer.source_mask, options.coverage_penalty)
        ranked = ranked + penalty.expand(beams.scores.shape).gather(1, parents)
    merged = torch.cat([beams.done_scores, ranked + ~ending * NEVER], dim=1)
    beams.done_scores, best = merged.topk(beams_per_source)
    places = parents[:, :, None].expand(-1, -1, beams.tokens.shape[2])
    candidates = beams.tokens.gather(1, places)
    candidates[:, :, step] = ids
    both = torch.cat([beams.done_tokens, candidates], dim=1)
    beams.done_tokens = both.gather(1, best[:, :, None].expand(-1, -1, both.shape[2]))
    lengths = torch.cat([beams.done_lengths, ending * (step + 1)], dim=1)
    beams.done_lengths = lengths.gather(1, best)


def _advance(
    beams: Beams, scorer: Scorer, step: int, scores: torch.Tensor, parents: torch.Tensor, ids: torch.Tensor
) -> None:
    """The best K candidates that do not end here become the beams."""
    count, width = beams.scores.shape[1], beams.tokens.shape[2]
    beams.scores, parents, ids = scores[:, :count], parents[:, :count], ids[:, :count]
    rows = (parents + torch.arange(0, parents.numel(), count, device=parents.device)[:, None]).view(-1)
    beams.tokens = beams.tokens.view(-1, width).index_select(0, rows).view(-1, count, width)
    beams.tokens[:, :, step] = ids
    if beams.coverage is not None:
        coverage = beams.coverage.expand(-1, count, -1)
        beams.coverage = coverage.gather(1, parents[:, :, None].expand(coverage.shape))
    scorer.follow(rows)


def _force(beams: Beams, task: Task, step: int) -> None:
    """Where the prompt goes on, it is what every beam says, and costs nothing."""
    given = step < beams.starts
    prompts = task.prompts.index_select(0, beams.rows)[:, step : step + 1]
    beams.tokens[:, :, step] = torch.where(given, prompts, beams.tokens[:, :, step])
    alone = torch.full_like(beams.scores, NEVER).index_fill(1, beams.rows.new_zeros(1), 0.0)
    beams.scores = torch.where(given, alone, beams.scores)


def _may_improve(beams: Beams, step: int, options: SearchOptions) -> torch.Tensor:
    """Which sources are not done, [B]; `SearchOptions.early_stopping` says when one is."""
    worst = beams.done_scores[:, -1]
    length = (step + 1 - beams.starts).clamp(min=1)  # less than 1 where the prompt goes on
    if options.early_stopping == "never" and options.length_penalty > 0:
        length = beams.ends - beams.starts
    best_open = beams.scores[:, :1] / length_divisor(length, options)
    open_ = (best_open.squeeze(1) > worst) & (beams.ends.squeeze(1) > step + 1)
    return open_ & (worst <= NEVER) if options.early_stopping is True else open_


def _collect(beams: Beams, done: torch.Tensor, count: int, results: list[list[Hypothesis]]) -> None:
    """Writes down the hypotheses of the sources that are done."""
    done = done.nonzero().squeeze(1)
    parts = (beams.rows, beams.starts.squeeze(1), beams.done_lengths, beams.done_scores, beams.done_tokens)
    for row, start, lengths, scores, tokens in zip(*(part[done].tolist() for part in parts), strict=True):
        for length, score, hypothesis in list(zip(lengths, scores, tokens, strict=True))[:count]:
            if length:
                results[row].append(Hypothesis(hypothesis[start:length], score))
