"""The kernels, compiled once for all tests, and used by those that ask for them."""

from __future__ import annotations

import pytest
import torch

from metaphrase.modeling import kernels as places
from metaphrase.training import kernels
from metaphrase.training.kernels import compiling
from metaphrase.training.kernels.functions import Kernels


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    kernels.remove()


@pytest.fixture(scope="session")
def library() -> compiling.Library:
    found = compiling.load()
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


@pytest.fixture(scope="session")
def compiled(library) -> Kernels:
    return Kernels(library.handle)


@pytest.fixture
def counted(compiled, monkeypatch) -> dict[str, int]:
    """All kernels in their places, and how often each is called."""
    calls = dict.fromkeys(kernels.NAMES, 0)

    def counting(name):
        def call(*arguments, **named):
            calls[name] += 1
            return getattr(compiled, name)(*arguments, **named)

        return call

    for name in kernels.NAMES:
        monkeypatch.setitem(places.KERNELS, name, counting(name))
    return calls
