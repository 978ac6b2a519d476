"""Compiled code for training on a CPU: in the place of the loss, of short sentences' attention, of LayerNorm
after dropout, of linear layers, of dropout's random bits.

`install()` puts it into `metaphrase.modeling.kernels`. `*.cpp` is the code, compiled on the machine at hand when it is
first needed (`compiling.py`); `functions.py` makes differentiable functions of it.
"""

from __future__ import annotations

from metaphrase.modeling.kernels import KERNELS
from metaphrase.training.kernels.compiling import load
from metaphrase.training.kernels.functions import Kernels

NAMES = ("loss", "attention", "add_norm", "linear", "bits")


def install() -> None:
    """Let training passes in this process use the kernels, where there is a compiler for them."""
    library = load()
    if library is not None:
        kernels = Kernels(library.handle)
        KERNELS.update({name: getattr(kernels, name) for name in NAMES})


def remove() -> None:
    """Go back to PyTorch's operations."""
    KERNELS.clear()


def compiler() -> str | None:
    """The compiler of the kernels in use; None where PyTorch's operations do all."""
    library = load() if KERNELS else None
    return library.compiler if library is not None else None
