"""`metaphrase doctor`: tables, exit codes, the cleaned copy."""

from __future__ import annotations

import json

import pytest

from metaphrase.training.gradients import GradientCheck

from .conftest import write_corpus


def test_clean_data_gives_a_table_and_0(run, recipe, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for split, first in (("train", 100), ("validation", 200), ("test", 300)):
        (corpus / f"{split}.words").write_text("".join(f"number {n} in words\n" for n in range(first, first + 40)))
        (corpus / f"{split}.digits").write_text("".join(f"digits of {n} here\n" for n in range(first, first + 40)))
    code, text, error = run("doctor", "data", recipe, "--data", corpus, "--json", tmp_path / "found.json")
    assert code == 0 and error == "" and text.startswith("train: 40 pairs  validation: 40 pairs  test: 40 pairs\n")
    assert json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["severity"] == "note"


def test_leaks_are_an_error_and_fix_writes_a_copy_without_them(run, tmp_path):
    corpus, fixed = write_corpus(tmp_path / "corpus", train=50, test=5), tmp_path / "fixed"
    for side in ("words", "digits"):
        (corpus / f"test.{side}").write_bytes((corpus / f"train.{side}").read_bytes())
    words = ["--data", corpus, "--data.source", "words", "--data.target", "digits"]
    code, text, _ = run("doctor", "data", *words, "--fix", fixed)
    assert code == 3 and "leaked_test" in text and "removed: " in text
    assert (fixed / "train.words").read_text() == "" and (fixed / "test.words").read_text().count("\n") == 50
    code, text, error = run("doctor", "data", *words, "--fix", fixed)
    assert (
        code == 2 and text == "" and error == f"metaphrase: {fixed} exists already; a cleaned copy needs a new folder\n"
    )


def test_a_warning_gives_1(run, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "train.words").write_text("".join(f"number {n} in words\n" for n in range(200)))
    (corpus / "train.digits").write_text("zero\u200bwidth\n" + "".join(f"digits of {n}\n" for n in range(1, 200)))
    code, text, _ = run("doctor", "data", "--data", corpus, "--data.source", "words", "--data.target", "digits")
    assert code == 1 and "warning  unseen" in text


def test_gradients_of_the_users_data(run, recipe):
    code, text, _ = run("doctor", "gradients", recipe, "--processes", 1, "--batches.tokens", 64)
    lines = text.splitlines()
    assert code == 0 and lines[0].split() == ["name", "loss_difference", "gradient_difference", "passed"]
    assert len(lines) == 5 and all(line.endswith("  yes") for line in lines[1:])


def test_a_gradient_that_differs_gives_1(run, recipe, monkeypatch):
    asked = []

    def checked(options, *, processes):
        asked.append(processes)
        return [GradientCheck("one", 2.0, 1.0, 0.0, 0.0), GradientCheck("other", 2.0, 1.0, 0.0, 3e-3)]

    monkeypatch.setattr("metaphrase.training.gradients.check_gradients", checked)
    code, text, _ = run("doctor", "gradients", recipe)
    assert code == 1 and asked == [(2,)] and text.splitlines()[-1].split() == ["other", "0.0e+00", "3.0e-03", "NO"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["date"], 'does not examine "date" (did you mean "data"?), only data and gradients'),
        (["data"], "which data?"),
        (["data", "--data", "/no/such/folder"], "/no/such/folder"),
        (["data", "{recipe}", "--fx", "x"], 'no option --fx (did you mean "--fix"?)'),
        (["gradients"], "which recipe?"),
        (["gradients", "{recipe}", "--processes", "0"], "--processes is 0; it must be 1 or more"),
    ],
)
def test_mistakes(words, told, run, recipe):
    code, text, error = run("doctor", *(word.format(recipe=recipe) for word in words))
    assert code == 2 and text == "" and told in error and error.count("\n") == 1


def test_help(run):
    code, text, _ = run("doctor")
    assert code == 0 and text.startswith("usage: metaphrase doctor data")
    code, text, _ = run("doctor", "data", "--help")
    assert code == 0 and "--fix" in text and "--data.max_length" in text
