"""What the processes of a run do together, and how all of them end, or go on, when one cannot.

In an update the processes meet three times, and between two meetings each does work of its own that can fail:

1. how many target tokens the update has, who was told to stop, whose clock ran out, who could not read its batch;
2. who failed in its forward or backward pass;
3. the sum of the gradients.

Whatever fails between two meetings is caught, so every process comes to the next one and is told there: no process
waits for one that has left. If memory was short somewhere, the update is left out by all; any other fault ends all,
each with the same message. This needs a forward and a backward pass without meetings inside, so gradients travel after
the backward pass. DDP, which sends them during it, and FSDP2, which meets in every layer, cannot be left in the middle:
there the process that fails ends, and the others learn it from the connection, at once or after `timeout`.

A process that is killed or hangs cannot speak. Those that wait for it find out which it is by elimination: each that
gave up says so in the store through which the processes first met, and who stays silent is the one.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import distributed, nn

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training.stream import Update

if TYPE_CHECKING:
    import numpy as np

    from metaphrase.training.stream import Stream

SHOWN = 10
"""Pairs of a batch that a message names."""
PATIENCE = 5.0
"""Seconds in which processes that gave up find each other."""
PORTION = 1 << 25
"""Bytes of gradients that travel together."""
SHORT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
"""What torch says, by version and device."""


_KEPT: list[distributed.ProcessGroup] = []
"""Process groups that were ended: see `end`."""


@dataclass(frozen=True)
class Fault:
    """What one process could not do, in words that can be sent to the others."""

    process: int
    processes: int
    what: str
    batch: str
    """Which batch, in words."""
    memory: bool
    """Whether memory was short."""

    def __str__(self) -> str:
        return f"Process {self.process} of {self.processes} failed on {self.batch}: {self.what}"


class BatchFailed(MetaphraseError):
    """A batch that some process could not learn from. Under `votes`, all processes raise the same."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = list(faults)
        text = "; ".join(str(fault) for fault in faults) + "."
        if self.memory:
            text += " Lower batches.tokens, and raise batches.accumulation to match."
        super().__init__(text)

    @property
    def memory(self) -> bool:
        """Whether nothing but memory was short."""
        return all(fault.memory for fault in self.faults)


def votes(model: nn.Module) -> bool:
    """Whether gradients are added up after all processes said that theirs are there: neither DDP nor FSDP is used."""
    return not hasattr(model, "no_sync") and not hasattr(model, "set_requires_gradient_sync")


def share_counts(accelerator: Accelerator, *counts: float) -> torch.Tensor:
    """The first meeting: sums over all processes, float64 on the device."""
    sums = torch.tensor(counts, dtype=torch.float64, device=accelerator.device)
    if accelerator.num_processes > 1:
        distributed.all_reduce(sums)
    return sums


def agree(accelerator: Accelerator, fault: Fault | None) -> None:
    """The second meeting.

    Raises:
        BatchFailed: on every process, with all faults, if there is one anywhere.
    """
    faults = [] if fault is None else [fault]
    if accelerator.num_processes > 1 and float(share_counts(accelerator, len(faults))):
        faults = gather_object(faults)
    if faults:
        raise BatchFailed(faults)


@torch.no_grad()
def add_up(accelerator: Accelerator, model: nn.Module) -> None:
    """The third meeting: every gradient becomes the sum of all processes' ones, in a few large portions."""
    if accelerator.num_processes == 1:
        return
    portion: list[torch.Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            larger = _bytes([*portion, parameter.grad]) > PORTION
            if portion and (larger or portion[0].dtype != parameter.grad.dtype):
                _reduce(portion)
                portion = []
            portion.append(parameter.grad)
    if portion:
        _reduce(portion)


def _reduce(tensors: list[torch.Tensor]) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():  # a large one: no copy
        distributed.all_reduce(tensors[0])
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    distributed.all_reduce(flat)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def same_weights(model: nn.Module) -> None:
    """Give every process the first one's weights."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            distributed.broadcast(tensor, 0)


def fetched(accelerator: Accelerator, model: nn.Module, stream: Stream) -> Iterator[Update]:
    """The stream's updates. Where one cannot be read on one of several processes, an empty one that says why comes, so
    that this process meets the others and tells them."""
    try:
        yield from stream
    except Exception as error:
        if accelerator.num_processes == 1 or not votes(model):
            raise
        fault = Fault(accelerator.process_index, accelerator.num_processes, _said(error), "its next batch", False)
    yield Update([], 0, [], fault=fault)


def fault_of(error: Exception, accelerator: Accelerator, update: Update, number: int) -> Fault:
    """An error in one of the update's batches, in words."""
    rows, length = update.batches[number]["labels"].shape
    batch = f"a batch of {rows} pairs x {length} target tokens (training pairs {_listed(update.indices[number])})"
    what = _said(error)
    return Fault(accelerator.process_index, accelerator.num_processes, what, batch, is_out_of_memory(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, of torch on a CPU (a RuntimeError with these words), or of Python."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in said
        for words in ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
    )


def free_memory(accelerator: Accelerator) -> None:
    """Let go of what a failed batch left behind."""
    gc.collect()
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()


def is_connection(error: BaseException) -> bool:
    """Whether the error comes from the connection to the other processes."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))
    )


@contextlib.contextmanager
def naming(accelerator: Accelerator, doing: str, update: Update | None = None) -> Iterator[None]:
    """Inside, an error of the connection says which process failed, and one of memory what was being done.

    Args:
        doing: "reading the data", for the message of a process that runs out of memory.
        update: where the processes work on one: names the batches of the one that failed.

    Raises:
        MetaphraseError: in place of either.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        who = f"Process {accelerator.process_index} of {accelerator.num_processes}"
        if accelerator.num_processes > 1 and is_connection(error):
            silent = absent(accelerator)
            raise MetaphraseError(
                f"{who} stopped: {_blame(accelerator, silent, update)} ({_first_line(error)})."
            ) from error
        if is_out_of_memory(error):
            what = _first_line(error).rstrip(".")
            raise MetaphraseError(f"{who} ran out of memory {doing}: {what}. Lower batches.tokens.") from error
        raise


def absent(accelerator: Accelerator) -> list[int]:
    """Processes that do not say, within a few seconds, that they gave up too; none where that cannot be known."""
    others = [rank for rank in range(accelerator.num_processes) if rank != accelerator.process_index]
    if len(others) == 1:
        return others
    with contextlib.suppress(Exception):  # the store may have gone with the process that kept it
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"metaphrase/gave-up/{accelerator.process_index}", "1")
        ends = time.monotonic() + PATIENCE
        while others and time.monotonic() < ends:
            time.sleep(0.1)
            others = [rank for rank in others if not store.check([f"metaphrase/gave-up/{rank}"])]
        return others
    return []


def _blame(accelerator: Accelerator, silent: list[int], update: Update | None) -> str:
    if not silent:
        return "another process failed or did not answer, and its own message says why"
    who = "process " + " and process ".join(map(str, silent))
    batches = [
        f"training pairs {_listed(batch)}"
        for rank in silent
        for batch in (update.pairs[rank :: accelerator.num_processes] if update is not None else [])
    ]
    work = f", which had to learn from {'; '.join(batches)}," if batches else ""
    return f"{who}{work} failed or did not answer; its own message, if it left one, says why"


def _listed(indices: np.ndarray) -> str:
    return ", ".join(map(str, indices[:SHOWN])) + (f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else "")


def _said(error: Exception) -> str:
    known = isinstance(error, (RuntimeError, MemoryError, MetaphraseError))
    return ("" if known else f"{type(error).__name__}: ") + _first_line(error).rstrip(".")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def end(accelerator: Accelerator) -> None:
    """Trackers and connections are closed; what every process of a run calls last.

    Python keeps the process group. DDP's reducer would else hold it last and free it with Python's lock in hand, while
    the group's own thread may wait for that lock: the process then never ends.
    """
    if distributed.is_initialized():
        _KEPT.append(distributed.group.WORLD)
    accelerator.end_training()
