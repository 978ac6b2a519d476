"""Batches of so many tokens under the stock Trainer: every pair once an epoch, on any number of processes."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training.data.token_batches import PairCollator, TokenBatchSampler, halve_largest, pair_lengths

from . import token_work

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=8, max_size=200)


def epoch_of(sampler: TokenBatchSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(40, 300), st.integers(1, 3), st.integers(0, 9))
def test_every_epoch_has_each_pair_once_and_the_same_number_of_batches(lengths, tokens, processes, seed):
    source, target = zip(*lengths, strict=True)
    alone = len(TokenBatchSampler(source, target, tokens=tokens, seed=seed))
    if -(-alone // processes) * processes > len(lengths):  # a batch a pair, and their number is no multiple
        with pytest.raises(MetaphraseError, match=f"{len(lengths)} pairs cannot be shared by {processes} processes"):
            TokenBatchSampler(source, target, tokens=tokens, seed=seed, multiple_of=processes)
        return
    sampler = TokenBatchSampler(source, target, tokens=tokens, seed=seed, multiple_of=processes)
    assert len(sampler) % processes == 0
    for epoch in range(4):
        batches = epoch_of(sampler, epoch)
        assert len(batches) == len(sampler) and all(batches)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        assert max(len(batch) * max(max(lengths[i]) for i in batch) for batch in batches) <= tokens


def test_pairs_meet_and_come_in_another_order_each_epoch():
    source, target = np.random.default_rng(0).integers(2, 30, (2, 2000))
    sampler = TokenBatchSampler(source, target, tokens=400)
    first, second = epoch_of(sampler, 0), epoch_of(sampler, 1)
    assert epoch_of(sampler, 0) == first != second
    assert {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second} != set(map(frozenset, first))
    filled = sum(int(target[batch].sum()) for batch in first)
    held = sum(len(batch) * max(target[batch].max(), source[batch].max()) for batch in first)
    assert filled / held > 0.6  # drawn independently, sides differ in length; a random batch holds about half


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 20))
def test_halving_loses_nothing_and_leaves_nothing_empty(sizes, more):
    whole = np.arange(sum(sizes))
    batches = np.split(whole, np.cumsum(sizes)[:-1])
    count = min(len(batches) + more, len(whole))
    parts = halve_largest(batches, count)
    assert len(parts) == count and all(len(part) for part in parts)
    assert sorted(np.concatenate(parts)) == whole.tolist()
    assert max(map(len, parts)) <= max(sizes) and (not more or len(parts) > len(batches) or len(whole) == len(batches))


def test_the_collator_pads_on_the_right_and_leaves_other_columns_out():
    batch = PairCollator(pad_token_id=7)(
        [{"input_ids": [4, 2], "labels": [5, 6, 2], "text": "a"}, {"input_ids": [4, 5, 2], "labels": [2], "text": "b"}]
    )
    assert batch["input_ids"].tolist() == [[4, 2, 7], [4, 5, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[5, 6, 2], [2, -100, -100]]


def test_lengths_of_lists_and_of_arrow_are_the_same():
    rows = token_work.rows()
    for ours, arrow in zip(pair_lengths(rows), pair_lengths(datasets.Dataset.from_list(rows)), strict=True):
        assert ours.tolist() == arrow.tolist() and len(set(ours.tolist())) > 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (iter([]), "known length, not list_iterator"),
        (datasets.Dataset.from_dict({"input_ids": [[1]], "text": ["a"]}), "no column 'labels', only input_ids, text"),
        ([{"input_ids": [1]}], "lacks `input_ids` or `labels`"),
    ],
)
def test_data_that_cannot_be_batched_is_refused_in_one_sentence(data, words):
    with pytest.raises(MetaphraseError, match=words):
        pair_lengths(data)


def test_too_few_pairs_for_the_processes():
    with pytest.raises(MetaphraseError, match="2 pairs cannot be shared by 3 processes"):
        TokenBatchSampler([3, 3], [3, 3], tokens=10, multiple_of=3)


def test_a_trainer_goes_on_from_a_checkpoint_as_if_never_stopped(tmp_path):
    whole, seen = token_work.train(tmp_path)
    half = len(seen) // 2
    for epoch in (seen[:half], seen[half:]):
        assert sorted(index for batch in epoch for index in batch) == list(range(41))
    assert seen[:half] != seen[half:]
    again, seen_again = token_work.train(tmp_path, resume=half + 2)
    assert seen_again[-(half - 2) :] == seen[half + 2 :]
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    start = dict(token_work.work.model(attention_dropout=0.3).named_parameters())
    assert max((start[name] - whole[name]).abs().max() for name in whole) > 1e-2


def test_BATCH_DDP_two_processes_share_each_epoch_and_resume(tmp_path):
    token_work.work.two_processes(token_work.__file__, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    half = len(ranks[0]["seen"]) // 2
    for epoch in (slice(0, half), slice(half, None)):
        assert len({len(rank["seen"][epoch]) for rank in ranks}) == 1
        assert sorted(index for rank in ranks for batch in rank["seen"][epoch] for index in batch) == list(range(41))
    for rank in ranks:
        left = 2 * half - rank["middle"]
        assert rank["again"][-left:] == rank["seen"][rank["middle"] :] and rank["same"]
