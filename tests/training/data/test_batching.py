"""Batches: budget, order, shares and positions."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training.data.batching import IGNORED, collate, fill, plan_epoch, share, updates_in

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=200)


def made_up(pairs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    source = random.poisson(14, pairs) + 2
    return source, np.maximum(source + random.integers(-3, 4, pairs), 2)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(30, 200), st.integers(0, 5), st.integers(0, 5))
def test_every_pair_once_and_never_over_the_budget(lengths, tokens, seed, epoch):
    source, target = np.array(lengths).T
    plan = plan_epoch(source, target, tokens=tokens, seed=seed, epoch=epoch)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(source[batch].max(), target[batch].max()) <= tokens for batch in plan)


@pytest.mark.parametrize("tokens", [1024, 2048, 4096])
def test_batches_are_nearly_full(tokens):
    source, target = made_up(29_000)
    plan = plan_epoch(source, target, tokens=tokens, seed=1, epoch=0)
    assert fill(target, plan) >= 0.97
    assert fill(source, plan) >= 0.85
    cost = [len(batch) * max(source[batch].max(), target[batch].max()) for batch in plan]
    assert np.mean(cost) >= 0.95 * tokens


def test_the_order_hangs_on_seed_and_epoch_and_nothing_else():
    lengths = made_up(500)

    def order(**key):
        return plan_epoch(*lengths, tokens=200, **key).order.tolist()

    assert order(seed=1, epoch=3) == order(seed=1, epoch=3)
    assert len({tuple(order(seed=seed, epoch=epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_other_pairs_meet_in_the_next_epoch():
    lengths = made_up(2000)
    meetings = []
    for epoch in (0, 1):
        plan = plan_epoch(*lengths, tokens=200, seed=1, epoch=epoch)
        meetings.append({tuple(sorted(batch)) for batch in plan})
    assert len(meetings[0] & meetings[1]) < 0.1 * len(meetings[0])


def test_a_batch_is_not_followed_by_its_neighbour_in_length():
    source, target = made_up(5000)
    plan = plan_epoch(source, target, tokens=500, seed=1, epoch=0)
    widths = [target[batch].max() for batch in plan]
    assert abs(np.corrcoef(widths[:-1], widths[1:])[0, 1]) < 0.2


def test_a_pair_over_the_budget_is_named_and_left_out(caplog):  # BATCH-LONG
    with caplog.at_level(logging.WARNING):
        plan = plan_epoch([3, 4, 50, 5], [3, 4, 50, 5], tokens=16, seed=1, epoch=0)
    assert sorted(index for batch in plan for index in batch) == [0, 1, 3]
    assert plan.too_long.tolist() == [2]
    assert "pair 2 with 50 tokens" in caplog.text
    with pytest.raises(MetaphraseError, match=r"tokens 16.*pair 0.*20"):
        plan_epoch([20, 30], [1, 1], tokens=16, seed=1, epoch=0)


def test_the_end_token_counts():  # BATCH-LONG
    plan = plan_epoch([5, 5, 5, 5], [5, 5, 5, 5], tokens=16, seed=1, epoch=0)
    assert [len(batch) for batch in plan] in ([3, 1], [1, 3])


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(30, 90))
def test_all_processes_take_the_same_steps_and_all_pairs_once(lengths, world_size, accumulation, tokens):  # BATCH-DDP
    plan = plan_epoch(*np.array(lengths).T, tokens=tokens, seed=1, epoch=0)
    ranks = [list(share(plan, world_size=world_size, rank=r, accumulation=accumulation)) for r in range(world_size)]
    assert {len(updates) for updates in ranks} == {updates_in(plan, world_size=world_size, accumulation=accumulation)}
    assert all(len(update.batches) == accumulation for updates in ranks for update in updates)
    assert all(len(batch.indices) for updates in ranks for update in updates for batch in update.batches)
    real = [batch.indices for updates in ranks for update in updates for batch in update.batches if batch.real]
    assert sorted(np.concatenate(real)) == list(range(len(lengths)))
    assert ranks[0][-1].pairs_after == len(lengths)


def test_an_update_is_the_same_however_it_is_split():
    plan = plan_epoch(*made_up(700), tokens=120, seed=1, epoch=0)

    def updates(world_size, accumulation):
        ranks = [share(plan, world_size=world_size, rank=r, accumulation=accumulation) for r in range(world_size)]
        return [
            sorted(int(i) for rank in parts for batch in rank.batches if batch.real for i in batch.indices)
            for parts in zip(*ranks, strict=True)
        ]

    assert updates(1, 6) == updates(2, 3) == updates(3, 2) == updates(6, 1)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.data())
def test_a_run_goes_on_with_other_processes_and_other_budgets(lengths, data):
    source, target = np.array(lengths).T
    legs, seen = [], []
    for _ in range(3):
        tokens = data.draw(st.integers(30, 120))
        plan = plan_epoch(source, target, tokens=tokens, seed=3, epoch=1, legs=legs)
        done = 0
        for _ in range(2):  # the same budget, then another number of processes
            size = data.draw(st.integers(1, 3))
            updates = list(share(plan, accumulation=size, start=done))
            for update in updates[: data.draw(st.integers(0, len(updates)))]:
                seen += [int(i) for batch in update.batches if batch.real for i in batch.indices]
                done = update.pairs_after
        legs.append((tokens, done))
    rest = plan_epoch(source, target, tokens=50, seed=3, epoch=1, legs=legs)
    assert sorted(seen + rest.order.tolist()) == list(range(len(lengths)))


def test_a_larger_budget_brings_the_pairs_that_the_smaller_one_had_no_room_for():
    lengths = np.array([3, 4, 50, 5, 6, 40])
    before = plan_epoch(lengths, lengths, tokens=16, seed=1, epoch=0)
    assert sorted(before.too_long) == [2, 5]
    done = int(before.starts[1])
    rest = plan_epoch(lengths, lengths, tokens=60, seed=1, epoch=0, legs=[(16, done)])
    assert sorted(before.order[:done].tolist() + rest.order.tolist()) == list(range(6)) and not len(rest.too_long)


def test_a_position_between_batches_only():
    plan = plan_epoch(*made_up(300), tokens=120, seed=1, epoch=0)
    assert plan.batch_at(0) == 0
    assert plan.batch_at(plan.pairs) == len(plan)
    with pytest.raises(ValueError, match="no batch begins after"):
        plan.batch_at(int(plan.starts[1]) - 1 or 10**6)


def test_collate_pads_right_and_ignores_padding_in_labels():
    batch = collate([([5, 6, 2], [7, 2]), ([8, 2], [9, 10, 11, 2])])
    assert batch["input_ids"].tolist() == [[5, 6, 2], [8, 2, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[7, 2, IGNORED, IGNORED], [9, 10, 11, 2]]
    assert all(tensor.dtype == torch.long for tensor in batch.values())
    filling = collate([([5, 2], [7, 2])], real=False)
    assert filling["labels"].tolist() == [[IGNORED, IGNORED]]
