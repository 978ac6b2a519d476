"""Embeddings and positions: sections 3.4 and 3.5 of "Attention Is All You Need" (arXiv:1706.03762).

B batch · T positions
"""

import math

import torch
from torch import nn

from .configuration_metaphrase import MetaphraseConfig


def sinusoidal_positions(position_ids: torch.Tensor, d_model: int) -> torch.Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i+1) = cos(pos / 10000^(2i / d_model)), section 3.5.

    Sine and cosine alternate along the last axis. Nothing is stored: a formula cannot be lost in loading, cast to
    half precision, or come to an end.

    Args:
        position_ids: whole numbers from 0 on, any shape.
        d_model: size of the new last axis.

    Returns:
        float32, [..., d_model].
    """
    exponents = torch.arange(0, d_model, 2, device=position_ids.device, dtype=torch.float32) / d_model
    angles = position_ids.unsqueeze(-1).float() * torch.exp(exponents * -math.log(10000.0))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :d_model]


def count_positions(attention_mask: torch.Tensor | None, length: int, past: int, device: torch.device) -> torch.Tensor:
    """Positions of the last `length` tokens, counted over real tokens only, so that padding shifts nobody.

    Args:
        attention_mask: [B, past + length], 0 at padding; None, or a mask that is no row of tokens: no padding.
        length: tokens at hand.
        past: tokens that the cache holds.

    Returns:
        position ids, [B, length] or, without a mask, [1, length]. Padding on the left counts as 0.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return (torch.arange(length, device=device) + past).unsqueeze(0)
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


class SinusoidalPositions(nn.Module):
    """Section 3.5: computed positions of any length."""

    def __init__(self, config: MetaphraseConfig):
        super().__init__()
        self.d_model = config.d_model

    def forward(self, position_ids: torch.Tensor, end: int | torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, d_model]; `end` does not matter here."""
        return sinusoidal_positions(position_ids, self.d_model)


class LearnedPositions(nn.Embedding):
    """Table 3, row E: a learned vector for each of the first `max_position_embeddings` positions."""

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config.max_position_embeddings, config.d_model)

    def forward(self, position_ids: torch.Tensor, end: int | torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, d_model]. `end` is the number of positions seen so far, padding counted; a static cache
        gives it as a tensor, which compiled code cannot look into: `generate` ends where the table does.

        Raises:
            ValueError: if `end` is past the table's end.
        """
        hidden = isinstance(end, torch.Tensor) and torch.compiler.is_compiling()
        if not hidden and end > self.num_embeddings:
            raise ValueError(
                f"The input is {int(end)} tokens long, and this model's learned positions end at "
                f"max_position_embeddings {self.num_embeddings}; shorten it, or use sinusoidal positions."
            )
        return super().forward(position_ids)
