"""The endless sequence of updates that one process learns from, and the place in it.

The sequence of pairs depends on the seed and the token budget alone: the plan of an epoch is made for all processes
and dealt out, so a run goes on from a position with any number of processes. A running hash over the pairs seen tells
whether two runs learned the same things in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from metaphrase.training.data.batching import EpochPlan, collate, plan_epoch, share, updates_in

if TYPE_CHECKING:
    import torch

    from metaphrase.training.data.encoding import EncodedCorpus


@dataclass
class Position:
    """A place in the sequence, in pairs; JSON by `vars`."""

    epoch: int = 0
    tokens: int = 0
    """Token budget of the current plan."""
    legs: list[list[int]] = field(default_factory=list)
    """[tokens, pairs] of what this epoch learned under earlier budgets."""
    pairs: int = 0
    """Pairs of the current plan that were learned from."""
    seen: int = 0
    """Pairs learned from since the beginning, every epoch counted."""
    digest: str = ""
    """Hash over the indices of all pairs seen, in order."""


@dataclass
class Update:
    """One process's part of an update, ready for the model."""

    batches: list[dict[str, torch.Tensor]]
    """Micro-batches; a filling has labels that count for nothing."""
    tokens: int
    """Target tokens of these batches."""
    indices: list[np.ndarray]
    """Pair indices of each batch, to name them in an error."""


class Stream:
    """Iterates over updates for ever. `position` is that after the last update handed out."""

    def __init__(
        self,
        corpus: EncodedCorpus,
        *,
        tokens: int,
        seed: int,
        accumulation: int = 1,
        world_size: int = 1,
        rank: int = 0,
        pad: int = 0,
        position: Position | None = None,
    ) -> None:
        self.corpus, self.tokens, self.seed, self.pad = corpus, tokens, seed, pad
        self.shape = {"world_size": world_size, "accumulation": accumulation}
        self.rank = rank
        self.position = position or Position(tokens=tokens)
        if self.position.tokens != tokens:  # another budget: what is left of the epoch is planned anew
            if self.position.pairs:
                self.position.legs.append([self.position.tokens, self.position.pairs])
            self.position.tokens, self.position.pairs = tokens, 0
        self.plan = self._plan()

    def __iter__(self) -> Iterator[Update]:
        place = self.position
        while True:
            for dealt in share(self.plan, rank=self.rank, start=place.pairs, **self.shape):
                first, last = self.plan.batch_at(place.pairs), self.plan.batch_at(dealt.pairs_after)
                for batch in range(first, last):
                    place.digest = chain(place.digest, self.plan[batch])
                place.seen += dealt.pairs_after - place.pairs
                place.pairs = dealt.pairs_after
                batches = [
                    collate(self.corpus[batch.indices], pad=self.pad, real=batch.real) for batch in dealt.batches
                ]
                tokens = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
                yield Update(batches, tokens, [batch.indices for batch in dealt.batches])
            place.epoch, place.legs, place.pairs = place.epoch + 1, [], 0
            self.plan = self._plan()

    @property
    def epochs(self) -> float:
        """Passes over the pairs made so far."""
        before = sum(pairs for _, pairs in self.position.legs)
        return self.position.epoch + (before + self.position.pairs) / max(1, before + self.plan.pairs)

    @property
    def updates_an_epoch(self) -> int:
        """Updates of one whole pass, as the current plan has it."""
        before = sum(pairs for _, pairs in self.position.legs)
        updates = updates_in(self.plan, **self.shape)
        return max(1, round(updates * (before + self.plan.pairs) / max(1, self.plan.pairs)))

    def _plan(self) -> EpochPlan:
        return plan_epoch(
            self.corpus.source_lengths,
            self.corpus.target_lengths,
            tokens=self.tokens,
            seed=self.seed,
            epoch=self.position.epoch,
            legs=[tuple(leg) for leg in self.position.legs],
        )


def chain(digest: str, indices: np.ndarray) -> str:
    """The hash after one more batch: it depends on every index before, and on their order."""
    return hashlib.blake2b(bytes.fromhex(digest) + indices.astype("<i8").tobytes(), digest_size=16).hexdigest()
