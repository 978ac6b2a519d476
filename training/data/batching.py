"""Batches of so many tokens, sorted on both lengths, in an order that depends on seed and epoch only.

An epoch is planned at once, for all processes: `plan_epoch` gives micro-batches, `share` deals them out. A batch costs
rows x longest side, padding counted, and never costs more than the token budget. Pairs of near-equal lengths come
together; which of them meet, and in which order batches come, is drawn anew each epoch.

A position in an epoch is stored in pairs, as legs: `[(tokens, pairs), …]` says that under a budget of `tokens` so many
pairs were learned from, then under the next budget so many more. The number of processes and the accumulation do not
change the order of batches, so they are no part of it.

Needs numpy; `collate` alone needs torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from metaphrase.configuration.errors import MetaphraseError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Legs = Sequence[tuple[int, int]]
Pair = tuple[Any, Any]

IGNORED = -100
"""Label that the loss does not count."""

NOISE_BITS, TARGET_SHIFT = 16, 40
"""Where the parts of a sorting key lie: noise below, source length from bit 16, target length from bit 40."""


@dataclass(frozen=True)
class EpochPlan(Sequence):
    """The micro-batches of one epoch, each an array of pair indices.

    `order` [pairs] holds the indices, `starts` [batches + 1] where each batch begins in it. `too_long` are the pairs
    that no budget of this size can hold; they are in no batch.
    """

    order: np.ndarray
    starts: np.ndarray
    too_long: np.ndarray
    legs: tuple[tuple[int, int], ...] = ()
    """How the epoch went before this plan begins."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, batch: int) -> np.ndarray:
        if not 0 <= batch < len(self):
            raise IndexError(batch)
        return self.order[self.starts[batch] : self.starts[batch + 1]]

    @property
    def pairs(self) -> int:
        """Pairs in all batches."""
        return len(self.order)

    def batch_at(self, pairs: int) -> int:
        """The batch that begins after so many pairs of this plan.

        Raises:
            ValueError: no batch begins there.
        """
        batch = int(np.searchsorted(self.starts, pairs))
        if batch > len(self) or self.starts[batch] != pairs:
            raise ValueError(f"no batch begins after {pairs} pairs")
        return batch


def plan_epoch(
    source_lengths: np.ndarray | Sequence[int],
    target_lengths: np.ndarray | Sequence[int],
    *,
    tokens: int,
    seed: int,
    epoch: int,
    legs: Legs = (),
    draw: np.ndarray | None = None,
) -> EpochPlan:
    """Plans an epoch, or what is left of it after `legs`.

    Args:
        source_lengths, target_lengths: of each pair, in tokens, `</s>` counted; any length of 1 or more.
        tokens: the most that a batch may cost: rows x longest side.
        seed, epoch: choose the order.
        legs: what of this epoch was learned from already, and under which budgets.
        draw: the pairs of this epoch (`draw_epoch` of mixture.py); None: each once.

    Raises:
        MetaphraseError: no pair fits the budget.
    """
    lengths = np.asarray(source_lengths, dtype=np.int32), np.asarray(target_lengths, dtype=np.int32)
    pool = np.arange(len(lengths[0]), dtype=np.int32) if draw is None else np.asarray(draw, dtype=np.int32)
    budgets = [*legs, (tokens, 0)]
    for leg, (budget, done) in enumerate(budgets[:-1]):
        before = _plan(lengths, pool, budget, [seed, epoch, leg])
        pool = np.concatenate([before.order[done:], before.too_long])
    plan = _plan(lengths, pool, tokens, [seed, epoch, len(legs)])
    _tell_too_long(plan, lengths, tokens)
    return EpochPlan(plan.order, plan.starts, plan.too_long, tuple(map(tuple, legs)))


def _plan(lengths: tuple[np.ndarray, np.ndarray], pool: np.ndarray, tokens: int, key: list[int]) -> EpochPlan:
    random = np.random.default_rng(key)
    fits = np.maximum(lengths[0][pool], lengths[1][pool]) <= tokens
    too_long, pool = pool[~fits], pool[fits]
    pool = pool[_sorted_by_length(lengths[0][pool], lengths[1][pool], random)]
    widths = np.maximum(lengths[0][pool], lengths[1][pool])
    starts = _cut(widths, tokens)
    order = random.permutation(len(starts) - 1)
    sizes = np.diff(starts)[order]
    shuffled = np.concatenate([[0], np.cumsum(sizes)])
    where = np.repeat(starts[:-1][order] - shuffled[:-1], sizes) + np.arange(len(pool))
    return EpochPlan(pool[where], shuffled, too_long)


def _sorted_by_length(source: np.ndarray, target: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Order by target length, within one by source length with noise; up and down in turn, so that neighbours meet."""
    key = source.astype(np.int64)  # one number a pair, target length above source length above noise of up to a token
    key <<= NOISE_BITS
    key += random.integers(0, 1 << NOISE_BITS, len(key), dtype=np.uint16)
    key[target % 2 == 1] ^= (1 << TARGET_SHIFT) - 1
    key += target.astype(np.int64) << TARGET_SHIFT
    return np.argsort(key)


def _cut(widths: np.ndarray, tokens: int) -> np.ndarray:
    """Where batches begin in a sorted row of widths: each takes pairs as long as rows x widest stays in the budget."""
    starts = [0]
    while (start := starts[-1]) < len(widths):
        most = tokens // int(widths[start])
        widest = np.maximum.accumulate(widths[start : start + most])
        too_much = widest * np.arange(1, len(widest) + 1) > tokens
        rows = int(too_much.argmax()) if too_much.any() else len(widest)
        starts.append(start + rows)
    return np.array(starts)


def _tell_too_long(plan: EpochPlan, lengths: tuple[np.ndarray, np.ndarray], tokens: int) -> None:
    if not len(plan.too_long):
        return
    index = int(plan.too_long[0])
    length = int(max(lengths[0][index], lengths[1][index]))
    if not plan.pairs and not plan.legs:
        raise MetaphraseError(
            f"no pair fits into batches.tokens {tokens}: pair {index}, for one, has {length} tokens on its longer side"
        )
    logger.warning(
        "%d pairs are longer than batches.tokens %d and are left out, the first of them pair %d with %d tokens",
        len(plan.too_long), tokens, index, length,
    )  # fmt: skip


@dataclass(frozen=True)
class MicroBatch:
    """What one process learns from in one forward pass. `real` is False for a filling: its labels count for nothing."""

    indices: np.ndarray
    real: bool = True


@dataclass(frozen=True)
class Update:
    """One process' part of an update. `pairs_after` counts the pairs of the plan used, on all processes, up to here."""

    batches: list[MicroBatch]
    pairs_after: int


def share(
    plan: EpochPlan, *, world_size: int = 1, rank: int = 0, accumulation: int = 1, start: int = 0
) -> Iterator[Update]:
    """Deals the batches of a plan out to one process.

    An update takes the next world_size x accumulation batches of the plan; this process takes every world_size-th of
    them, from `rank` on. The last update is filled up with copies of a real batch that count for nothing, so every
    process gets the same number of batches in it.

    Args:
        start: pairs of this plan already used (`pairs_after` of the last update done).
    """
    size = world_size * accumulation
    first = plan.batch_at(start)
    for begin in range(first, len(plan), size):
        end = min(begin + size, len(plan))
        batches = [
            MicroBatch(plan[item], True) if item < end else MicroBatch(plan[begin], False)
            for item in range(begin + rank, begin + size, world_size)
        ]
        yield Update(batches, int(plan.starts[end]))


def updates_in(plan: EpochPlan, *, world_size: int = 1, accumulation: int = 1) -> int:
    """Updates of one pass over the plan."""
    return -(-len(plan) // (world_size * accumulation))


def collate(pairs: Sequence[Pair], *, pad: int = 0, real: bool = True) -> dict[str, torch.Tensor]:
    """Pads pairs on the right.

    Args:
        pairs: (source ids, target ids), both with `</s>`.
        pad: id of `<pad>`.
        real: False makes every label one that the loss does not count.

    Returns:
        input_ids, attention_mask [rows, longest source] and labels [rows, longest target], torch.long.
    """
    import torch

    def padded(side: int, fill: int) -> np.ndarray:
        longest = max(len(pair[side]) for pair in pairs)
        array = np.full((len(pairs), longest), fill, dtype=np.int64)
        for row, pair in enumerate(pairs):
            array[row, : len(pair[side])] = pair[side]
        return array

    sources, labels = padded(0, pad), padded(1, IGNORED)
    lengths = np.array([len(source) for source, _ in pairs])
    mask = (np.arange(sources.shape[1]) < lengths[:, None]).astype(np.int64)
    if not real:
        labels[:] = IGNORED
    arrays = {"input_ids": sources, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def fill(lengths: np.ndarray, plan: EpochPlan) -> float:
    """Part of the padded positions of one side that hold a token: 1.0 where no batch has padding."""
    widest = np.maximum.reduceat(lengths[plan.order], plan.starts[:-1]).astype(np.int64)
    return float(lengths[plan.order].sum() / (widest * np.diff(plan.starts)).sum())
