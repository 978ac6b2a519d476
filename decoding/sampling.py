"""Samples that do not depend on what else is in the batch.

Each sample has its own stream of random numbers, seeded by the seed, by its source's tokens and by its number among
the source's samples. So a source gets the same samples alone, in any batch and in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList

from metaphrase.decoding.greedy import Choose
from metaphrase.decoding.scorers import Scorer


def uniform_streams(sources: Sequence[Sequence[int]], samples: int, length: int, seed: int | None) -> torch.Tensor:
    """Numbers from 0 up to 1, one a step, [B x samples, length] in float64.

    Args:
        sources: token ids of each source, without padding.
        samples: streams a source.
        length: steps.
        seed: None takes one from torch's own generator, so that `torch.manual_seed` rules.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    streams = torch.empty(len(sources) * samples, length, dtype=torch.float64)
    generator = torch.Generator()
    for row, stream in enumerate(streams):
        name = f"{seed} {row % samples} {list(sources[row // samples])}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "big", signed=True))
        stream.uniform_(generator=generator)
    return streams


def draw(streams: torch.Tensor, processors: LogitsProcessorList) -> Choose:
    """Chooses each row's next token by its stream: the first whose summed probability passes the number drawn."""

    def choose(scorer: Scorer, so_far: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = scorer.logits(so_far[:, -1:])
        sums = processors(so_far, logits).double().softmax(-1).cumsum(-1)
        drawn = streams[rows, so_far.shape[1], None].to(sums.device) * sums[:, -1:]
        return torch.searchsorted(sums, drawn, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)

    return choose
