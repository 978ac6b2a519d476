"""A batch learned from in several threads: the gradient of the whole, the same bits each time, or left whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.dropout import keep_scale, random_from
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import loop, parts, states, together
from metaphrase.training.objective import make_loss, plain_loss
from metaphrase.training.run import train
from metaphrase.training.stream import Update


@pytest.fixture(autouse=True)
def four_threads():
    """As on a machine with four cores, even where there are fewer; and batches of a few tokens are worth a part."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "LEAST", 1)
        yield
    torch.set_num_threads(before)


def make_model(**changes: object) -> MetaphraseForConditionalGeneration:
    """Weights large enough that a fault shows."""
    torch.manual_seed(1)
    sizes = {
        **{f"{stack}_layers": 2 for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": 32 for stack in ("encoder", "decoder")},
        **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
    }
    config = {"vocab_size": 40, "d_model": 16, "dropout": 0.0, "label_smoothing": 0.1, "init_std": 0.3, **sizes}
    return MetaphraseForConditionalGeneration(MetaphraseConfig(**{**config, **changes})).train()


def make_batch(rows: int = 7, *, ignored: slice = slice(0)) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    source, labels = (torch.randint(4, 40, (rows, length), generator=draw) for length in (6, 5))
    mask = torch.ones_like(source)
    mask[::2, -2:] = 0
    labels[1::3, -2:] = -100
    labels[ignored] = -100
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def learn(model, batch, number: int | None, loss_of=plain_loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradient from so many parts; with None as autograd gives them for the whole batch."""
    tokens = torch.tensor(30.0)
    model.zero_grad()
    if number is None:
        loss = loss_of(model, batch, tokens)
        loss.backward()
    else:
        loss = parts.add_gradient(model, batch, tokens, loss_of, number)
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("rdrop", [0.0, 2.0])
@pytest.mark.parametrize("ignored", [slice(0), slice(0, 4), slice(None)], ids=["some", "a whole part", "all"])
def test_parts_have_the_gradient_of_the_whole(number, rdrop, ignored):
    model, batch, loss_of = make_model(), make_batch(ignored=ignored), make_loss(rdrop)
    (loss, slow), (value, fast) = learn(model, batch, None, loss_of), learn(model, batch, number, loss_of)
    assert value.item() == pytest.approx(loss.item(), rel=1e-6)
    assert slow.keys() == fast.keys()
    largest = max(gradient.abs().max() for gradient in slow.values())
    assert largest > 0.01 or ignored == slice(None)
    for name, gradient in slow.items():
        assert (fast[name] - gradient).abs().max() <= 1e-6 * max(largest, 1e-3), name


def test_gradients_are_added_to_those_that_are_there_and_frozen_ones_stay_out():
    model, batch = make_model(), make_batch()
    frozen = model.model.encoder.layers[0].fc1.weight.requires_grad_(False)
    _, once = learn(model, batch, 2)
    parts.add_gradient(model, batch, torch.tensor(30.0), plain_loss, 2)
    for name, parameter in model.named_parameters():
        if parameter is frozen:
            assert parameter.grad is None
        else:
            assert torch.allclose(parameter.grad, 2 * once[name], atol=1e-7), name


@pytest.mark.parametrize("number", [2, 4])
def test_with_dropout_the_seed_settles_every_bit(number):
    model, batch = make_model(dropout=0.4), make_batch(rows=40)
    torch.manual_seed(5)
    _, first = learn(model, batch, number)
    state = torch.get_rng_state()
    for _ in range(5):
        torch.manual_seed(5)
        _, again = learn(model, batch, number)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert torch.equal(state, torch.get_rng_state())
    _, other = learn(model, batch, number)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_each_thread_draws_its_own_numbers():
    ones = torch.ones(1000)
    with random_from(torch.Generator().manual_seed(1)):
        first = keep_scale(ones, 0.5)
    with random_from(torch.Generator().manual_seed(2)):
        second = keep_scale(ones, 0.5)
    with random_from(torch.Generator().manual_seed(1)):
        assert torch.equal(first, keep_scale(ones, 0.5)) and not torch.equal(first, second)
        with random_from(torch.Generator().manual_seed(2)):
            assert torch.equal(second, keep_scale(ones, 0.5))
        state = torch.get_rng_state()
        keep_scale(ones, 0.5)  # after an inner one, the outer one is taken again
        assert torch.equal(state, torch.get_rng_state())
    state = torch.get_rng_state()
    keep_scale(ones, 0.5)  # outside it is torch's own generator again
    assert not torch.equal(state, torch.get_rng_state())


def test_a_part_that_fails_changes_no_gradient_and_threads_are_as_before():
    model, batch = make_model(), make_batch()

    def fails(model, rows, tokens):
        if len(rows["labels"]) == 3:
            raise RuntimeError("no memory for three")
        return plain_loss(model, rows, tokens)

    with pytest.raises(RuntimeError, match="no memory for three"):
        parts.add_gradient(model, batch, torch.tensor(30.0), fails, 2)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.get_num_threads() == 4
    update = Update([batch], 30, [np.arange(7)])
    with pytest.raises(together.BatchFailed, match="three"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MOST", 2)
        loop.add_gradients(Accelerator(cpu=True), model, update, torch.tensor(30.0), fails)


def test_when_a_batch_is_cut(monkeypatch):
    def number(rows=40, mixed_precision="no", **changes) -> int:
        return parts.number_of_parts(make_model(**changes), make_batch(rows), mixed_precision)

    assert number() == 4
    assert number(rows=3) == 3 and number(rows=1) == 1
    assert number(attention_dropout=0.1) == 1
    assert number(mixed_precision="bf16") == 1
    model = make_model()
    assert parts.number_of_parts(torch.compile(model, backend="eager"), make_batch(40)) == 1
    model.compile(backend="eager")  # in place, as `compile: true` does
    assert parts.number_of_parts(model, make_batch(40)) == 1
    model = make_model()
    model.activation_checkpointing_enable()
    assert parts.number_of_parts(model, make_batch(40)) == 1
    monkeypatch.setattr(parts, "LEAST", 100)
    assert number(rows=39) == 1 and number(rows=40) == 2  # 5 positions a row
    monkeypatch.setattr(parts, "LEAST", 1)
    torch.set_num_threads(1)
    assert number() == 1
    torch.set_num_threads(16)
    assert number() == parts.MOST


def test_a_run_in_parts_goes_on_bit_for_bit(tiny_options, tmp_path, monkeypatch):
    """Stopped and resumed with as many threads, it ends with the weights of the run that was not."""
    numbers, honest = [], parts.add_gradient

    def counted(*args):
        numbers.append(args[-1])
        return honest(*args)

    monkeypatch.setattr(parts, "add_gradient", counted)
    changes = {"threads": 2, "evaluation.metrics": [], "model": {**tiny_options().model, "dropout": 0.3}}
    straight = train(tiny_options(output=str(tmp_path / "straight"), **changes), recipe_name="tiny")
    train(tiny_options(max_updates=7, **changes), recipe_name="tiny")
    folder = train(tiny_options(**changes), recipe_name="tiny", resume=True)
    assert numbers == [2] * 24
    one, two = (final_weights(run) for run in (straight, folder))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return states.load_tensors(run / "checkpoints" / "checkpoint-12" / "model.safetensors")
