"""`batches.tokens: auto`: the largest batch that memory holds.

Two made-up batches are learned from. Their peaks of memory give the cost of a token; the budget is what then fills
nine tenths of the memory that is free, and one batch of that size is tried before it is believed.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training import parts
from metaphrase.training.objective import Loss
from metaphrase.training.together import is_out_of_memory

SMALL, LARGE = 1024, 4096
SHARE = 0.9
CPU_MOST = 16_384
"""On a CPU larger batches cost time and gain nothing; there memory is rarely what limits them."""


def largest_batch(model: nn.Module, loss: Loss, accelerator: Accelerator, *, longest: int, vocabulary: int) -> int:
    """Target of `batches.tokens`, the same on every process: a multiple of 256.

    Args:
        model: without DDP around it, for each process looks alone; its gradients are cleared.
        loss: what is computed for a batch.
        longest: tokens of the longest side of a pair.
        vocabulary: ids from 0 to this are tried.

    Raises:
        MetaphraseError: not even a small batch fits.
    """

    def attempt(tokens: int) -> int:
        rows, length = max(1, tokens // longest), min(tokens, longest)
        ids = torch.randint(4, max(5, vocabulary), (rows, length), device=accelerator.device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        count = torch.tensor(float(ids.numel()))
        return peak_of(lambda: parts.backward(accelerator, model, batch, count, loss), accelerator)

    model.train()
    try:
        small, large = attempt(SMALL), attempt(LARGE)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MetaphraseError(f"A batch of {LARGE} tokens does not fit in memory; lower batches.tokens.") from error
    finally:
        model.zero_grad(set_to_none=True)
    a_token = max(1.0, (large - small) / (LARGE - SMALL))
    tokens = int(LARGE + SHARE * free_memory(accelerator) / a_token)
    if accelerator.device.type == "cpu":
        tokens = min(tokens, CPU_MOST)
    elif not hasattr(model, "set_requires_gradient_sync"):  # pieces of a spread model cannot fail one by one
        tokens = confirmed(attempt, tokens, model)
    tokens = max(SMALL, tokens // 256 * 256)
    if accelerator.num_processes > 1:
        least = torch.tensor(tokens, device=accelerator.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        tokens = int(least)
    return tokens


def confirmed(attempt: Callable[[int], int], tokens: int, model: nn.Module) -> int:
    """The number itself if a batch of it fits, else four fifths of it, and so on."""
    while tokens > LARGE:
        try:
            attempt(tokens)
        except torch.OutOfMemoryError:
            tokens = tokens * 4 // 5
        else:
            break
        finally:
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    return tokens


def peak_of(action: Callable[[], None], accelerator: Accelerator) -> int:
    """Bytes in use at most while the action ran. On a CPU this is the process's highest mark, which never falls."""
    if accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        action()
        torch.cuda.synchronize()
    else:
        action()
    return most_memory(accelerator.device)


def most_memory(device: torch.device) -> int:
    """Bytes that this process held at most: resident memory on a CPU, allocated memory on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return mark if sys.platform == "darwin" else mark * 1024


def free_memory(accelerator: Accelerator) -> int:
    """Bytes that could still be had; on a CPU this process's share."""
    if accelerator.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    import psutil

    return psutil.virtual_memory().available // accelerator.num_processes
