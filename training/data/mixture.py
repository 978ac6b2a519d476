"""How often an epoch brings the pairs of each corpus, where there are several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from metaphrase.configuration.errors import MetaphraseError


def times_an_epoch(sizes: Sequence[int], weights: Sequence[float], temperature: float | None = None) -> list[float]:
    """How many times an epoch brings each pair of each corpus.

    With a temperature T, corpora of n_1, n_2, … pairs share the pairs of all in proportion to n_i^(1/T), so an epoch
    stays as long as it was; the weights multiply what comes of that.

    Raises:
        MetaphraseError: a weight is negative or all are zero, or the temperature is not above zero.
    """
    if min(weights) < 0 or max(weights) == 0:
        raise MetaphraseError(f"the weights of the corpora are {list(weights)}; they must be above zero")
    if temperature is None:
        return list(weights)
    if temperature <= 0:
        raise MetaphraseError(f"data.temperature is {temperature}; it must be above zero")
    shares = np.array(sizes, dtype=float) ** (1 / temperature)
    even = shares / shares.sum() * sum(sizes) / np.maximum(sizes, 1)
    return [float(number) for number in even * weights]


def draw_epoch(sizes: Sequence[int], times: Sequence[float], *, seed: int, epoch: int) -> np.ndarray | None:
    """The pairs of an epoch, int64 indices into the corpora put one after the other; None where it is each pair once.

    Each corpus is an endless row of shuffled copies of itself, of which every epoch takes the next times x size pairs:
    no pair comes again before all others of its corpus have come as often.
    """
    if all(number == 1 for number in times):
        return None
    chosen = []
    for corpus, (size, number) in enumerate(zip(sizes, times, strict=True)):
        begin, end = round(epoch * number * size), round((epoch + 1) * number * size)
        first = sum(sizes[:corpus])
        for copy in range(begin // max(size, 1), -(-end // max(size, 1))):
            shuffled = np.random.default_rng([seed, corpus, copy]).permutation(size)
            chosen.append(shuffled[max(begin - copy * size, 0) : end - copy * size] + first)
    return np.concatenate(chosen) if chosen else np.arange(0)
