"""The sequence of updates: every pair once an epoch, the same at any number of processes, found again after a stop."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from metaphrase.configuration.options import CorpusOptions
from metaphrase.training.material import gather
from metaphrase.training.stream import Position, Stream, chain


class Made:
    """Made-up pairs on disk: one window; the ids of pair i are all i + 10."""

    pairs = 64
    tokenizer = SimpleNamespace(pad_token_id=0)

    def __init__(self) -> None:
        draw = np.random.default_rng(3)
        self.source_lengths, self.target_lengths = draw.integers(2, 12, (2, self.pairs)).astype(np.int32)

    def windows(self, epoch: int, number: int):
        return self if number == 0 else None

    def draw(self, *, seed: int, epoch: int) -> None:
        return None

    def __getitem__(self, indices):
        return [([i + 10] * self.source_lengths[i], [i + 10] * self.target_lengths[i]) for i in indices]


def seen(material, updates: int, *, position: Position | None = None, ranks: int = 1, tokens: int = 48, **shape):
    """Pair numbers of the next updates, all processes together, and the streams."""
    streams = [
        Stream(material, tokens=tokens, seed=7, world_size=ranks, rank=rank, position=copy.deepcopy(position), **shape)
        for rank in range(ranks)
    ]
    iterators = [iter(stream) for stream in streams]
    found = []
    for _ in range(updates):
        parts = [next(iterator) for iterator in iterators]
        assert len({len(part.batches) for part in parts}) == 1  # every process has as many batches
        update = []
        for part in parts:
            assert part.tokens == sum(int((batch["labels"] >= 0).sum()) for batch in part.batches)
            for batch in part.batches:
                real = batch["labels"][:, 0] >= 0
                update += (batch["input_ids"][real, 0] - 10).tolist()
        found.append(sorted(update))
    assert len({stream.position.digest for stream in streams}) == 1
    return found, streams[0]


def updates_of(material, **shape) -> int:
    return Stream(material, tokens=48, seed=7, **shape).updates_a_window


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 1), (1, 3), (3, 2), (4, 1)])
def test_every_pair_once_an_epoch(ranks, accumulation):  # BATCH-DDP
    material = Made()
    number = updates_of(material, world_size=ranks, accumulation=accumulation)
    for epoch in (1, 2):
        found, stream = seen(material, epoch * number, ranks=ranks, accumulation=accumulation)
        last = found[-number:]
        assert sorted(itertools.chain.from_iterable(last)) == list(range(64))
        assert stream.position.seen == 64 * epoch and stream.epochs == epoch and stream.ends_a_pass()


def test_the_sequence_is_the_same_however_it_is_dealt_out():
    one, stream = seen(Made(), 12)
    several, other = seen(Made(), 4, ranks=3)
    assert [sorted(itertools.chain.from_iterable(one[i : i + 3])) for i in range(0, 12, 3)] == several
    assert stream.position == other.position


def test_epochs_differ_and_a_seed_repeats():
    number = updates_of(Made())
    found, _ = seen(Made(), 2 * number)
    again, _ = seen(Made(), 2 * number)
    assert found == again and found[:number] != found[number:]


@pytest.mark.parametrize("stop", [1, 5, 21])
def test_a_stopped_run_sees_what_an_undisturbed_one_sees(stop):  # RESUME-ORDER
    total = 2 * updates_of(Made())
    through, _ = seen(Made(), total)
    first, stream = seen(Made(), stop)
    rest, end = seen(Made(), total - stop, position=stream.position)
    assert first + rest == through
    assert end.position == seen(Made(), total)[1].position


def test_it_goes_on_with_another_number_of_processes_and_another_budget():
    _, stream = seen(Made(), 2)
    done = stream.position.seen
    assert 0 < done < 64
    first, _ = seen(Made(), 2)
    rest, end = [], None
    place = stream.position
    for ranks, tokens in ((2, 48), (1, 96), (3, 24)):
        part, end = seen(Made(), 1, position=place, ranks=ranks, tokens=tokens)
        rest += part
        place = end.position
    left = []
    while not end.ends_a_pass():
        part, end = seen(Made(), 1, position=end.position, tokens=24)
        left += part
    assert sorted(itertools.chain.from_iterable(first + rest + left)) == list(range(64))  # none twice, none left out
    assert len(end.position.legs) == 2 and end.epochs == 1.0


def test_the_hash_of_a_run_holds_all_its_pairs_from_the_first_on():
    stream, digest = Stream(Made(), tokens=48, seed=7, accumulation=2), ""
    for update in itertools.islice(stream, 5):
        for batch in update.pairs:
            digest = chain(digest, batch)
        assert stream.position.digest == digest


def test_the_hash_knows_order_and_content():
    assert chain("", np.array([1, 2])) != chain("", np.array([2, 1])) != chain("", np.array([1, 2, 3]))
    assert chain(chain("", np.array([1])), np.array([2])) != chain(chain("", np.array([2])), np.array([1]))


@pytest.mark.parametrize("more", [[], [CorpusOptions(weight=0.3, tags=["<bt>"])]])
def test_a_streamed_corpus_is_learned_from_and_resumed(tiny_options, more):
    options = tiny_options(**{"data.streaming": True, "data.window": 50, "data.more": more})

    def take(updates: int, position: Position | None = None):
        stream = Stream(gather(options), tokens=160, seed=1, position=copy.deepcopy(position))
        iterator = iter(stream)
        batches = [next(iterator).batches[0]["input_ids"].tolist() for _ in range(updates)]
        return batches, stream

    through, stream = take(30)
    assert (
        stream.position.epoch >= 1
        and stream.position.window >= 0
        and stream.position.pass_pairs == (156 if more else 120)
    )
    first, stopped = take(13)
    rest, end = take(17, stopped.position)
    assert first + rest == through and end.position == stream.position
