"""`metaphrase plan`: a table, JSON, and one sentence for a mistake."""

from __future__ import annotations

import json

import pytest

from metaphrase.planning import size, span


def test_a_table(run, recipe, tmp_path):
    file = tmp_path / "plan.json"
    code, text, error = run("plan", recipe, "--seconds", 0.2, "--gpus", 8, "--json", file, "--max_updates", 30)
    assert code == 0, error
    assert text.startswith("toy on 1 x ") and "Reading the data" in error and "Measuring: updates" in error
    found = json.loads(file.read_text())
    for words in (f"{found['parameters']:,} parameters", "counted", "measured", "assumed", "30 updates", "max_updates"):
        assert words in text, words
    assert found["end"]["updates"] == 30 and found["gpus"]["gpus"] == 8
    assert f"{found['tokens_per_second']:,.0f} target tokens a second" in text


def test_only_json(run, recipe):
    code, text, _ = run("plan", recipe, "--seconds", 0.2, "--json", "-", "--batches.tokens", 128)
    assert code == 0 and json.loads(text)["batch_tokens"] == 128 and json.loads(text)["gpus"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["multi30k"], 'there is no recipe "multi30k" (did you mean "multi30k_en_de"?)'),
        ([], "which recipe?"),
        (["RECIPE", "--gpus", "0"], "--gpus is 0; it must be a whole number above 0"),
        (["RECIPE", "--gpus", "many"], "--gpus is many; it must be a whole number above 0"),
        (["RECIPE", "--gpu", "2"], "there is no option --gpu"),
        (["RECIPE", "--mfu", "-1"], "--mfu is -1; it must be a number above 0"),
        (["RECIPE", "--data", "nowhere"], "nowhere"),
        (["RECIPE", "--batches.tokens", "few"], 'batches.tokens is "few"'),
        (["RECIPE", "--max_updates", "null"], "The run has no end"),
        (["RECIPE", "--model.d_model", "17"], "d_model"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(run, recipe, words, sentence):
    code, text, error = run("plan", *[recipe if word == "RECIPE" else word for word in words])
    assert code == 2 and text == "" and sentence in error
    assert error.startswith("metaphrase: ") or "Reading the data" in error


def test_it_refuses_several_processes(run, recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, error = run("plan", recipe)
    assert code == 2 and "plan runs in one process" in error


def test_sizes_and_times_for_people():
    assert [size(n) for n in (5, 13_166_592, 147e6, 2.5e9, 9e12)] == ["5 B", "13.2 MB", "147 MB", "2.5 GB", "9.0 TB"]
    assert [span(n) for n in (9, 600, 10_000, 1e6)] == ["9.0 s", "10.0 min", "2.8 h", "11.6 days"]
