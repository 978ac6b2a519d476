"""The same global batch gives the same gradient, however it is cut: accumulation, processes, fillings."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training.gradients import check_gradients, compare_cuts, gradient
from metaphrase.training.loop import add_gradients, share_counts
from metaphrase.training.stream import Update


class GivenLosses(torch.nn.Module):
    """Its loss a token is written in the batch, times a weight of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, losses, labels, num_items_in_batch):
        return SimpleNamespace(loss=self.weight * losses[labels >= 0].sum() / num_items_in_batch)


def batch(*losses: float, counted: bool = True) -> dict[str, torch.Tensor]:
    values = torch.tensor([losses])
    return {"losses": values, "labels": torch.full(values.shape, 5 if counted else -100)}


def learn_from(*batches: dict[str, torch.Tensor]) -> tuple[float, float]:
    accelerator, model = Accelerator(cpu=True), GivenLosses()
    tokens = sum(int((one["labels"] >= 0).sum()) for one in batches)
    update = Update(list(batches), tokens, [np.arange(1)] * len(batches))
    counts = share_counts(accelerator, tokens, False, False)
    loss = add_gradients(accelerator, model, update, counts[0].clamp(min=1))
    return float(loss), float(model.weight.grad)


def test_accumulated_loss_is_the_mean_over_tokens():  # LOSS-GA
    assert learn_from(batch(4.0), batch(1.0, 1.0, 1.0)) == (1.75, 1.75)
    assert learn_from(batch(4.0, 1.0, 1.0, 1.0)) == (1.75, 1.75)


def test_a_batch_that_counts_for_nothing_changes_nothing():  # LOSS-ALLIGN
    assert learn_from(batch(4.0), batch(9.0, counted=False), batch(1.0, 1.0, 1.0)) == (1.75, 1.75)
    assert learn_from(batch(9.0, counted=False)) == (0.0, 0.0)


@pytest.fixture
def config() -> MetaphraseConfig:
    return MetaphraseConfig.from_preset(
        "base", vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0, init_std=0.3,
    )  # fmt: skip


def pairs(seed: int, rows: int, longest: int) -> list[tuple[list[int], list[int]]]:
    draw = np.random.default_rng(seed)

    def side() -> list[int]:
        return [*draw.integers(4, 40, draw.integers(1, longest)).tolist(), 2]

    return [(side(), side()) for _ in range(rows)]


@pytest.mark.parametrize(
    ("smoothing", "processes", "overlapped"),
    [
        (0.0, (), False),
        (0.1, (2,), False),
        pytest.param(0.1, (2, 3, 4), True, marks=pytest.mark.slow),  # DDP
        pytest.param(0.1, (3, 4), False, marks=pytest.mark.slow),
    ],
)
def test_the_real_models_gradient_does_not_depend_on_the_cut(config, smoothing, processes, overlapped):
    """LOSS-GA, LOSS-DDP"""
    config.label_smoothing = smoothing
    # unequal token counts, a last short batch, and an odd number of batches, so that one process gets a filling
    batches = [pairs(1, 7, 12), pairs(2, 5, 3), pairs(3, 1, 20)]
    checks = compare_cuts(config, batches, processes=processes, overlapped=overlapped)
    assert len(checks) == 4 + len(processes)
    assert all(check.passed for check in checks), checks
    assert checks[0].norm > 0.1


def test_only_labels_that_count_for_nothing_leave_the_weights_finite(config):  # LOSS-ALLIGN
    torch.manual_seed(0)
    model = MetaphraseForConditionalGeneration(config).train()
    loss, gradients = gradient(model, [], filling=pairs(1, 3, 5))
    assert loss == 0.0 and all(not one.any() for one in gradients.values())


def test_a_mean_of_means_would_be_seen(config, monkeypatch):
    def wrong(accelerator, model, update, tokens):
        parts = []
        for one in update.batches:
            divisor = (one["labels"] >= 0).sum() * len(update.batches)
            parts.append(add_gradients(accelerator, model, Update([one], 0, [np.arange(1)]), divisor))
        return sum(parts)

    monkeypatch.setattr("metaphrase.training.gradients.add_gradients", wrong)
    checks = compare_cuts(config, [pairs(1, 4, 12), pairs(2, 4, 3)], processes=())
    assert checks[0].passed and not checks[1].passed


def test_checks_a_users_own_data(tiny_options):
    checks = check_gradients(tiny_options(), batches=3, processes=())
    assert len(checks) == 4 and all(check.passed for check in checks), checks
    assert checks[0].name.startswith("1 batch of ")
