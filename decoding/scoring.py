"""How a hypothesis is ranked: Wu et al. (2016), "Google's Neural Machine Translation System", equation 14.

    s(Y, X) = log P(Y | X) / lp(Y) + cp(X, Y)
    lp(Y) = (5 + |Y|)^alpha / (5 + 1)^alpha            or, as transformers counts,   lp(Y) = |Y|^alpha
    cp(X, Y) = beta · sum over source tokens i of  log min(sum over target tokens j of p_ij, 1)

|Y| counts the tokens that the search chose, `</s>` included; p_ij is the last decoder layer's attention, averaged over
its heads.
"""

from __future__ import annotations

import torch

from metaphrase.decoding.options import SearchOptions


def length_divisor(length: torch.Tensor | float, options: SearchOptions) -> torch.Tensor | float:
    """lp(Y) for outputs of so many tokens."""
    if options.length_norm == "gnmt":
        return ((5.0 + length) / 6.0) ** options.length_penalty
    return length**options.length_penalty


def coverage_penalty(attention: torch.Tensor, source_mask: torch.Tensor, beta: float) -> torch.Tensor:
    """cp(X, Y) of each beam.

    Args:
        attention: what each source token got in all, [B, K, S].
        source_mask: 1 at source tokens, 0 at padding, [B, S].
        beta: how much it weighs.

    Returns:
        [B, K], 0 or less.
    """
    seen = attention.clamp(min=torch.finfo(attention.dtype).tiny, max=1.0).log()
    return beta * (seen * source_mask[:, None, :]).sum(-1)
