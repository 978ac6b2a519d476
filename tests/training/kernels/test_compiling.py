"""Compiled once, found again, done without where it cannot be; each way in a process of its own, with a fresh cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metaphrase.training.kernels import compiling

CHILD = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from metaphrase.modeling.kernels import KERNELS
from metaphrase.training import kernels
kernels.install()
print(sorted(KERNELS), kernels.compiler())
kernels.remove()
print(sorted(KERNELS), kernels.compiler())
"""


def child(cache: Path, **environment: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "METAPHRASE_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.splitlines(), done.stderr


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.usefixtures("library")
def test_they_are_compiled_once_for_this_compiler_and_processor(tmp_path):
    cache = tmp_path / "cache"
    first, log = child(cache)
    assert log.count("Compiling kernels for this processor, once") == 1
    assert first[0].startswith("['add_norm', 'attention', 'bits', 'linear', 'loss']")
    assert first[1] == "[] None"
    made = list(cache.rglob("*.so"))
    assert len(made) == 1
    before = made[0].stat().st_mtime_ns
    assert child(cache) == (first, "")
    assert list(cache.rglob("*.so")) == made
    assert made[0].stat().st_mtime_ns == before


def test_without_a_compiler_nothing_is_put_in_place(tmp_path):
    said, log = child(tmp_path / "cache", PATH=str(tmp_path), CXX="")
    assert said == ["[] None", "[] None"]
    assert "INFO There is no C++ compiler (g++, clang++, c++, or CXX): training uses PyTorch's operations." in log
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_fails_is_named_with_what_it_said(tmp_path):
    broken = script(
        tmp_path, "broken", '[ "$1" = --version ] && echo broken 1.0 && exit 0; echo "no such thing" >&2; exit 1'
    )
    said, log = child(tmp_path / "cache", CXX=broken)
    assert said == ["[] None", "[] None"]
    assert f"WARNING {broken} cannot make the kernels (no such thing): training uses PyTorch's operations." in log
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_library_that_cannot_be_loaded_is_a_word_in_the_log(tmp_path):
    empty = script(
        tmp_path,
        "empty",
        '[ "$1" = --version ] && echo empty 1.0 && exit 0; while [ "$1" != -o ]; do shift; done; : > "$2"',
    )
    said, log = child(tmp_path / "cache", CXX=empty)
    assert said == ["[] None", "[] None"]
    assert f"WARNING {empty} cannot make the kernels" in log


def test_a_cache_that_cannot_be_written_is_a_word_in_the_log(tmp_path):
    (tmp_path / "cache").write_text("a file")
    said, log = child(tmp_path / "cache")
    assert said == ["[] None", "[] None"]
    assert "training uses PyTorch's" in log


@pytest.mark.usefixtures("library")
def test_cxx_may_have_options(tmp_path):
    said, _ = child(tmp_path / "cache", CXX="no-such-compiler -O1")
    assert said == ["[] None", "[] None"]
    compiler = compiling.find_compiler()[0]
    said, _ = child(tmp_path / "cache", CXX=f"{compiler} -DMARK=1")
    assert said[0].startswith("['add_norm'")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("printf 'caf\\351' >&2; exit 1", "caf"),
        ("exit 0", "kernels.so"),
    ],
)
def test_odd_compilers_are_done_without(tmp_path, text, said):
    odd = script(tmp_path, "odd", text)
    found, log = child(tmp_path / "cache", CXX=odd)
    assert found == ["[] None", "[] None"]
    assert "cannot make the kernels" in log
    assert said in log


def test_a_command_that_cannot_be_read_is_done_without(tmp_path):
    found, log = child(tmp_path / "cache", CXX="g++ -DX='")
    assert found == ["[] None", "[] None"]
    assert "No closing quotation" in log


@pytest.mark.usefixtures("library")
def test_a_broken_library_in_the_cache_is_made_again(tmp_path):
    first, _ = child(tmp_path / "cache")
    (library,) = (tmp_path / "cache").rglob("*.so")
    library.write_bytes(b"not a library")
    found, log = child(tmp_path / "cache")
    assert found == first
    assert "Compiling kernels" in log
