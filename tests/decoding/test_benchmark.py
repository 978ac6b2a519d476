"""The benchmark of decoding, rehearsed with a tiny model."""

from __future__ import annotations

import json
import sys
from importlib import util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_benchmark_compares_ids_and_keeps_a_record(model, tokenizer, texts, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = util.spec_from_file_location("decoding_benchmark", FOLDER / "decoding.py")
    benchmark = util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(sys.modules["common"], "RESULTS", tmp_path / "results")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for name in ("source", "reference"):
        (tmp_path / name).write_text("\n".join(texts), encoding="utf-8")
    words = [tmp_path / "model", tmp_path / "source", "--reference", tmp_path / "reference", "--rounds", 1]
    words += ["--batches", 4, 1, "--single", 3, "--engines", "metaphrase"]
    monkeypatch.setattr(sys, "argv", ["decoding.py", *map(str, words)])
    benchmark.main()
    assert "| greedy, batch 4: metaphrase |" in capsys.readouterr().out
    (record,) = (tmp_path / "results").glob("*-decoding.json")
    settings = json.loads(record.read_text(encoding="utf-8"))["settings"]
    assert [(one["beams"], one["batch"]) for one in settings] == [(1, 4), (5, 4), (1, 1), (5, 1)]
    assert all(one["ids"]["metaphrase"]["same"] == one["ids"]["metaphrase"]["of"] for one in settings)
    assert settings[0]["bleu"]["metaphrase"] == settings[0]["bleu"]["generate"] > 0
    assert record.with_suffix(".png").stat().st_size > 1000
    sources = [[5, 6, 2]]
    found = benchmark.compare([[5, 6]], [[6, 5]], sources, model)
    assert found["same"] == 0 and found["ties"] == 0 and len(found["differing"][0]["scores"]) == 2
    monkeypatch.delitem(sys.modules, "common")
