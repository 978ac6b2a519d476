"""The fast dropout against torch's: same statistics, same gradient, same reproducibility."""

import pytest
import torch
from torch import nn

from metaphrase.modeling.dropout import Dropout, dropout_from_bits, keep_scale

PROBABILITIES = [0.05, 0.1, 0.15, 0.3, 0.5, 0.9]


@pytest.mark.parametrize("p", PROBABILITIES)
def test_as_many_are_dropped_as_torch_drops(p):
    torch.manual_seed(0)
    ones = torch.ones(1000, 1000)
    ours, theirs = dropout_from_bits(ones, p), nn.functional.dropout(ones, p)
    deviation = (p * (1 - p) / ones.numel()) ** 0.5
    assert abs((ours == 0).float().mean() - p) < 5 * deviation + 2**-16
    assert abs((ours == 0).float().mean() - (theirs == 0).float().mean()) < 8 * deviation + 2**-16
    assert ours.mean().item() == pytest.approx(1, abs=6 * deviation / (1 - p))
    assert ours.max().item() == pytest.approx(1 / (1 - p), rel=1e-3)


def test_draws_are_independent_of_their_neighbours():
    """Four draws come from one 64-bit word: every pair of lanes and neighbours must be uncorrelated."""
    torch.manual_seed(1)
    kept = keep_scale(torch.empty(400_000), 0.5).view(-1, 4).sign()
    table = torch.corrcoef(torch.cat([kept[:-1], kept[1:]], dim=1).t())
    assert (table - torch.eye(8)).abs().max() < 6 / len(kept) ** 0.5


@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 3, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_shape_and_type(shape, dtype):
    out = dropout_from_bits(torch.ones(shape, dtype=dtype), 0.25)
    assert out.shape == shape and out.dtype == dtype
    assert set(out.flatten().tolist()) <= {0.0, torch.tensor(2**16 / (2**16 - 2**14), dtype=dtype).item()}


def test_gradient_passes_where_the_value_passed():
    torch.manual_seed(2)
    inputs = torch.randn(64, 64, requires_grad=True)
    out = dropout_from_bits(inputs, 0.3)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    slow = torch.where(out == 0, 0.0, 1.0) * (2**16 / (2**16 - round(0.3 * 2**16)))
    assert torch.equal(inputs.grad, upstream * slow) and torch.equal(out, inputs * slow)


def test_follows_the_seed_and_is_still_in_evaluation():
    layer, inputs = Dropout(0.2), torch.randn(100)
    torch.manual_seed(3)
    first = layer(inputs)
    second = layer(inputs)
    torch.manual_seed(3)
    assert torch.equal(first, layer(inputs)) and not torch.equal(first, second)
    assert torch.equal(layer.eval()(inputs), inputs)


def test_checkpointing_draws_the_same_mask_again():
    layer, inputs = Dropout(0.5), torch.randn(100, requires_grad=True)
    torch.manual_seed(4)
    out = torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(inputs.grad == 0, out == 0)
