"""What a search asks of a model, or of several: how likely each next token is.

B sources · K beams of a source · N = B x K rows · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.step import DecoderState, decode_step, follow, keep, start
from metaphrase.decoding.weights import ModelWeights

ROWS = 64
"""Rows whose logits are held at a time: [64, V] stays in a processor's cache, [B x K, V] does not."""


class ModelScorer:
    """One model and one batch of sources."""

    def __init__(
        self, weights: ModelWeights, encoded: torch.Tensor, mask: torch.Tensor, beams: int, watch_source: bool = False
    ):
        """The encoder's output, [B, S, d_model], and the sources' mask, [B, S]."""
        self.weights = weights
        self.source_mask = mask
        self.state: DecoderState = start(weights, encoded, mask, beams, watch_source)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes a step: [B, K] -> [N, d_model]."""
        return decode_step(self.weights.decoder, self.state, tokens)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes a step and scores the whole vocabulary, [B, K] -> [N, V] in float32."""
        return (self.hidden(tokens) @ self.weights.vocabulary).float()

    def best(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes a step and gives each row's most likely token, [B, K] -> [N]."""
        return self.logits(tokens).argmax(-1)

    def top(self, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes a step and gives each row's `count` most likely tokens: log-probabilities and ids, [N, count] each."""
        parts = []
        for rows in self.hidden(tokens).split(ROWS):
            parts.append(top_log_probs((rows @ self.weights.vocabulary).float(), count))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def follow(self, parents: torch.Tensor) -> None:
        """Each row goes on from the row that `parents`, [N], names."""
        follow(self.state, parents)

    def keep(self, rows: torch.Tensor) -> None:
        """Drops all sources but `rows`."""
        keep(self.state, rows)
        self.source_mask = self.source_mask.index_select(0, rows)

    @property
    def attention(self) -> torch.Tensor:
        """The last step's attention over the source, [B, K, S]."""
        return self.state.attention


class EnsembleScorer:
    """Several models that share a vocabulary: log of the average of their probabilities."""

    def __init__(self, members: Sequence[ModelScorer]):
        self.members = members
        sizes = {member.weights.vocabulary.shape[1] for member in members}
        if len(sizes) > 1:
            raise MetaphraseError(
                f"models of an ensemble must share a vocabulary, and theirs have {sorted(sizes)} tokens"
            )

    @property
    def source_mask(self) -> torch.Tensor:
        return self.members[0].source_mask

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """log of 1/M · sum of P_m, [B, K] -> [N, V]."""
        each = torch.stack([member.logits(tokens).log_softmax(-1) for member in self.members])
        return each.logsumexp(0) - torch.log(torch.tensor(float(len(self.members))))

    def best(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(tokens).argmax(-1)

    def top(self, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return top_log_probs(self.logits(tokens), count)

    def follow(self, parents: torch.Tensor) -> None:
        for member in self.members:
            member.follow(parents)

    def keep(self, rows: torch.Tensor) -> None:
        for member in self.members:
            member.keep(rows)

    @property
    def attention(self) -> torch.Tensor:
        return torch.stack([member.attention for member in self.members]).mean(0)


Scorer = ModelScorer | EnsembleScorer


def top_log_probs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best log-probabilities and their tokens, [N, V] -> [N, count] twice. `logits` is used up.

    log_softmax is taken of the winners only: all that it needs of the others is the sum of their exponentials.
    """
    values, tokens = logits.topk(count, dim=-1)
    highest = values[:, :1]
    return values - highest - logits.sub_(highest).exp_().sum(-1, keepdim=True).log_(), tokens
