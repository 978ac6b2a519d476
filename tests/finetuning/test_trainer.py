"""The stock Seq2SeqTrainer gives the parameters of one big batch, however the batch is cut."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

from . import work


def worst(first: dict, second: dict) -> float:
    return max((first[name] - second[name]).abs().max().item() for name in second)


@cache
def by_hand(smoothing: float) -> tuple[dict, list[float]]:
    """Three plain steps on the one batch of all rows, the loss written out."""
    net, losses = work.model(), []
    batch = DataCollatorForSeq2Seq(work.tokenizer(), model=net)(work.rows())
    labels = batch.pop("labels")
    for _ in range(work.UPDATES):
        net.zero_grad()
        log_p = net(**batch).logits.log_softmax(-1)
        real = labels != -100
        at_target = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        loss = -((1 - smoothing) * at_target + smoothing * log_p.mean(-1))[real].mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= work.RATE * parameter.grad
    return {name: parameter.detach() for name, parameter in net.named_parameters()}, losses


def assert_same(parameters: dict, losses, smoothing: str) -> None:
    expected, expected_losses = by_hand(sum(work.SMOOTHINGS[smoothing]))
    print("worst difference:", worst(parameters, expected))
    assert worst(parameters, expected) < 1e-6
    assert list(losses) == pytest.approx(expected_losses, abs=1e-5)
    start = dict(work.model().named_parameters())
    assert worst(start, expected) > 1e-2


@pytest.mark.parametrize("accumulation", [1, 4, 8])
@pytest.mark.parametrize("smoothing", work.SMOOTHINGS)
def test_LOSS_GA_accumulation(smoothing, accumulation, tmp_path):
    """Also LOSS-SMOOTH d: a Trainer that smooths gives the loss and the steps of a model that smooths."""
    assert_same(*work.trained(tmp_path, smoothing, accumulation=accumulation), smoothing)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("two")
    work.two_processes(work.__file__, output)
    return output


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("smoothing", work.SMOOTHINGS)
def test_LOSS_DDP_two_processes(smoothing, accumulation, two_processes):
    ranks = [load_file(two_processes / f"{smoothing}-{accumulation}-{rank}.safetensors") for rank in (0, 1)]
    losses = [rank.pop("losses").tolist() for rank in ranks]
    assert worst(*ranks) == 0 and losses[0] == losses[1]
    assert_same(ranks[0], losses[0], smoothing)


def test_LOSS_SMOOTH_a_collator_without_the_model(tmp_path):
    """Then nobody makes the decoder's inputs, and the error says what to do."""
    job = work.trainer(tmp_path, work.model(), work.rows(), 0.1)
    job.data_collator = DataCollatorForSeq2Seq(work.tokenizer())
    with pytest.raises(ValueError, match=r"label_smoothing_factor.*`model=`"):
        job.train()
    plain = work.trainer(tmp_path, work.model(), work.rows())
    plain.data_collator = job.data_collator  # without smoothing the labels are enough
    plain.train()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_LOSS_ALLIGN_a_batch_without_a_target(accumulation, tmp_path):
    """As the whole update nothing moves; as half of it, only the other half counts."""
    rows = work.rows((5, 3, 4, 6))
    for row in rows[:2]:
        row["labels"] = [-100] * len(row["labels"])
    net = work.model(0.1)
    start = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    job = work.trainer(tmp_path, net, rows[:2] if accumulation == 1 else rows, batch=2, accumulation=accumulation)
    job.train()
    moved = worst(start, dict(net.named_parameters()))
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    assert moved == 0 if accumulation == 1 else moved > 1e-3


def test_EVAL_KEYS(tmp_path):
    """Five samples with targets of 3 to 7 tokens in batches of 2: one array of logits, one of labels, nothing else."""
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {"n": len(prediction.label_ids)}

    net = work.model(label_smoothing=0.1)
    rows = work.rows((3, 4, 5, 6, 7))
    job = work.trainer(tmp_path, net, rows, eval_dataset=rows, compute_metrics=metrics)
    figures = job.evaluate()
    assert figures["eval_n"] == 5
    assert seen[0].predictions.shape == (5, 7, 20) and seen[0].label_ids.shape == (5, 7)
    assert (seen[0].predictions[0, 4:] == -100).all() and (seen[0].label_ids[0, 3:] == -100).all()
    assert seen[0].predictions[4].max() < 100 and seen[0].predictions.dtype.kind == "f"
    plain = [net(**DataCollatorForSeq2Seq(work.tokenizer(), model=net)(rows[i : i + 2])).loss for i in (0, 2, 4)]
    assert figures["eval_loss"] == pytest.approx(sum(plain).item() / 3, abs=1e-5)  # the Trainer's mean over batches


def test_GEN_LEN_evaluation_by_generation(tmp_path):
    """A reference of 30 tokens, and no limit set: outputs may be that long."""
    net = work.model()
    net.generation_config.eos_token_id = None
    rows = work.rows((30, 12))
    job = work.trainer(tmp_path, net, rows, eval_dataset=rows, predict_with_generate=True)
    result = job.predict(rows)
    assert result.predictions.shape[1] >= 31
    assert (result.predictions[:, 0] == net.config.decoder_start_token_id).all()
    assert job.predict(rows, max_new_tokens=4).predictions.shape[1] <= 30  # padded to the labels' width at most


def test_what_a_trainer_saves_loads_and_generates_with_a_cache(tmp_path):
    net = work.model()
    job = work.trainer(tmp_path, net, work.rows(), processing_class=work.tokenizer())
    job.train()
    job.save_model(tmp_path / "saved")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert type(again) is type(net) and worst(dict(again.named_parameters()), dict(net.named_parameters())) == 0
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["use_cache"] is True
    calls = []
    again.model.decoder.layers[0].encoder_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))
    again.generate(torch.tensor([[5, 6, 2]]), max_new_tokens=5, min_new_tokens=5)
    assert len(calls) == 1
