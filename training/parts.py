"""A batch's gradient on several cores of one process: each of a few threads computes that of some of the pairs.

PyTorch by itself shares out each operation, and those of a small model are too short for that: two threads have 1.6
times the speed of one. Two halves of the batch, each with a forward and a backward pass in a thread of its own, have
1.9 times. The loss is a sum over target tokens, divided by their number in the whole update, so the parts' gradients
add up to the batch's. They are added in order: a run can be repeated bit for bit with as many threads.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from accelerate import Accelerator
from torch import nn

from metaphrase.modeling.dropout import random_from
from metaphrase.training import together
from metaphrase.training.data.batching import IGNORED
from metaphrase.training.objective import Loss

MOST = 4
"""Parts of a batch. Python itself runs in one thread at a time, so each further part gains less; threads beyond are
shared out inside the parts. A guess: two cores are all that it was measured on."""
LEAST = 256
"""Target positions of a part; below, two passes cost more than they gain."""


def backward(
    accelerator: Accelerator,
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    tokens: torch.Tensor,
    loss_of: Loss,
    factor: int = 1,
) -> torch.Tensor:
    """Add `factor` times a batch's gradient to the model's, in parts where that is exact; returns the loss, detached.

    Arguments are those of `add_gradient`; a factor other than 1 is for DDP and FSDP, under which nothing is cut.
    """
    number = number_of_parts(model, batch, accelerator.mixed_precision)
    if number > 1:
        return add_gradient(model, batch, tokens, loss_of, number)
    loss = loss_of(model, batch, tokens)
    accelerator.backward(loss * factor if factor > 1 else loss)
    return loss.detach()


def number_of_parts(model: nn.Module, batch: dict[str, torch.Tensor], mixed_precision: str = "no") -> int:
    """How many threads are to compute this batch's gradient; 1 where cutting it gains nothing or would not be exact.

    Attention's own dropout, compiled code and recomputed activations draw from the process's one random generator, in
    whatever order threads come to it. Autocast keeps one copy of a weight for all threads, whose gradients then add up
    in the order in which they came.
    """
    labels, config = batch["labels"], getattr(model, "config", None)
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if labels.device.type != "cpu" or mixed_precision != "no" or compiled or not together.votes(model):
        return 1
    if getattr(config, "attention_dropout", 1.0) or getattr(model, "is_activation_checkpointing", True):
        return 1
    return max(1, min(torch.get_num_threads(), MOST, len(labels), labels.numel() // LEAST))


def add_gradient(
    model: nn.Module, batch: dict[str, torch.Tensor], tokens: torch.Tensor, loss_of: Loss, parts: int
) -> torch.Tensor:
    """Add a batch's gradient to the model's, as `loss_of(model, batch, tokens).backward()` does; returns the loss.

    Each part has a gradient of its own until they are added up, so a step needs so many times the parameters' memory
    more. Hooks of parameters are called for each part; those "after accumulation" are not called.

    Args:
        batch: tensors of as many rows.
        tokens: target tokens of the whole update.
        parts: into how many the rows are cut, as evenly as can be; no more than there are rows, threads, or `MOST`.

    Raises:
        whatever a part raised, the first of them; then no gradient has changed.
    """
    threads = torch.get_num_threads()
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seed = int(torch.empty((), dtype=torch.int64).random_())

    def compute(number: int) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        torch.set_num_threads(threads // parts)
        rows = narrowed({name: tensor.tensor_split(parts)[number] for name, tensor in batch.items()})
        with random_from(torch.Generator().manual_seed((seed + number) % 2**63)):
            loss = loss_of(model, rows, tokens)
            return loss.detach(), torch.autograd.grad(loss, wanted, allow_unused=True)

    torch.set_num_threads(threads // parts)  # of the matrix library, where the number is the whole process's
    try:
        futures = [_workers().submit(compute, number) for number in range(parts)]
        wait(futures)
    finally:
        torch.set_num_threads(threads)
    results = [future.result() for future in futures]
    for parameter, *gradients in zip(wanted, *(gradients for _, gradients in results), strict=True):
        for gradient in gradients:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return torch.stack([loss.double() for loss, _ in results]).sum()


def narrowed(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These rows of a batch, [B, S] and [B, T], without the columns on the right that are padding in all of them."""
    widths = {
        **dict.fromkeys(("input_ids", "attention_mask"), _width(rows["attention_mask"] != 0)),
        "labels": _width(rows["labels"] != IGNORED),
    }
    return {name: tensor[:, : widths[name]] if name in widths else tensor for name, tensor in rows.items()}


def _width(counted: torch.Tensor) -> int:
    """Columns up to the last that counts in any row; at least 1."""
    columns = counted.any(0).nonzero()
    return int(columns[-1]) + 1 if len(columns) else 1


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """Threads that wait for work, made when there is some."""
    return ThreadPoolExecutor(MOST, "part")
