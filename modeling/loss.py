"""The training loss: cross-entropy a target token, with label smoothing (section 5.4, arXiv:1706.03762).

N target positions · V vocabulary · d = d_model

For logits z, target y and smoothing e, with p = softmax(z):

    loss = - sum_v q_v log p_v,   q_v = e / V + (1 - e) [v = y]

The smoothing mass is spread over all V entries, the target included, as in `torch.nn.functional.cross_entropy`. A sum
over the target tokens is divided by their number in the whole update (`num_items_in_batch`), so that a gradient does
not depend on how a batch was cut. Positions labelled -100 count nothing; where nothing counts, the loss is 0.
"""

import torch
from torch import nn

IGNORED = -100
CHUNK_ELEMENTS = 2**20  # logits held at a time: 4 MiB in float32, about a core's share of the cache


def token_count(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
    """What the sum of losses is divided by: the update's target tokens where given, else these labels'; at least 1."""
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORED).sum()
    return torch.as_tensor(num_items_in_batch, device=labels.device).clamp(min=1)


def cross_entropy_per_token(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The loss from logits, as the formula has it.

    Args:
        logits: [..., V].
        labels: [...], -100 where nothing is to be learnt. Already aligned with the logits: nothing is shifted.
        label_smoothing: e.
        num_items_in_batch: target tokens of the whole update, over all its batches and processes.

    Returns:
        a scalar, float32.
    """
    total = nn.functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total / token_count(labels, num_items_in_batch)


def linear_cross_entropy_per_token(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """`cross_entropy_per_token(hidden_states @ weight.T, …)`, without ever holding the [N, V] logits: the fast path.

    Args:
        hidden_states: the decoder's output, [..., d].
        weight: the output projection, [V, d].
        labels, label_smoothing, num_items_in_batch: as in `cross_entropy_per_token`.
    """
    total = _LinearCrossEntropy.apply(hidden_states.flatten(0, -2), weight, labels.flatten(), label_smoothing)
    return total / token_count(labels, num_items_in_batch)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of losses. The gradient is made in the forward pass, a chunk of positions at a time:

    d loss / d z = p - q, so  d loss / d h = (p - q) W  and  d loss / d W = (p - q)^T h;  the smoothing part of q is the
    same for every entry of the vocabulary, and enters as a rank-one term.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, label_smoothing):
        counted = labels != IGNORED
        targets = labels.clamp(min=0)
        wants_grad = any(ctx.needs_input_grad[:2])
        grad_hidden = torch.zeros_like(hidden) if wants_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_grad else None
        weight_sum = weight.float().sum(0)
        total = hidden.new_zeros((), dtype=torch.float32)
        uniform = label_smoothing / weight.shape[0]
        step = max(1, CHUNK_ELEMENTS // weight.shape[0])
        for start in range(0, len(hidden), step):
            span = slice(start, start + step)
            h, y, keep = hidden[span], targets[span].unsqueeze(1), counted[span].unsqueeze(1)
            logits = nn.functional.linear(h, weight).float()
            log_z = logits.logsumexp(-1, keepdim=True)
            smooth = uniform * (h.float() @ weight_sum).unsqueeze(1)
            loss = log_z - (1 - label_smoothing) * logits.gather(1, y) - smooth
            total += loss.masked_fill(~keep, 0.0).sum()
            if not wants_grad:
                continue
            probabilities = logits.sub_(log_z.masked_fill(~keep, torch.inf)).exp_()
            probabilities.scatter_add_(1, y, (label_smoothing - 1) * keep.float())
            delta = probabilities.to(h.dtype)
            counted_h = h * keep
            grad_hidden[span] = delta @ weight - uniform * weight_sum.to(h.dtype) * keep
            grad_weight += delta.t() @ counted_h
            grad_weight -= uniform * counted_h.float().sum(0)
        if wants_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad_total):
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad_total.to(grad_hidden.dtype),
            grad_weight * grad_total.to(grad_weight.dtype),
            None,
            None,
        )
