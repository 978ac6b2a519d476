"""Going on: from any update, bit for bit, with what may change on the way, and refused with what may not."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training import checkpoint, loop, states
from metaphrase.training.run import to_go_on, train
from metaphrase.training.snapshot import check_same_material


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def same_weights(first: Path, second: Path, update: int) -> bool:
    """Weights and moments of two runs, bit for bit."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, two = (states.load_tensors(f / "checkpoints" / f"checkpoint-{update}" / name) for f in (first, second))
        if one.keys() != two.keys() or not all(torch.equal(one[key], two[key]) for key in one):
            return False
    return True


def test_a_run_goes_on_only_as_it_began(tiny_options):
    train(tiny_options(max_updates=2), recipe_name="tiny")
    with pytest.raises(MetaphraseError, match=r"model.d_model 16, not 32"):
        changed = tiny_options(max_updates=4)
        changed.model["d_model"] = 32
        train(changed, recipe_name="tiny", resume=True)


def test_a_run_goes_on_only_with_the_pairs_it_began_with(tiny_options, corpus_folder, tmp_path):
    there = tmp_path / "corpus"
    shutil.copytree(corpus_folder, there)
    changes = {"data.path": str(there), "evaluation.metrics": [], "tokenizer.vocab_size": 300}
    folder = train(tiny_options(max_updates=2, **changes), recipe_name="tiny")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    lines = (there / "train.a").read_text(encoding="utf-8").splitlines(keepends=True)
    (there / "train.a").write_text("".join([lines[0].rstrip() + " and\n", *lines[1:]]), encoding="utf-8")
    with pytest.raises(
        MetaphraseError, match=r"(tokenizer is not the one|pairs are not those) that .*checkpoint-2 was"
    ):
        train(tiny_options(max_updates=4, **changes), recipe_name="tiny", resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (there / "train.a").write_text("".join(lines), encoding="utf-8")  # put back, though the files are newer
    train(tiny_options(max_updates=4, **changes), recipe_name="tiny", resume=True)


def test_what_a_checkpoint_does_not_say_is_not_held_against_it():
    state = {"tokenizer": "a", "pairs": "b"}
    check_same_material(Path("checkpoint-2"), {}, state)  # a checkpoint of an earlier version does not say
    check_same_material(Path("checkpoint-2"), state, {"tokenizer": "a"})  # a stream does not know
    with pytest.raises(MetaphraseError, match="The training pairs are not those that checkpoint-2 was written with"):
        check_same_material(Path("checkpoint-2"), state, {"tokenizer": "a", "pairs": "c"})


def test_patience_is_kept_over_a_stop(tiny_options, tmp_path):
    """Stopped and resumed after each evaluation, the run ends where an undisturbed one does, with the same best."""
    changes = {"evaluation.every": 1, "evaluation.patience": 3, "evaluation.metrics": ["chrf"], "log_every": 1}
    options = tiny_options(output=str(tmp_path / "straight"), max_updates=40, **changes)
    options.optimizer.learning_rate = 1e-12  # nothing is learned, so nothing gets better
    straight = train(options, recipe_name="tiny")
    ended = len(records(straight, "evaluation"))
    options = tiny_options(max_updates=1, **changes)
    options.optimizer.learning_rate = 1e-12
    for updates in (1, 2, 3, 40):
        options.max_updates = updates
        folder = train(options, recipe_name="tiny", resume=updates > 1)
    assert len(records(folder, "evaluation")) == ended < 40
    best = [json.loads((f / "results.json").read_text())["training"]["best_update"] for f in (straight, folder)]
    assert best[0] == best[1]


def test_going_on_with_another_token_budget_ends_the_epoch_with_every_pair(tiny_options):
    changes = {"max_updates": None, "evaluation.every": None, "evaluation.metrics": [], "checkpoints.every": 1}
    train(tiny_options(**{**changes, "max_updates": 3}), recipe_name="tiny")
    folder = train(tiny_options(**changes, epochs=1.0, **{"batches.tokens": 96}), recipe_name="tiny", resume=True)
    log = records(folder, "training")
    assert log[2]["pairs"] < 120 and log[-1]["pairs"] == 120 and log[-1]["epoch"] == 1.0
    assert [record["update"] for record in log] == list(range(1, len(log) + 1))


def test_ctrl_c_saves_says_how_to_go_on_and_going_on_equals_never_having_stopped(tiny_options, tmp_path, capsys):
    plain = train(tiny_options(output=str(tmp_path / "plain")), recipe_name="tiny")
    options = tiny_options()
    update, handler = loop.add_gradients, signal.getsignal(signal.SIGINT)

    def interrupted(*args):
        if len(calls := interrupted.__dict__.setdefault("calls", [])) == 5:
            signal.raise_signal(signal.SIGINT)
        calls.append(1)
        return update(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "add_gradients", interrupted)
        train(options, recipe_name="tiny", command="metaphrase train tiny --threads 1")
    assert "Go on with: metaphrase train tiny --threads 1 --resume" in capsys.readouterr().err
    assert [update for update, _ in checkpoint.list_checkpoints(Path(options.output) / "checkpoints")][-1] in (6, 7)
    assert signal.getsignal(signal.SIGINT) is handler

    resumed = train(options, recipe_name="tiny", resume=True)
    assert same_weights(plain, resumed, 12)
    drop = {"tokens_per_second", "seconds"}
    logs = [[{k: v for k, v in r.items() if k not in drop} for r in records(f, "training")] for f in (plain, resumed)]
    assert logs[0] == logs[1]


def test_a_broken_newest_checkpoint_is_passed_over_and_the_run_ends_the_same(tiny_options, tmp_path, caplog):
    straight = train(tiny_options(output=str(tmp_path / "straight")), recipe_name="tiny")
    folder = train(tiny_options(max_updates=8), recipe_name="tiny")
    newest = folder / "checkpoints" / "checkpoint-8"
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(MetaphraseError, match=r"checkpoint-8 is broken: model.safetensors has \d+ bytes in place of"):
        train(tiny_options(), recipe_name="tiny", resume=newest)
    caplog.clear()
    train(tiny_options(), recipe_name="tiny", resume=True)
    assert "checkpoint-8 is broken" in caplog.text and "passed over" in caplog.text
    assert same_weights(straight, folder, 12)


def test_going_on_from_an_earlier_checkpoint_sets_the_later_ones_aside(tiny_options, tmp_path, capsys):
    changes = {"checkpoints.keep_last": 1, "evaluation.metrics": []}
    straight = train(tiny_options(output=str(tmp_path / "straight"), **changes), recipe_name="tiny")
    folder = train(tiny_options(**changes), recipe_name="tiny")
    train(tiny_options(max_updates=6, **changes), recipe_name="tiny", resume=str(folder / "checkpoints/checkpoint-4"))
    assert f"set aside as {folder / 'checkpoints' / 'set-aside-12'}" in capsys.readouterr().err
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"checkpoint-4", "checkpoint-6", "set-aside-8", "set-aside-12"}
    train(tiny_options(**changes), recipe_name="tiny", resume=True)
    assert "checkpoint-6: 6 updates" in capsys.readouterr().err
    assert same_weights(straight, folder, 12)


@pytest.mark.parametrize(
    ("command", "resume"),
    [("metaphrase train tiny", False), ("metaphrase train tiny --resume", True),
     ("metaphrase train --resume tiny", True),
     ("metaphrase train tiny --resume 'a b/checkpoint-4'", "a b/checkpoint-4"),
     ("metaphrase train tiny '--resume=a b/checkpoint-4'", "a b/checkpoint-4")],
)  # fmt: skip
def test_a_stopped_run_goes_on_from_the_newest(command, resume):
    assert to_go_on(command, resume) == "metaphrase train tiny --resume"


def test_a_run_that_fills_the_disk_goes_on_when_there_is_room(tiny_options, tmp_path, monkeypatch):
    straight = train(tiny_options(output=str(tmp_path / "straight")), recipe_name="tiny")
    honest = states.save_tensors

    def full(path: Path, tensors: dict) -> None:
        if path.parent.name == ".writing-checkpoint-8":
            path.write_bytes(b"as far as it goes")
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(path, tensors)

    with monkeypatch.context() as patch, pytest.raises(MetaphraseError) as caught:
        patch.setattr(states, "save_tensors", full)
        train(tiny_options(), recipe_name="tiny")
    said = str(caught.value)
    assert "No space is left on the disk" in said and "checkpoint-4 is the last whole checkpoint" in said
    assert said.count("\n") == 0
    folder = train(tiny_options(), recipe_name="tiny", resume=True)
    assert same_weights(straight, folder, 12)


@pytest.mark.parametrize("stop", [3, 10])
def test_going_on_at_any_update_equals_never_having_stopped(tiny_options, tmp_path, stop):
    changes = {"checkpoints.every": 1, "checkpoints.keep_last": 20, "evaluation.metrics": [], "batches.accumulation": 2}
    straight = train(tiny_options(output=str(tmp_path / "straight"), **changes), recipe_name="tiny")
    options = tiny_options(**changes)
    shutil.copytree(straight, options.output, ignore=shutil.ignore_patterns("results.json"))
    for update, path in checkpoint.list_checkpoints(Path(options.output) / "checkpoints"):
        if update > stop:
            shutil.rmtree(path)
    folder = train(options, recipe_name="tiny", resume=True)
    assert same_weights(straight, folder, 12)
    drop = {"tokens_per_second", "seconds", "evaluation_seconds"}
    for kind in ("training", "evaluation"):
        logs = [[{k: v for k, v in r.items() if k not in drop} for r in records(f, kind)] for f in (straight, folder)]
        assert logs[0] == logs[1]
