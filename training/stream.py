"""The endless sequence of updates that one process learns from, and the place in it.

The sequence of pairs depends on the seed and the token budget alone: the plan of an epoch (or of a window, where the
corpus is streamed) is made for all processes and dealt out, so a run goes on from a position with any number of
processes. A running hash over the pairs seen tells whether two runs learned the same things in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training.data.batching import EpochPlan, collate, plan_epoch, share, updates_in

if TYPE_CHECKING:
    import torch

    from metaphrase.training.material import Material
    from metaphrase.training.together import Fault


@dataclass
class Position:
    """A place in the sequence, in pairs; JSON by `vars`."""

    epoch: int = 0
    window: int = 0
    tokens: int = 0
    """Token budget of the current plan."""
    legs: list[list[int]] = field(default_factory=list)
    """[tokens, pairs] of what this window taught under earlier budgets."""
    pairs: int = 0
    """Pairs of the current plan that were learned from."""
    epoch_pairs: int = 0
    """Pairs of this epoch in earlier windows."""
    pass_pairs: int = 0
    """Pairs of a whole pass; 0 until one was made, where the corpus is streamed."""
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
    pairs: list[np.ndarray] = field(default_factory=list)
    """Pair indices of all processes' batches, fillings left out: process r has every `processes`-th of them."""
    fault: Fault | None = None
    """Why there are no batches, where they could not be read."""


class Stream:
    """Iterates over updates for ever. `position` is that after the last update handed out."""

    def __init__(
        self,
        material: Material,
        *,
        tokens: int,
        seed: int,
        accumulation: int = 1,
        world_size: int = 1,
        rank: int = 0,
        position: Position | None = None,
    ) -> None:
        self.material, self.tokens, self.seed = material, tokens, seed
        self.shape = {"world_size": world_size, "accumulation": accumulation}
        self.rank = rank
        self.position = position or Position(tokens=tokens)
        if self.position.tokens != tokens:  # another budget: what is left of the window is planned anew
            if self.position.pairs:
                self.position.legs.append([self.position.tokens, self.position.pairs])
            self.position.tokens, self.position.pairs = tokens, 0
        self._next: Any = None
        self._enter(material.windows(self.position.epoch, self.position.window))

    def __iter__(self) -> Iterator[Update]:
        place, pad = self.position, self.material.tokenizer.pad_token_id
        while True:
            for dealt in share(self.plan, rank=self.rank, start=place.pairs, **self.shape):
                first, end = self.plan.batch_at(place.pairs), self.plan.batch_at(dealt.pairs_after)
                pairs = [self.plan[batch] for batch in range(first, end)]
                for batch in pairs:
                    place.digest = chain(place.digest, batch)
                place.seen += dealt.pairs_after - place.pairs
                place.pairs = dealt.pairs_after
                batches = [collate(self.window[batch.indices], pad=pad, real=batch.real) for batch in dealt.batches]
                tokens = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
                yield Update(batches, tokens, [batch.indices for batch in dealt.batches], pairs)
            following = self._peek()
            if following is None:
                place.pass_pairs = place.epoch_pairs + self._window_pairs
                place.epoch, place.window, place.epoch_pairs = place.epoch + 1, 0, 0
                following = self.material.windows(place.epoch, 0)
            else:
                place.window, place.epoch_pairs = place.window + 1, place.epoch_pairs + self._window_pairs
            place.legs, place.pairs = [], 0
            self._enter(following)

    @property
    def epochs(self) -> float:
        """Passes over the pairs made so far; whole ones only during the first pass over a streamed corpus."""
        place = self.position
        if place.pairs == self.plan.pairs and self._peek() is None:
            return place.epoch + 1.0
        done = place.epoch_pairs + self._window_pairs - self.plan.pairs + place.pairs
        return place.epoch + (done / place.pass_pairs if place.pass_pairs > done else 0.0)

    def ends_a_pass(self) -> bool:
        """Whether the update handed out last was the last one of an epoch."""
        return self.position.pairs == self.plan.pairs and self._peek() is None

    @property
    def updates_a_window(self) -> int:
        """Updates that what is left of the current plan began with."""
        return updates_in(self.plan, **self.shape)

    def _peek(self) -> Any:
        """The next window of this epoch, or None."""
        if self._next is None:
            self._next = (self.material.windows(self.position.epoch, self.position.window + 1),)
        return self._next[0]

    def _enter(self, window: Any) -> None:
        place = self.position
        self.window, self._next = window, None
        draw = self.material.draw(seed=self.seed, epoch=place.epoch)
        self.plan: EpochPlan = plan_epoch(
            window.source_lengths,
            window.target_lengths,
            tokens=self.tokens,
            seed=self.seed,
            epoch=getattr(window, "key", place.epoch),
            legs=[tuple(leg) for leg in place.legs],
            draw=draw,
        )
        try:
            self.plan.batch_at(place.pairs)
        except ValueError:
            raise MetaphraseError(
                f"The training pairs are not those that the run learned from before: no batch ends after {place.pairs} "
                "of them; put the data back as they were, or choose another --output."
            ) from None
        self._window_pairs = self.plan.pairs + sum(pairs for _, pairs in place.legs)
        if self.material.pairs is not None:
            place.pass_pairs = self._window_pairs


def chain(digest: str, indices: np.ndarray) -> str:
    """The hash after one more batch: it depends on every index before, and on their order."""
    return hashlib.blake2b(bytes.fromhex(digest) + indices.astype("<i8").tobytes(), digest_size=16).hexdigest()
