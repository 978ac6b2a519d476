"""What an update makes smaller: the loss a target token, and with R-Drop the distance of two readings of a batch.

R-Drop (Liang et al. 2021, "R-Drop: Regularized Dropout for Neural Networks", equation 4), halved, so that without its
second part it is the plain loss:

    1/2 (L_1 + L_2) + weight/4 · (KL(P_1 ‖ P_2) + KL(P_2 ‖ P_1))

with L_i and P_i of the same batch under two dropout masks, summed over target tokens, over the tokens of the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Loss = Callable[[nn.Module, dict[str, torch.Tensor], torch.Tensor], torch.Tensor]


def make_loss(rdrop: float) -> Loss:
    """`loss(model, batch, tokens)`: this batch's part of the loss of an update of `tokens` target tokens, a scalar."""
    if not rdrop:
        return plain_loss

    def loss(model: nn.Module, batch: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return rdrop_loss(model, batch, tokens, rdrop)

    return loss


def plain_loss(model: nn.Module, batch: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The model's own loss, summed over its labels and divided by the tokens of the whole update."""
    return model(**batch, num_items_in_batch=tokens).loss


def rdrop_loss(model: nn.Module, batch: dict[str, torch.Tensor], tokens: torch.Tensor, weight: float) -> torch.Tensor:
    """Both readings in one pass: the batch stands in it twice, and each copy gets a dropout mask of its own."""
    twice: dict[str, Any] = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    output = model(**twice)  # without num_items_in_batch the loss is a mean over its own labels, and logits come along
    counted = batch["labels"] >= 0
    mean_loss = output.loss * counted.sum() / tokens.clamp(min=1)
    first, second = (half[counted].float().log_softmax(-1) for half in output.logits.chunk(2))
    there = nn.functional.kl_div(first, second, log_target=True, reduction="sum")
    back = nn.functional.kl_div(second, first, log_target=True, reduction="sum")
    return mean_loss + weight / 4 * (there + back) / tokens.clamp(min=1)
