"""Compiles the kernels for the processor at hand, once: the library stays in the cache folder under a name that depends
on the sources, the compiler and the processor."""

from __future__ import annotations

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

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
LIBRARY = "kernels.so"
SECONDS = 300


@dataclass(frozen=True)
class Library:
    handle: ctypes.CDLL
    compiler: str


@functools.cache
def load() -> Library | None:
    """The kernels, compiled if they are not yet; None, with a word in the log, where that cannot be done."""
    compiler = find_compiler()
    if compiler is None:
        logger.info("There is no C++ compiler (%s, or CXX): training uses PyTorch's operations.", ", ".join(COMPILERS))
        return None
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS)
        name = version.stdout.partition("\n")[0]
        return Library(ctypes.CDLL(str(build(compiler, name))), name)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().partition("\n")[0]
        logger.warning("%s cannot make the kernels (%s): training uses PyTorch's operations.", compiler[0], said)
        return None


def find_compiler() -> list[str] | None:
    """CXX of the environment if it is set, which may be a command with options, else the first that is there."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        return wanted if shutil.which(wanted[0]) else None
    return next(([path] for name in COMPILERS if (path := shutil.which(name))), None)


def build(compiler: list[str], version: str) -> Path:
    """The library's path, after it was compiled where it was not there.

    Raises:
        OSError: nothing can be written.
        subprocess.SubprocessError: the compiler failed.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    options = (*OPTIONS, "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native")
    texts = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]*"))]
    folder = cache_folder() / f"kernels-{fingerprint(compiler, version, options, processor_features(), *texts)}"
    if not (folder / LIBRARY).is_file():
        with new_folder(folder) as fresh:
            print("Compiling kernels for this processor, once", file=sys.stderr, flush=True)  # some seconds
            command = [*compiler, *options, "-o", str(fresh / LIBRARY), *map(str, sources)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
    return folder / LIBRARY


def processor_features() -> str:
    """What tells one processor from another: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
