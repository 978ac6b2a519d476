"""Compiles the kernels for the processor at hand, once: the library stays in the cache folder under a name that depends
on the sources, the compiler and the processor."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from metaphrase.training.data.cache import cache_folder, fingerprint, new_folder
from metaphrase.training.kernels.functions import bind

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
LIBRARY = "kernels.so"
SECONDS_TO_ANSWER, SECONDS_TO_COMPILE = 20, 300


@dataclass(frozen=True)
class Library:
    handle: ctypes.CDLL
    compiler: str


@functools.cache
def load() -> Library | None:
    """The kernels, compiled if they are not yet; None, with a word in the log, where that cannot be done."""
    compiler = [os.environ.get("CXX", "")]
    try:
        compiler = find_compiler()
        if compiler is None:
            names = ", ".join(COMPILERS)
            logger.info("There is no C++ compiler (%s, or CXX): training uses PyTorch's operations.", names)
            return None
        name = _output([*compiler, "--version"], SECONDS_TO_ANSWER).partition("\n")[0]
        return Library(build(compiler, name), name)
    except (OSError, subprocess.SubprocessError, ValueError, RuntimeError, AttributeError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().partition("\n")[0]
        logger.warning("%s cannot make the kernels (%s): training uses PyTorch's operations.", compiler[0], said)
        return None


def _output(command: list[str], seconds: int) -> str:
    """What a command prints.

    Raises:
        OSError: it cannot be started.
        subprocess.SubprocessError: it failed, or took longer.
    """
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=seconds)
    return done.stdout


def find_compiler() -> list[str] | None:
    """CXX of the environment if it is set, which may be a command with options, else the first that is there."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        return wanted if shutil.which(wanted[0]) else None
    return next(([path] for name in COMPILERS if (path := shutil.which(name))), None)


def build(compiler: list[str], version: str) -> ctypes.CDLL:
    """The library, after it was compiled where it was not there or is broken.

    Raises:
        OSError: nothing can be written, or loaded.
        AttributeError: a function is not in it.
        subprocess.SubprocessError: the compiler failed.
    """
    options = (*OPTIONS, "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native")
    texts = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]*"))]
    folder = cache_folder() / f"kernels-{fingerprint(compiler, version, options, processor_features(), *texts)}"
    with contextlib.suppress(OSError, AttributeError):
        return bind(ctypes.CDLL(str(folder / LIBRARY)))
    shutil.rmtree(folder, ignore_errors=True)
    with new_folder(folder) as fresh:
        print("Compiling kernels for this processor, once", file=sys.stderr, flush=True)  # some seconds
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        _output([*compiler, *options, "-o", str(fresh / LIBRARY), *sources], SECONDS_TO_COMPILE)
        library = bind(ctypes.CDLL(str(fresh / LIBRARY)))
    return library


def processor_features() -> str:
    """What tells one processor from another: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
