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
from torch.autograd.function import once_differentiable

from .kernels import kernel

IGNORED = -100
CHUNK_ROWS_CPU = 256  # positions whose logits are held at a time: enough for full matrix speed, few enough for a cache
CHUNK_ROWS = 4096  # the same on an accelerator


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

    Raises:
        ValueError: the shapes do not fit each other.
    """
    if hidden_states.shape[:-1] != labels.shape or hidden_states.shape[-1] != weight.shape[-1]:
        shapes = [list(tensor.shape) for tensor in (hidden_states, labels, weight)]
        raise ValueError("Output {}, labels {}, projection {} do not fit: each position needs a label.".format(*shapes))
    total = _LinearCrossEntropy.apply(hidden_states.flatten(0, -2), weight, labels.flatten(), label_smoothing)
    return total / token_count(labels, num_items_in_batch)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of losses. The gradient is made in the forward pass, a chunk of positions at a time.

    With p = softmax(z) a row, d loss / d z = p - q, so that
        d loss / d h = p W - q W        d loss / d W = p^T h - q^T h
    where q W and q^T h need no product: q is one entry a row, and the same small share for every other entry.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, label_smoothing):
        compiled = kernel("loss", hidden, weight) if all(ctx.needs_input_grad[:2]) else None
        compute = compiled or loss_and_gradients
        total, grad_hidden, grad_weight = compute(hidden, weight, labels, label_smoothing, any(ctx.needs_input_grad))
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total):
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad_total.to(grad_hidden.dtype),
            grad_weight * grad_total.to(grad_weight.dtype),
            None,
            None,
        )


def loss_and_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, label_smoothing: float, wants_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The sum of losses, and where wanted its gradients with respect to `hidden` [N, d] and `weight` [V, d]."""
    grad_hidden = torch.empty_like(hidden) if wants_grad else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_grad else None
    share, rest = label_smoothing / weight.shape[0], 1 - label_smoothing  # q: of every entry, and the target's own
    weight_sum = weight.sum(0, dtype=torch.float32)
    total = hidden.new_zeros((), dtype=torch.float32)
    hidden_sum = hidden.new_zeros(hidden.shape[1], dtype=torch.float32)
    rows = CHUNK_ROWS_CPU if hidden.device.type == "cpu" else CHUNK_ROWS
    room = hidden.new_empty((min(rows, len(hidden)), len(weight)), dtype=torch.float32)
    for h, y, grad_h in zip(hidden.split(rows), labels.split(rows), _split(grad_hidden, hidden, rows), strict=True):
        counted = (y != IGNORED).unsqueeze(1)
        y = y.masked_fill(y == IGNORED, 0)  # any other label outside the vocabulary stays, and is an error
        logits = _product(h, weight.t(), room[: len(h)])
        at_target = logits.gather(1, y.unsqueeze(1))
        p, log_z = _softmax_in_place(logits, at_target, y, h, weight)
        loss = log_z - rest * at_target - share * (h.float() @ weight_sum).unsqueeze(1)
        total += loss.masked_fill(~counted, 0.0).sum()
        if not wants_grad:
            continue
        p = p.to(h.dtype)
        expected = (p @ weight).float()  # p W, and q W below
        grad_h.copy_((expected - share * weight_sum - rest * weight[y].float()) * counted)
        h = h.float() * counted
        _add_product(grad_weight, p.t(), h)
        grad_weight.index_add_(0, y, h, alpha=-rest)
        hidden_sum += h.sum(0)
    if wants_grad:
        grad_weight -= share * hidden_sum
        grad_weight = grad_weight.to(weight.dtype)
    return total, grad_hidden, grad_weight


def _split(tensor: torch.Tensor | None, like: torch.Tensor, rows: int) -> tuple:
    """Views of `tensor` a chunk at a time, or as many Nones as `like` has chunks."""
    return tensor.split(rows) if tensor is not None else (None,) * len(like.split(rows))


def _in_place(*tensors: torch.Tensor) -> bool:
    """Whether a product of these may be written in place: one type, and no autocast, which passes such products by."""
    kind = tensors[0].device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return len({tensor.dtype for tensor in tensors}) == 1 and not autocast


def _product(a: torch.Tensor, b: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """a b in float32, in `room` where it may be: memory that is in the cache takes it at up to twice the speed."""
    return torch.mm(a, b, out=room) if _in_place(a, b, room) else (a @ b).float()


def _add_product(to: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """to += a b, in place where it may be: on a CPU a temporary as large as `to` costs a third of the product."""
    if _in_place(to, a, b):
        to.addmm_(a, b)
    else:
        to += a @ b.to(a.dtype)


def _may_look(tensor: torch.Tensor) -> bool:
    """Whether values may decide what is done: an accelerator would have to stop for it, and a compiler has none."""
    return tensor.device.type == "cpu" and type(tensor) is torch.Tensor and not torch.compiler.is_compiling()


def _softmax_in_place(
    logits: torch.Tensor, at_target: torch.Tensor, y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """p = softmax(z), written over z, and log Z = log sum_v exp(z_v), [n, 1].

    log Z = z_v - log p_v for any v. Off the CPU v is the highest entry, whose p is 1 / Z of exp(z - highest). On a CPU
    it is the target, which saves two passes over [n, V]; rows whose target has a p too small to be written down, which
    one has to look at p to know, are multiplied again.
    """
    if not _may_look(logits):
        highest = logits.amax(-1, keepdim=True)
        p = torch.softmax(logits, -1, out=logits)
        return p, highest - p.amax(-1, keepdim=True).log()
    p = torch.softmax(logits, -1, out=logits)
    p_target = p.gather(1, y.unsqueeze(1))
    log_z = at_target - p_target.log()
    low = (p_target < 1e-30).squeeze(1).nonzero().squeeze(1)
    if len(low):
        log_z[low] = nn.functional.linear(h[low], weight).float().logsumexp(-1, keepdim=True)
    return p, log_z
