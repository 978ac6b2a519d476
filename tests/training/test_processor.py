"""Threads, and memory that is kept from step to step. The allocator's settings are a process's own, hence children."""

import os
import subprocess
import sys

import pytest

from metaphrase.training import processor

CHILD = """
import resource
import torch
from metaphrase.training.processor import keep_freed_memory

torch.set_num_threads(1)
done = keep_freed_memory() if {kept} else None

def step():
    held = [torch.ones(1_000_000) for _ in range(12)]  # 4 MB each, as activations are
    return sum(tensor[0] for tensor in held)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")


def child(kept: bool, **environment) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(kept=kept)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said, faults = done.stdout.split()
    return said, int(faults)


@glibc
def test_freed_memory_is_kept_for_the_next_step():
    (_, without), (said, with_it) = child(False), child(True)
    assert said == "True"
    assert without > 10_000  # most of the 120,000 pages of ten steps, each time
    assert with_it < without / 20


@glibc
@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"])
def test_what_the_environment_says_of_malloc_stands(name):
    assert child(True, **{name: "131072"})[0] == "False"


def test_threads(monkeypatch):
    set_to = []
    monkeypatch.setattr(processor.torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    processor.set_threads(None, 1)
    assert set_to == []  # the user's own word
    processor.set_threads(3, 1)
    processor.set_threads(None, 4)
    processor.set_threads(None, 9)
    monkeypatch.delenv("OMP_NUM_THREADS")
    processor.set_threads(None, 1)
    assert set_to == [3, 1, 1, 6]
