"""Each kernel against its slow twin in float64: values, gradients, edges, and what it leaves to the twin."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from metaphrase.modeling.attention import eager_attention
from metaphrase.modeling.dropout import Dropout, random_from
from metaphrase.modeling.loss import cross_entropy_per_token, loss_and_gradients
from metaphrase.training.kernels import functions


def close(found: torch.Tensor, wanted: torch.Tensor, within: float = 1e-5) -> None:
    """Equal to within a share of the largest entry."""
    assert found.shape == wanted.shape
    assert (found.double() - wanted.double()).abs().max() <= within * wanted.abs().max().clamp(min=0.1)


def learnt(result: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a sum in which every entry weighs otherwise."""
    weights = torch.arange(result.numel(), dtype=torch.float64).cos().to(result.dtype).view_as(result)
    return list(torch.autograd.grad((result * weights).sum(), inputs))


def asking(*tensors: torch.Tensor, double: bool = False) -> list[torch.Tensor]:
    return [(tensor.double() if double else tensor).detach().clone().requires_grad_() for tensor in tensors]


# --- the loss


def loss_inputs(rows: int, entries: int, width: int, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=draw) * 2
    weight = torch.randn(entries, width, generator=draw) / 2
    return hidden, weight, torch.randint(0, entries, (rows,), generator=draw)


SHAPES = [
    (1, 1, 16),
    (1, 17, 16),
    (5, 16, 32),
    (6, 33, 48),
    (143, 40, 16),
    (144, 41, 16),
    (145, 130, 64),
    (300, 1003, 128),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_both_gradients_are_those_of_the_formula(compiled, shape, smoothing):
    hidden, weight, labels = loss_inputs(*shape)
    labels[1::4] = -100
    total, grad_hidden, grad_weight = compiled.loss(hidden, weight, labels, smoothing, True)
    h, w = asking(hidden, weight, double=True)
    wanted = nn.functional.cross_entropy(h @ w.t(), labels, label_smoothing=smoothing, reduction="sum")
    for found, right in zip(
        (total, grad_hidden, grad_weight), (wanted, *torch.autograd.grad(wanted, (h, w))), strict=True
    ):
        close(found, right.detach())


def test_the_loss_of_scores_far_from_each_other_stays_finite(compiled):
    hidden, weight, labels = loss_inputs(50, 60, 32)
    found = compiled.loss(hidden * 300, weight, labels, 0.1, True)
    wanted = loss_and_gradients((hidden * 300).double(), weight.double(), labels, 0.1, True)
    assert wanted[0] > 1e4
    for one, other in zip(found, wanted, strict=True):
        close(one, other, within=1e-4)


@pytest.mark.parametrize("place", [0, 63, 149])
def test_the_loss_does_not_hide_nan_or_infinity(compiled, place):
    for value in (float("nan"), float("inf")):
        hidden, weight, labels = loss_inputs(150, 40, 16)
        hidden[place, 3] = value
        total, grad_hidden, grad_weight = compiled.loss(hidden, weight, labels, 0.1, True)
        assert not total.isfinite()
        assert grad_hidden[place].isnan().any()
        assert not grad_weight.isfinite().all()


def test_where_nothing_counts_the_loss_and_its_gradients_are_zero(compiled):
    hidden, weight, labels = loss_inputs(20, 30, 16)
    results = compiled.loss(hidden, weight, torch.full_like(labels, -100), 0.1, True)
    assert all((result == 0).all() for result in results)


@pytest.mark.parametrize("label", [-1, 40, 10**9])
def test_a_label_outside_the_vocabulary_is_the_twins_error(compiled, label):
    hidden, weight, labels = loss_inputs(20, 40, 16)
    labels[7] = label
    with pytest.raises((IndexError, RuntimeError)) as said:
        compiled.loss(hidden, weight, labels, 0.1, True)
    with pytest.raises(type(said.value)):
        loss_and_gradients(hidden, weight, labels, 0.1, True)


def test_inputs_that_are_not_contiguous(compiled):
    hidden, weight, labels = loss_inputs(30, 40, 16)
    wide = torch.randn(30, 32)
    wide[:, ::2] = hidden
    for found, wanted in zip(
        compiled.loss(wide[:, ::2], weight.t().contiguous().t(), labels, 0.1, True),
        compiled.loss(hidden, weight, labels, 0.1, True),
        strict=True,
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("why", ["width", "size", "no gradient"])
def test_what_the_loss_leaves_to_its_twin(compiled, monkeypatch, why):
    called = []
    monkeypatch.setattr(functions, "loss_and_gradients", lambda *given: called.append(given))
    if why == "size":
        monkeypatch.setattr(functions, "LARGEST_PROJECTION", 100)
    hidden, weight, labels = loss_inputs(5, 40, 20 if why == "width" else 16)
    compiled.loss(hidden, weight, labels, 0.1, why != "no gradient")
    assert len(called) == 1


# --- linear layers


@pytest.mark.parametrize("rows", [32, 119, 120, 121, 125, 126, 127, 250])
@pytest.mark.parametrize("sizes", [(16, 16), (48, 16), (16, 48), (128, 256)])
@pytest.mark.parametrize("relu", [False, True])
def test_a_linear_layer(compiled, rows, sizes, relu):
    torch.manual_seed(rows)
    layer = nn.Linear(*sizes)
    inputs, *parameters = asking(torch.randn(rows, sizes[0]) * 3, layer.weight, layer.bias)
    mine = nn.Linear(*sizes)
    mine.weight, mine.bias = (nn.Parameter(tensor) for tensor in parameters)
    (found,) = compiled.linear([mine], inputs, nn.ReLU() if relu else None)
    x, w, b = asking(inputs, *parameters, double=True)
    wanted = nn.functional.linear(x, w, b)
    wanted = wanted.relu() if relu else wanted
    close(found, wanted)
    for one, other in zip(learnt(found, inputs, mine.weight, mine.bias), learnt(wanted, x, w, b), strict=True):
        close(one, other)


def test_a_linear_layer_of_many_dimensions_and_another_activation(compiled):
    torch.manual_seed(0)
    layer, inputs = nn.Linear(16, 32), torch.randn(3, 5, 7, 16)
    close(compiled.linear([layer], inputs, nn.GELU())[0], nn.functional.gelu(layer(inputs)))
    assert compiled.linear([layer], inputs, None)[0].shape == (3, 5, 7, 32)


@pytest.mark.parametrize("rows", [32, 121, 127, 245, 250])
@pytest.mark.parametrize("sizes", [(16, 16), (48, 32), (16, 80)])
@pytest.mark.parametrize("number", [2, 3])
def test_linear_layers_that_share_an_input(compiled, rows, sizes, number):
    torch.manual_seed(rows)
    layers, inputs = (
        [nn.Linear(*sizes) for _ in range(number)],
        torch.randn(2, rows // 2 + 1, sizes[0]).requires_grad_(),
    )
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    found = torch.cat(compiled.linear(layers, inputs, None), -1)
    exact, *parts = asking(inputs, *parameters, double=True)
    wanted = torch.cat([nn.functional.linear(exact, *parts[i : i + 2]) for i in range(0, len(parts), 2)], -1)
    close(found, wanted.detach())
    for one, other in zip(learnt(found, inputs, *parameters), learnt(wanted, exact, *parts), strict=True):
        close(one, other)


def test_of_layers_that_share_an_input_some_may_not_be_learnt_from(compiled):
    torch.manual_seed(0)
    layers, inputs = [nn.Linear(16, 16) for _ in range(3)], torch.randn(40, 16)
    layers[1].requires_grad_(False)
    compiled.linear(layers, inputs, None)[2].sum().backward()
    assert layers[1].weight.grad is None
    assert (layers[0].weight.grad == 0).all()
    close(layers[2].weight.grad, inputs.sum(0).expand(16, 16))


def test_layers_of_several_sizes_are_left_to_their_twins(compiled):
    torch.manual_seed(0)
    layers, inputs = [nn.Linear(16, 16), nn.Linear(16, 32)], torch.randn(40, 16)
    for result, layer in zip(compiled.linear(layers, inputs, None), layers, strict=True):
        assert torch.equal(result, layer(inputs))


@pytest.mark.parametrize(("sizes", "rows"), [((16, 20), 64), ((20, 16), 64), ((16, 16), 31), ((512, 512), 64)])
def test_what_a_linear_layer_leaves_to_its_twin(compiled, sizes, rows):
    layer, inputs = nn.Linear(*sizes), torch.randn(rows, sizes[0])
    for activation in (None, nn.ReLU()):
        (result,) = compiled.linear([layer], inputs, activation)
        assert "_Linear" not in str(result.grad_fn)
        assert torch.equal(result, layer(inputs) if activation is None else activation(layer(inputs)))


@pytest.mark.parametrize("relu", [False, True])
def test_a_linear_layer_does_not_hide_nan(compiled, relu):
    torch.manual_seed(0)
    layer, inputs = nn.Linear(16, 16), torch.randn(40, 16)
    inputs[33, 2] = float("nan")
    inputs.requires_grad_()
    (result,) = compiled.linear([layer], inputs, nn.ReLU() if relu else None)
    assert result[33].isnan().all()
    assert not result[:33].isnan().any()
    assert layer.weight.grad is None
    result.sum().backward()
    assert layer.weight.grad.isnan().any()


# --- LayerNorm after dropout


@pytest.mark.parametrize("shape", [(1, 16), (5, 3, 32), (2, 7, 128), (300, 48)])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_layer_norm_after_dropout_with_the_twins_own_masks(compiled, shape, p):
    torch.manual_seed(4)
    norm = nn.LayerNorm(shape[-1])
    nn.init.uniform_(norm.weight, -2, 2)
    nn.init.uniform_(norm.bias, -2, 2)
    states, update = torch.randn(*shape) * 3 + 5, torch.randn(*shape) * 3
    s, u = asking(states, update)
    with random_from(torch.Generator().manual_seed(8)):
        found = compiled.add_norm(s, u, Dropout(p).train(), norm)
    gradients = learnt(found, s, u, norm.weight, norm.bias)
    s, u = asking(states, update)
    with random_from(torch.Generator().manual_seed(8)):
        wanted = norm(s + Dropout(p).train()(u))
    assert not torch.equal(wanted, norm(s + u))
    close(found, wanted.detach())
    for one, other in zip(gradients, learnt(wanted, s, u, norm.weight, norm.bias), strict=True):
        close(one, other, within=3e-5)


def test_layer_norm_after_dropout_in_float64_terms(compiled):
    """Rows whose mean is large beside their spread, where a one-pass variance would cancel."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(64)
    states, update = torch.randn(50, 64) + 1000, torch.zeros(50, 64)
    close(
        compiled.add_norm(states, update, Dropout(0.5).train(), norm),
        copy.deepcopy(norm).double()(states.double()),
        1e-3,
    )


@pytest.mark.parametrize("why", ["no dropout", "all dropped", "width", "no bias"])
def test_what_layer_norm_leaves_to_its_twin(compiled, why):
    width = 20 if why == "width" else 32
    norm = nn.LayerNorm(width, bias=why != "no bias")
    dropout = Dropout({"no dropout": 0.0, "all dropped": 1.0}.get(why, 0.3)).train()
    torch.manual_seed(1)
    result = compiled.add_norm(torch.randn(4, width, requires_grad=True), torch.randn(4, width), dropout, norm)
    assert "_AddNorm" not in str(result.grad_fn)


# --- attention


class Asked(nn.Module):
    """What a backend sees of the layer that calls it."""

    def __init__(self, is_causal: bool = False):
        super().__init__()
        self.is_causal = is_causal


def heads(rows: int, length: int, number: int, size: int, scale: float = 1.5) -> torch.Tensor:
    """As a projection leaves them: [B, H, T, D], with the heads of a position side by side."""
    return (torch.randn(rows, length, number * size) * scale).unflatten(-1, (number, size)).transpose(1, 2)


def make_mask(kind: str | None, rows: int, asking_length: int, asked: int) -> torch.Tensor | None:
    if kind is None:
        return None
    shape = {
        "padding": (rows, 1, 1, asked),
        "each": (rows, 1, asking_length, asked),
        "same": (1, 1, asking_length, asked),
    }
    mask = torch.rand(shape[kind]) > 0.4
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 9), (9, 2), (7, 7), (8, 8), (13, 16), (17, 15), (31, 33), (64, 64)])
@pytest.mark.parametrize("kind", [None, "causal", "padding", "each", "same"])
def test_attention(compiled, size, lengths, kind):
    torch.manual_seed(size + lengths[0])
    if kind == "causal":
        lengths = (lengths[0], lengths[0])
    query, key, value = heads(3, lengths[0], 2, size), heads(3, lengths[1], 2, size), heads(3, lengths[1], 2, size)
    mask = make_mask(None if kind == "causal" else kind, 3, *lengths)
    module = Asked(kind == "causal").train()
    q, k, v = asking(query, key, value)
    found, weights = compiled.attention(module, q, k, v, mask, scaling=0.3)
    assert weights is None
    assert "_Attention" in str(found.grad_fn)
    gradients = learnt(found, q, k, v)
    if kind == "causal":
        mask = torch.ones(lengths, dtype=torch.bool).tril()[None, None]
    q, k, v = asking(query, key, value, double=True)
    wanted, _ = eager_attention(module, q, k, v, mask, 0.3)
    close(found, wanted.detach())
    for one, other in zip(gradients, learnt(wanted, q, k, v), strict=True):
        close(one, other)


def test_attention_of_a_row_that_may_ask_nothing_is_zero(compiled):
    torch.manual_seed(0)
    q, k, v = asking(*(heads(2, 5, 2, 16) for _ in range(3)))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 2] = False
    found, _ = compiled.attention(Asked().train(), q, k, v, mask, scaling=0.25)
    assert (found[1, 2] == 0).all()
    assert not (found[0] == 0).any()
    gradients = learnt(found, q, k, v)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][1, :, 2] == 0).all()


def test_attention_with_scores_far_from_each_other(compiled):
    torch.manual_seed(0)
    query, key, value = (heads(2, 9, 2, 16, scale=40.0) for _ in range(3))
    q, k, v = asking(query, key, value)
    found, _ = compiled.attention(Asked().train(), q, k, v, None, scaling=1.0)
    wanted, _ = eager_attention(Asked(), *asking(query, key, value, double=True), None, 1.0)
    assert (query @ key.transpose(2, 3)).abs().max() > 1e4
    close(found, wanted.detach())
    assert all(gradient.isfinite().all() for gradient in learnt(found, q, k, v))


def test_attention_does_not_hide_nan(compiled):
    torch.manual_seed(0)
    query, key, value = (heads(2, 9, 2, 16) for _ in range(3))
    key[1, 0, 4, 3] = float("nan")
    found, _ = compiled.attention(Asked().train(), query, key, value, None, scaling=1.0)
    assert found[1, :, 0].isnan().all()
    assert found[0].isfinite().all()
    assert found[1, :, 1].isfinite().all()


@pytest.mark.parametrize("why", ["long", "size", "additive mask", "causal past"])
def test_what_attention_leaves_to_its_twin(compiled, why):
    torch.manual_seed(0)
    length, size = (functions.LONGEST + 1 if why == "long" else 5), (20 if why == "size" else 16)
    query, key, value = asking(*(heads(2, length, 2, size) for _ in range(3)))
    mask = torch.zeros(2, 1, length, length) if why == "additive mask" else None
    if why == "causal past":
        query = query[:, :, 2:]
    result, _ = compiled.attention(Asked(why == "causal past").train(), query, key, value, mask, scaling=0.2)
    assert "_Attention" not in str(result.grad_fn)


# --- both


def test_the_same_bits_each_time(compiled):
    hidden, weight, labels = loss_inputs(200, 300, 32)
    first, second = (compiled.loss(hidden, weight, labels, 0.1, True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    loss = cross_entropy_per_token(hidden @ weight.t(), labels, 0.1, len(labels))
    close(first[0] / len(labels), loss)


def test_inputs_of_another_width_are_the_twins_error(compiled):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compiled.linear([nn.Linear(32, 32)], torch.randn(64, 64), None)


def test_states_that_are_broadcast_are_left_to_the_twin(compiled):
    torch.manual_seed(0)
    norm, update = nn.LayerNorm(32), torch.randn(9, 8, 32)
    assert compiled.add_norm(torch.randn(1, 8, 32), update, Dropout(0.5).train(), norm).shape == (9, 8, 32)
    over_two = nn.LayerNorm((8, 32))
    result = compiled.add_norm(torch.randn(9, 8, 32, requires_grad=True), update, Dropout(0.5).train(), over_two)
    assert "_AddNorm" not in str(result.grad_fn)


def test_a_norm_that_overflows_gives_nan(compiled):
    states = torch.randn(3, 16)
    states[1] *= 1e25
    result = compiled.add_norm(states, torch.zeros(3, 16), Dropout(0.5).train(), nn.LayerNorm(16))
    assert result[1].isnan().all()
    assert result[::2].isfinite().all()


def test_other_default_types_change_nothing(compiled):
    hidden, weight, labels = loss_inputs(150, 300, 32)
    wanted = compiled.loss(hidden, weight, labels, 0.1, True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = compiled.loss(hidden, weight, labels, 0.1, True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, wanted))


def test_a_second_derivative_is_refused(compiled):
    torch.manual_seed(0)
    inputs = torch.randn(40, 16, requires_grad=True)
    result = compiled.linear([nn.Linear(16, 16)], inputs, None)[0].sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(result, inputs, create_graph=True)
