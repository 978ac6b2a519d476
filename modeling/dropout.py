"""Dropout: section 5.4 of "Attention Is All You Need" (arXiv:1706.03762).

On a CPU most of dropout's time goes into drawing one random number an element. `dropout_from_bits` draws 64 random bits
at once and uses 16 of them an element, four times as fast; a probability is then rounded to a multiple of 2^-16.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import nn

from .kernels import kernel

BITS = 16
_THREAD = threading.local()


@contextlib.contextmanager
def random_from(generator: torch.Generator) -> Iterator[None]:
    """Let this thread's fast dropout draw from a generator of its own, so that threads do not race for torch's. Torch's
    own dropout, which compiled code takes, is not reached."""
    before = getattr(_THREAD, "generator", None)
    _THREAD.generator = generator
    try:
        yield
    finally:
        _THREAD.generator = before


def draw(shape: torch.Size) -> torch.Tensor:
    """Random int16 of that shape, each of -2^15 … 2^15 - 1 equally often, from torch's CPU generator or from that of
    `random_from`."""
    count, generator = shape.numel(), getattr(_THREAD, "generator", None)
    compiled = kernel("bits")
    if compiled is not None:
        return compiled(shape, generator)
    words = torch.empty(-(-count * BITS // 64), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count].view(shape)


def threshold_and_scale(p: float) -> tuple[int, float]:
    """The lowest draw that is kept, and what is kept is multiplied by: p is rounded to a multiple of 2^-16, and the
    scale is that of the rounded p."""
    dropped = min(round(p * 2**BITS), 2**BITS - 1)
    return dropped - 2 ** (BITS - 1), 2**BITS / (2**BITS - dropped)


def keep_scale(like: torch.Tensor, p: float) -> torch.Tensor:
    """A random tensor like `like`: 0 with chance p, else 1 / (1 - p), so that the mean is 1."""
    lowest, scale = threshold_and_scale(p)
    kept = torch.ge(draw(like.shape), lowest, out=torch.empty_like(like))  # 1 or 0, with no boolean between
    return kept.mul_(scale)


class _DropoutFromBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, p):
        scale = keep_scale(inputs, p)
        ctx.save_for_backward(scale)
        return inputs * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def dropout_from_bits(inputs: torch.Tensor, p: float) -> torch.Tensor:
    """`torch.nn.functional.dropout(inputs, p)` for CPU tensors: the fast path."""
    return _DropoutFromBits.apply(inputs, p)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, with the fast path where it is faster."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        fast = inputs.device.type == "cpu" and self.training and 0 < self.p < 1 and not torch.compiler.is_compiling()
        return dropout_from_bits(inputs, self.p) if fast else super().forward(inputs)
