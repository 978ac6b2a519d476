"""A whole run on a made-up corpus: what the result folder holds, and what a user is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import CorpusOptions
from metaphrase.training import checkpoint, evaluate, loop, states
from metaphrase.training.material import Material
from metaphrase.training.run import start_processes, train


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_result_folder_is_whole_and_loads(tiny_options, capsys):
    folder = train(tiny_options(trackers=["tensorboard"]), recipe_name="tiny", command="metaphrase train tiny")
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md", "results.json",
        "train_log.jsonl", "curves.png", "recipe.yaml", "checkpoints",
    }  # fmt: skip
    assert ".lock" not in names and list((folder / "trackers").rglob("events.*"))

    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["data"]["train_pairs"] == 120 and results["data"]["test_pairs"] == 11
    assert results["training"]["updates"] == 12 and results["command"] == "metaphrase train tiny"
    assert set(results["test"]) == {"sacrebleu", "chrf", "num_beams"} and results["test"]["sacrebleu"]["signature"]
    assert results["validation"]["perplexity"] > 1
    assert "Validation sacrebleu" in (said := capsys.readouterr().err) and "Test (11 lines, beam 2)" in said

    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert settings["num_beams"] == 2 and settings["length_penalty"] == 1.0 and settings.get("max_length") is None
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    output = model.generate(**tokenizer("abc def", return_tensors="pt"))
    assert output.shape[0] == 1


def test_every_update_is_logged_with_a_hash_of_its_batches(tiny_options):
    folder = train(tiny_options(), recipe_name="tiny")
    log = records(folder, "training")
    assert [record["update"] for record in log] == list(range(1, 13))
    wanted = {"update", "pairs", "loss", "lr", "grad_norm", "tokens_per_second", "batches", "epoch", "skipped"}
    assert all(wanted <= set(record) for record in log)
    assert log[0]["lr"] == pytest.approx(3e-3 / 20) and log[11]["lr"] == pytest.approx(3e-3 * 12 / 20)
    assert len({record["batches"] for record in log}) == 12
    assert [r["pairs"] for r in log] == sorted(r["pairs"] for r in log)
    scored = records(folder, "evaluation")
    assert [record["update"] for record in scored] == [4, 8, 12] and len(scored[0]["samples"]) == 3


def test_the_test_split_is_read_once_and_last(tiny_options, monkeypatch):
    events = []
    read, learn = Material.read_test, loop.learn
    monkeypatch.setattr(Material, "read_test", lambda self: (events.append("test"), read(self))[1])
    monkeypatch.setattr("metaphrase.training.run.learn", lambda *a, **k: (learn(*a, **k), events.append("learned"))[0])
    train(tiny_options(max_updates=4), recipe_name="tiny")
    assert events == ["learned", "test"]


def test_loss_falls(tiny_options):
    folder = train(tiny_options(max_updates=60, **{"evaluation.every": 20}), recipe_name="tiny")
    losses = [record["loss"] for record in records(folder, "evaluation")]
    assert losses[-1] < losses[0] - 0.3


def test_a_run_needs_an_end(tiny_options):
    with pytest.raises(MetaphraseError, match="max_updates, epochs or minutes"):
        train(tiny_options(max_updates=None), recipe_name="tiny")


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("batches.tokens", 0, "1 or more"),
        ("data.window", 0, "1 or more"),
        ("data.weight", -1.0, "0 or more"),
        ("data.temperature", 0.0, "above 0"),
        ("tokenizer.dropout", 1.0, "a number from 0 up to, but not, 1"),
        ("data.more", [CorpusOptions(weight=-2.0)], "0 or more"),
    ],
)
def test_values_are_checked_as_on_the_command_line(tiny_options, name, value, right):
    with pytest.raises(MetaphraseError, match=rf"^{name}.* is \S+; it must be {right}"):
        train(tiny_options(**{name: value}), recipe_name="tiny")
    assert not Path(tiny_options().output).exists()


def test_a_used_folder_is_refused(tiny_options):
    options = tiny_options(max_updates=2)
    folder = train(options, recipe_name="tiny")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(MetaphraseError, match=r"already holds a run.*--resume.*--output"):
        train(options, recipe_name="tiny")
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("mistake", [{"data.source": "aa"}, {"data.test": "tset"}, {"model": {"d_modle": 8}}])
def test_a_mistake_leaves_the_folder_free(tiny_options, mistake):
    with pytest.raises(MetaphraseError):
        train(tiny_options(**mistake), recipe_name="tiny")
    folder = train(tiny_options(max_updates=2, **{"evaluation.metrics": []}), recipe_name="tiny")
    assert (folder / "recipe.yaml").is_file() and (folder / "results.json").is_file()


def test_a_missing_test_split_is_told_before_the_training(tiny_options, corpus_folder, tmp_path, capsys):
    there = tmp_path / "corpus"
    shutil.copytree(corpus_folder, there, ignore=shutil.ignore_patterns("test.*"))
    folder = train(tiny_options(max_updates=2, **{"data.path": str(there)}), recipe_name="tiny")
    told = "There is no test split test in the data: nothing is scored at the end."
    said = capsys.readouterr().err
    assert said.count(told) == 1 and said.index(told) < said.index("Training ended")
    assert json.loads((folder / "results.json").read_text())["test"] is None
    with pytest.raises(MetaphraseError, match=r"has none of tset\.a with tset\.b"):  # one that was named must be there
        train(tiny_options(output=str(tmp_path / "other"), **{"data.test": "tset"}), recipe_name="tiny")
    train(tiny_options(output=str(tmp_path / "none"), max_updates=2, **{"data.test": None}), recipe_name="tiny")
    assert "no test split" not in capsys.readouterr().err


def test_a_folder_with_foreign_files_is_refused(tiny_options):
    options = tiny_options()
    Path(options.output).mkdir()
    (Path(options.output) / "thesis.tex").touch()
    with pytest.raises(MetaphraseError, match=r"other files \(thesis.tex\)"):
        train(options, recipe_name="tiny")
    with pytest.raises(MetaphraseError, match="no run to go on with"):
        train(options, recipe_name="tiny", resume=True)


@pytest.mark.parametrize(
    ("trackers", "message"),
    [(["tensorbord"], r'no "tensorbord" \(did you mean "tensorboard"\?\)'), (["dvclive"], "dvclive is not installed")],
)
def test_a_tracker_that_is_not_there_is_told_at_once(tiny_options, trackers, message):
    with pytest.raises(MetaphraseError, match=message):
        train(tiny_options(trackers=trackers), recipe_name="tiny")
    assert not Path(tiny_options().output).exists()


def test_no_time_for_one_update_is_told(tiny_options):
    with pytest.raises(MetaphraseError, match="before the first update; give the run more minutes"):
        train(tiny_options(max_updates=None, minutes=1e-6), recipe_name="tiny")


@pytest.mark.parametrize(
    ("model", "message"), [({"preset": "bsae"}, 'no preset "bsae" .*"base"'), ({"d_modle": 8}, "no field 'd_modle'")]
)
def test_bad_model_options_are_named(tiny_options, model, message):
    with pytest.raises(MetaphraseError, match=message):
        train(tiny_options(model=model), recipe_name="tiny")


def test_epochs_end_a_run(tiny_options):
    folder = train(tiny_options(max_updates=None, epochs=2.0, **{"evaluation.every": None}), recipe_name="tiny")
    log = records(folder, "training")
    assert log[-1]["pairs"] == 240 and log[-1]["epoch"] == 2.0
    assert len(records(folder, "evaluation")) == 2  # unset: after every epoch


def test_minutes_leave_time_for_an_update_and_two_evaluations(tiny_options, monkeypatch):
    now = 100.0
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now))
    budget = loop.Budget(tiny_options(minutes=1.0), stream=None, started=100.0)
    budget.took(update=2.0)
    budget.took(evaluation=10.0)
    budget.took(update=1.0)
    now = 137.9
    assert not budget.time_is_up()
    now = 138.0  # 60 - 2 - 2 x 10
    assert budget.time_is_up()


def test_minutes_end_a_run_with_an_evaluation(tiny_options):
    folder = train(tiny_options(max_updates=None, minutes=0.05), recipe_name="tiny")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert records(folder, "evaluation")[-1]["update"] == results["training"]["updates"] > 0


def test_patience_stops(tiny_options):
    options = tiny_options(max_updates=400, **{"evaluation.every": 1, "evaluation.patience": 2})
    options.optimizer.learning_rate = 1e-12  # nothing is learned, so nothing gets better
    options.evaluation.metrics = ["chrf"]
    folder = train(options, recipe_name="tiny")
    assert len(records(folder, "evaluation")) <= 8


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(tiny_options, monkeypatch):
    options, refused = tiny_options(max_updates=2), []
    honest = loop.add_gradients

    def meanwhile(*args):
        if not refused:
            with pytest.raises(MetaphraseError, match="is in use by process"):
                train(options, recipe_name="tiny", resume=True)
            refused.append(True)
        return honest(*args)

    monkeypatch.setattr(loop, "add_gradients", meanwhile)
    folder = train(options, recipe_name="tiny")
    assert refused and (folder / "results.json").exists()


def test_best_and_last_checkpoints_stay_and_their_average_is_judged(tiny_options, capsys):
    options = tiny_options(max_updates=24, **{"checkpoints.keep_best": 2, "checkpoints.keep_last": 1})
    folder = train(options, recipe_name="tiny")
    evaluations = records(folder, "evaluation")
    best = sorted(evaluations, key=lambda r: (-r["sacrebleu"], r["loss"]))[:2]
    kept = {update for update, _ in checkpoint.list_checkpoints(folder / "checkpoints")}
    assert kept == {24} | {record["update"] for record in best}
    final = json.loads((folder / "results.json").read_text())["training"]["final"]
    assert f"The final model is {final}." in capsys.readouterr().err
    assert final in (f"checkpoint-{best[0]['update']}", "average of 2")
    weights = states.load_tensors(folder / "model.safetensors")
    files = [folder / "checkpoints" / f"checkpoint-{record['update']}" / "model.safetensors" for record in best]
    expected = states.load_tensors(files[0]) if final.startswith("check") else evaluate.average(files)
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_checkpoints_between_evaluations(tiny_options):
    changes = {"checkpoints.every": 3, "checkpoints.keep_last": 20, "evaluation.every": 4, "evaluation.metrics": []}
    folder = train(tiny_options(**changes), recipe_name="tiny")
    assert [update for update, _ in checkpoint.list_checkpoints(folder / "checkpoints")] == [3, 4, 6, 8, 9, 12]


def test_mixed_precision_trains(tiny_options):
    options = tiny_options(max_updates=8, mixed_precision="bf16", **{"evaluation.metrics": []})
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        log = records(train(options, recipe_name="tiny"), "training")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert log[-1]["loss"] < log[0]["loss"] and all(record["skipped"] == 0 for record in log)


def test_what_the_environment_says_of_accumulation_does_not_scale_gradients(tiny_options, tmp_path, monkeypatch):
    """Accelerate would divide each batch's gradient by it, on top of our division by the update's tokens."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert start_processes(tiny_options(), tmp_path).gradient_accumulation_steps == 1
