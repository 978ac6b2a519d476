"""The paper's schedule: the published case, and that it depends on the number of updates alone."""

import math

import pytest
import torch

from metaphrase.configuration.options import OptimizerOptions
from metaphrase.training.schedule import build_optimizer, learning_rate, peak_learning_rate, set_learning_rate


@pytest.mark.parametrize(("update", "rate"), [(1, 0.03125), (2, 0.0625), (4, 0.125), (8, 0.0883883), (16, 0.0625)])
def test_paper_schedule(update, rate):  # LR-STEP
    peak = peak_learning_rate(OptimizerOptions(warmup=4), d_model=16)
    assert learning_rate(update, peak=peak, warmup=4) == pytest.approx(rate, abs=1e-6)


def test_equals_equation_3():
    peak = peak_learning_rate(OptimizerOptions(warmup=4000), d_model=512)
    for step in (1, 17, 3999, 4000, 4001, 100_000):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert math.isclose(learning_rate(step, peak=peak, warmup=4000), expected, rel_tol=1e-12)


def test_update_0_and_no_warmup_are_defined():
    assert learning_rate(0, peak=1.0, warmup=4) == 0.0
    assert learning_rate(1, peak=1.0, warmup=0) == 1.0
    assert learning_rate(4, peak=1.0, warmup=0) == 0.5


def test_a_given_rate_is_the_highest():
    options = OptimizerOptions(learning_rate=1.5e-3, warmup=1000)
    assert peak_learning_rate(options, d_model=192) == 1.5e-3
    assert max(learning_rate(u, peak=1.5e-3, warmup=1000) for u in range(3000)) == 1.5e-3


def test_adam_is_the_papers_and_decay_is_for_matrices_only():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = build_optimizer(model, OptimizerOptions(weight_decay=0.1))
    assert optimizer.defaults["betas"] == (0.9, 0.98) and optimizer.defaults["eps"] == 1e-9
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.1, 0.0, 0.0, 0.0]
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_without_decay_it_is_plain_adam():
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.load_state_dict(first.state_dict())
    ours = build_optimizer(first, OptimizerOptions())
    set_learning_rate(ours, 0.01)
    plain = torch.optim.Adam(second.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    data = torch.randn(8, 4)
    for _ in range(5):
        for model, optimizer in ((first, ours), (second, plain)):
            optimizer.zero_grad()
            model(data).pow(2).sum().backward()
            optimizer.step()
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
