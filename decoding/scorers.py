"""What a search asks of a model, or of several: how likely each next token is.

B sources · K beams of a source · N = B x K rows · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.step import DecoderState, decode_step, follow, keep, start
from metaphrase.decoding.weights import ModelWeights

Candidates = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The best continuations of each source, the best first: total log-probability, number of the beam that goes on, and
its next token, [B, count] each."""
ROWS = 64
"""Rows whose logits are held at a time: [64, V] stays in a processor's cache, [B x K, V] does not."""
BLOCK = 64
"""Tokens of the vocabulary that are looked at as one, at first, in the search for the best."""


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
        return self.weights.project(self.hidden(tokens)).float()

    def best(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes a step and gives each row's most likely token, [B, K] -> [N]."""
        return best_tokens(self.logits(tokens))

    def top(self, tokens: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates:
        """Takes a step and gives each source's `count` best continuations; [B, K] twice."""
        beams = tokens.shape[1]
        parts = []
        rows = max(1, ROWS // beams)
        for hidden, before in zip(self.hidden(tokens).split(rows * beams), scores.split(rows), strict=True):
            log_probs = self.weights.project(hidden).float().log_softmax(-1)
            parts.append(best_continuations(log_probs.view(-1, beams, log_probs.shape[1]), before, count))
        return parts[0] if len(parts) == 1 else tuple(torch.cat(part) for part in zip(*parts, strict=True))

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
        return best_tokens(self.logits(tokens))

    def top(self, tokens: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates:
        return best_continuations(self.logits(tokens).unflatten(0, tokens.shape), scores, count)

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


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """argmax over the vocabulary, [N, V] -> [N]: the best block, and then the best token in it.

    The maximum of a block is found with vector instructions, which torch's argmax on a CPU does without.
    """
    rows, size = scores.shape
    whole = size - size % BLOCK
    if rows * size < 2**16 or whole < 2 * BLOCK or scores.device.type != "cpu":
        return scores.argmax(-1)
    best = scores[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1).argmax(1, keepdim=True)
    tokens = best * BLOCK + torch.arange(BLOCK)
    if whole < size:
        tokens = torch.cat([tokens, torch.arange(whole, size).expand(rows, -1)], 1)
    return tokens.gather(1, scores.gather(1, tokens).argmax(1, keepdim=True)).squeeze(1)


def best_continuations(log_probs: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates:
    """The best of all continuations of a source's beams.

    They lie in the `count` blocks of tokens whose best one is best: only those are searched.

    Args:
        log_probs: of each next token, [B, K, V].
        scores: of the beams so far, [B, K].
        count: how many to give.
    """
    batch, beams, size = log_probs.shape
    blocks, whole = size // BLOCK, size - size % BLOCK
    if beams * blocks < 2 * count or log_probs.device.type != "cpu":
        totals, best = (log_probs + scores[:, :, None]).flatten(1).topk(count)
        return totals, best // size, best % size
    maxima = log_probs[..., :whole].unflatten(2, (blocks, BLOCK)).amax(-1) + scores[:, :, None]
    chosen = maxima.flatten(1).topk(count, sorted=False).indices
    parents = chosen // blocks
    first = chosen * BLOCK + parents * (size - whole)
    places = (first[:, :, None] + torch.arange(BLOCK)).flatten(1)
    totals = log_probs.flatten(1).gather(1, places).unflatten(1, (count, BLOCK))
    totals = (totals + scores.gather(1, parents)[:, :, None]).flatten(1)
    if whole < size:
        rest = torch.arange(beams)[:, None] * size + torch.arange(whole, size)
        places = torch.cat([places, rest.flatten().expand(batch, -1)], 1)
        totals = torch.cat([totals, (log_probs[..., whole:] + scores[:, :, None]).flatten(1)], 1)
    totals, best = totals.topk(count)
    best = places.gather(1, best)
    return totals, best // size, best % size
