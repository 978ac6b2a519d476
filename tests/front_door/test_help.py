"""Help and lazy imports: nothing heavy is paid for before it is used."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

import metaphrase

HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "evaluate")


def python(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], text=True, capture_output=True, timeout=timeout, check=True)


def test_import_is_light():
    loaded = python("-c", "import metaphrase, sys; print(*sys.modules)").stdout.split()
    assert "metaphrase" in loaded and not set(HEAVY) & set(loaded)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["translate", "--help"], ["score", "--help"]])
def test_help_is_light(words):
    script = f"import sys, metaphrase.cli as c; c.main({words}); print('LOADED', *sys.modules)"
    text, loaded = python("-c", script).stdout.split("LOADED")
    assert text.startswith("usage: metaphrase") and not set(HEAVY) & set(loaded.split())


def test_help_comes_within_half_a_second():
    """Counted in processor time, so that other work on the machine does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(3):
        python("-m", "metaphrase", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 3 <= 0.5


def test_every_option_has_its_help(run):
    code, text, _ = run("train", "--help")
    assert code == 0
    for option in ("--data.path", "--batches.tokens", "--optimizer.warmup", "--minutes", "--resume", "--output"):
        assert option in text
    assert "Largest size of a batch on one process" in " ".join(text.split())
    assert "None" not in text


def test_version(run):
    assert run("--version") == (0, f"metaphrase {metaphrase.__version__}\n", "")


def test_no_words_give_help(run):
    code, text, error = run()
    assert code == 0 and "g2p_cmudict" in text and error == ""


def test_public_names():
    assert set(metaphrase.__all__) <= set(dir(metaphrase))
    for name in metaphrase.__all__:
        assert getattr(metaphrase, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        metaphrase.trian  # noqa: B018


def test_lazy_names_match_the_type_checkers_view():
    """What a type checker imports and what `__getattr__` finds are the same names from the same places."""
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(metaphrase))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == metaphrase._HOMES and sorted(seen) == metaphrase.__all__
