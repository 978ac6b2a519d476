"""The running mean, R-Drop, the guard, automatic batches, attention health: each does what its option says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.errors import MetaphraseError
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import loop, states
from metaphrase.training.data.batching import collate
from metaphrase.training.fit import largest_batch
from metaphrase.training.material import gather
from metaphrase.training.objective import plain_loss, rdrop_loss
from metaphrase.training.run import train
from metaphrase.training.running_mean import RunningMean

BATCH = [([5, 6, 2], [7, 8, 9, 2]), ([5, 2], [7, 2])]


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def tiny_model(dropout: float, smoothing: float = 0.1) -> MetaphraseForConditionalGeneration:
    torch.manual_seed(0)
    config = MetaphraseConfig.from_preset(
        "base", vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=dropout, init_std=0.3,
        label_smoothing=smoothing,
    )  # fmt: skip
    return MetaphraseForConditionalGeneration(config).train()


def test_rdrop_without_noise_is_the_plain_loss():
    model, batch = tiny_model(dropout=0.0), collate(BATCH)
    plain = plain_loss(model, batch, torch.tensor(9.0))
    assert rdrop_loss(model, batch, torch.tensor(9.0), 5.0).item() == pytest.approx(plain.item(), abs=1e-6)


def test_rdrop_adds_the_distance_of_two_readings():
    model, batch = tiny_model(dropout=0.3), collate(BATCH)
    losses = []
    for weight in (0.0, 1.0, 3.0):
        torch.manual_seed(1)
        losses.append(rdrop_loss(model, batch, torch.tensor(6.0), weight).item())
    assert losses[1] > losses[0]
    assert losses[2] - losses[0] == pytest.approx(3 * (losses[1] - losses[0]), rel=1e-4)


def test_rdrop_of_a_batch_that_counts_for_nothing_is_0():
    model = tiny_model(dropout=0.3)
    loss = rdrop_loss(model, collate(BATCH, real=False), torch.tensor(6.0), 5.0)
    loss.backward()
    assert loss.item() == 0.0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_rdrop_trains(tiny_options):
    folder = train(tiny_options(max_updates=8, **{"optimizer.rdrop": 2.0}), recipe_name="tiny")
    log = records(folder, "training")
    assert len(log) == 8 and log[-1]["loss"] < log[0]["loss"]


@pytest.mark.parametrize("streaming", [False, True])
def test_bpe_dropout_cuts_anew_and_goes_on_exactly(tiny_options, tmp_path, streaming):
    changes = {"evaluation.metrics": [], "data.streaming": streaming, "data.window": 50}
    dropout = {**changes, "tokenizer.dropout": 0.3}
    plain = train(tiny_options(output=str(tmp_path / "plain"), **changes), recipe_name="tiny")
    straight = train(tiny_options(output=str(tmp_path / "straight"), **dropout), recipe_name="tiny")
    train(tiny_options(max_updates=8, **dropout), recipe_name="tiny")
    resumed = train(tiny_options(**dropout), recipe_name="tiny", resume=True)
    one, two, other = (
        [(record["batches"], record["loss"], record["tokens"]) for record in records(folder, "training")]
        for folder in (straight, resumed, plain)
    )
    assert one == two and len(one) == 12
    assert [record[0] for record in one] == [record[0] for record in other]  # the same pairs …
    assert all(cut[2] > whole[2] for cut, whole in zip(one, other, strict=True))  # … in more pieces
    saved = [(folder / "tokenizer.json").read_bytes() for folder in (plain, straight)]
    assert saved[0] == saved[1]


def test_every_epoch_cuts_anew_and_lengths_are_those_without_dropout(tiny_options):
    material = gather(tiny_options(**{"tokenizer.dropout": 0.3}))
    plain = gather(tiny_options())
    first, second = (material.windows(epoch, 0) for epoch in (0, 1))
    assert material.windows(0, 1) is None
    places = np.arange(len(first))
    cuts = [[ids.tolist() for pair in window[places] for ids in pair] for window in (first, second)]
    assert cuts[0] != cuts[1] and cuts[0] == [ids.tolist() for pair in material.windows(0, 0)[places] for ids in pair]
    assert [material.tokenizer.decode(ids, skip_special_tokens=True) for ids in cuts[0]] == [
        material.tokenizer.decode(ids, skip_special_tokens=True) for ids in cuts[1]
    ]
    assert np.array_equal(first.source_lengths, plain.windows(0, 0).source_lengths)


def test_bpe_dropout_needs_bpe(tiny_options):
    options = tiny_options(**{"tokenizer.dropout": 0.1, "tokenizer.kind": "characters"})
    with pytest.raises(MetaphraseError, match=r"tokenizer\.dropout needs a tokenizer"):
        train(options, recipe_name="tiny")


def test_running_mean_follows_its_formula():
    model = torch.nn.Linear(2, 2)
    expected = model.weight.detach().clone()
    mean = RunningMean(model, decay=0.9)
    for _ in range(5):
        with torch.no_grad():
            model.weight.add_(1.0)
        mean.update()
        expected = 0.9 * expected + 0.1 * model.weight.detach()
    assert torch.allclose(mean.tensors(model)["weight"], expected)


def test_running_mean_competes_and_goes_on_exactly(tiny_options, tmp_path, capsys):
    changes = {"optimizer.ema": 0.8, "evaluation.metrics": []}
    straight = train(tiny_options(output=str(tmp_path / "straight"), **changes), recipe_name="tiny")
    assert "running mean" in capsys.readouterr().err
    train(tiny_options(max_updates=8, **changes), recipe_name="tiny")
    broken = train(tiny_options(**changes), recipe_name="tiny", resume=True)
    name = "checkpoints/checkpoint-12/running_mean.safetensors"
    one, two = (states.load_tensors(folder / name) for folder in (straight, broken))
    assert all(torch.equal(one[key], two[key]) for key in one)
    weights = states.load_tensors(straight / "checkpoints/checkpoint-12/model.safetensors")
    assert not torch.equal(one["model.shared.weight"], weights["model.shared.weight"])


def faulty(monkeypatch, bad: set[int], factor: float = math.nan) -> None:
    """The gradient of these updates, counted from 1, is multiplied by a factor."""
    honest, calls = loop.add_gradients, [0]

    def add(accelerator, model, *rest):
        loss = honest(accelerator, model, *rest)
        calls[0] += 1
        if calls[0] in bad:
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
        return loss

    monkeypatch.setattr(loop, "add_gradients", add)


def test_a_bad_update_is_skipped_and_counted_and_the_schedule_waits(tiny_options, monkeypatch):  # LR-STEP
    faulty(monkeypatch, {3, 4})
    folder = train(tiny_options(max_updates=5), recipe_name="tiny")
    log = records(folder, "training")
    assert [record["update"] for record in log] == [1, 2, 3, 4, 5]
    assert [record["skipped"] for record in log] == [0, 0, 2, 2, 2]
    assert [record["lr"] for record in log] == pytest.approx([3e-3 * update / 20 for update in range(1, 6)])
    assert json.loads((folder / "results.json").read_text())["training"]["skipped_updates"] == 2
    weights = states.load_tensors(folder / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_too_many_bad_updates_stop_the_run(tiny_options, monkeypatch):
    faulty(monkeypatch, set(range(6, 100)))
    with pytest.raises(MetaphraseError, match=r"4 updates in a row after update 5 .*learning_rate"):
        train(tiny_options(**{"optimizer.max_skipped": 4}), recipe_name="tiny")
    left = Path(tiny_options().output) / "checkpoints" / "checkpoint-4"
    assert all(tensor.isfinite().all() for tensor in states.load_tensors(left / "model.safetensors").values())


def test_a_gradient_far_above_the_mean_is_skipped(tiny_options, monkeypatch):
    faulty(monkeypatch, {55}, factor=1000.0)
    changes = {"optimizer.skip_above": 20.0, "evaluation.every": 100, "evaluation.metrics": []}
    log = records(train(tiny_options(max_updates=56, **changes), recipe_name="tiny"), "training")
    assert [record["skipped"] for record in log[53:]] == [0, 1, 1]


def test_automatic_batches_are_found_and_kept(tiny_options, monkeypatch):
    monkeypatch.setattr("metaphrase.training.fit.CPU_MOST", 1536)
    options = tiny_options(max_updates=2, **{"batches.tokens": "auto"})
    folder = train(options, recipe_name="tiny")
    assert json.loads((folder / "results.json").read_text())["training"]["batch_tokens"] == 1536
    monkeypatch.setattr("metaphrase.training.run.largest_batch", lambda *a, **k: pytest.fail("searched again"))
    options.max_updates = 3
    assert train(options, recipe_name="tiny", resume=True) == folder


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_a_batch_that_does_not_fit_is_told(error):
    def loss(*_):
        raise error

    with pytest.raises(MetaphraseError, match="does not fit in memory"):
        largest_batch(torch.nn.Linear(2, 2), loss, Accelerator(cpu=True), longest=10, vocabulary=20)


def starve(monkeypatch, updates: set[int]) -> None:
    """The loss of these updates, counted from 1, finds no memory."""
    honest, calls = loop.make_loss, [0]

    def make(rdrop):
        loss_of = honest(rdrop)
        calls[0] += 1
        number = calls[0]

        def loss(*given):
            if number in updates:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
            return loss_of(*given)

        return loss

    monkeypatch.setattr(loop, "make_loss", make)


def test_an_update_without_memory_is_left_out_listed_and_told(tiny_options, monkeypatch, capsys):
    starve(monkeypatch, {3, 5})
    folder = train(tiny_options(max_updates=5), recipe_name="tiny")
    log = records(folder, "training")
    assert [record["update"] for record in log] == [1, 2, 3, 4, 5]
    assert [record["out_of_memory"] for record in log] == [0, 0, 1, 2, 2]
    assert [record["lr"] for record in log] == pytest.approx([3e-3 * update / 20 for update in range(1, 6)])
    skipped = records(folder, "skipped")
    assert [record["update"] for record in skipped] == [3, 4]
    between = [log[2]["pairs"] - log[1]["pairs"], log[3]["pairs"] - log[2]["pairs"]]
    made = len(skipped[0]["pairs"]) + len(skipped[1]["pairs"])
    assert made < sum(between) and len({*skipped[0]["pairs"], *skipped[1]["pairs"]}) == made  # each pair by its number
    said = capsys.readouterr().err
    assert "Process 0 of 1 failed on a batch of" in said and "The update is left out (2 of at most 20)." in said
    assert json.loads((folder / "results.json").read_text())["training"]["out_of_memory_updates"] == 2


@pytest.mark.parametrize(
    ("most", "message"), [(0, "^Process 0 of 1 failed on a batch"), (2, "^3 updates found no mem")]
)
def test_too_many_updates_without_memory_stop_the_run(tiny_options, monkeypatch, most, message):
    starve(monkeypatch, set(range(5, 100)))
    with pytest.raises(MetaphraseError, match=message + r".*Lower batches\.tokens"):
        train(tiny_options(**{"batches.max_out_of_memory": most}), recipe_name="tiny")
    assert (Path(tiny_options().output) / "checkpoints" / "checkpoint-4" / "manifest.json").exists()


def test_a_batch_that_fails_is_named(tiny_options, monkeypatch):
    def loss(*_):
        raise IndexError("index 7 is out of range")

    monkeypatch.setattr(loop, "make_loss", lambda rdrop: loss)
    told = r"Process 0 of 1 failed on a batch of \d+ pairs x \d+ .*\(training pairs \d+.*\): IndexError: index 7"
    with pytest.raises(MetaphraseError, match=told):
        train(tiny_options(), recipe_name="tiny")


def test_attention_health_is_in_the_log(tiny_options):
    folder = train(tiny_options(max_updates=4, **{"evaluation.attention": 4}), recipe_name="tiny")
    health = records(folder, "evaluation")[0]["attention"]
    assert set(health) == {"encoder", "decoder", "cross"}
    assert all(0 <= kind["entropy"] <= 1 and isinstance(kind["dead"], list) for kind in health.values())


def test_a_finished_run_is_left_as_it_is(tiny_options, capsys):
    folder = train(tiny_options(max_updates=4), recipe_name="tiny")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    train(tiny_options(max_updates=4), recipe_name="tiny", resume=True)
    assert "is finished" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
