"""What a run on a CPU settles about it: how many threads, that memory which was freed is kept for the next step, and
compiled kernels."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from metaphrase.training import kernels

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's <malloc.h>."""
MAPPED_FROM, TRIMMED_FROM = 2**25, 2**29
"""Bytes: a tensor of more has a mapping of its own (older versions of glibc take no larger number); so much free memory
is kept before any goes back to the system."""


def settle(threads: int | None, processes: int, *, compiled: bool = True) -> None:
    """Prepare this process, one of so many on this machine, to train on the CPU, with compiled kernels or without."""
    set_threads(threads, processes)
    keep_freed_memory()
    if compiled:
        kernels.install()
    else:
        kernels.remove()


def set_threads(wanted: int | None, processes: int) -> None:
    """Share the cores out. OMP_NUM_THREADS rules for a single process; launchers set it to 1 on their own."""
    if wanted is None and processes == 1 and os.environ.get("OMP_NUM_THREADS"):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(wanted or max(1, cores // processes))


def keep_freed_memory() -> bool:
    """Let the C library keep what a step frees, so that the next need not ask the system for it page by page.

    Activations of some megabytes are made and freed at every step; by default glibc gives many of them back, and the
    next step takes thousands of page faults. Says whether it was done: on another C library, and where the
    environment says what `malloc` is to do, nothing is.
    """
    told = any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"))
    if told or not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    done = [library.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM), library.mallopt(M_TRIM_THRESHOLD, TRIMMED_FROM)]
    return all(done)
