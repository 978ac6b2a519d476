"""A streamed corpus: the same pairs as one on disk, window by window, from any place."""

from __future__ import annotations

import datasets
import pytest

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions, TokenizerOptions
from metaphrase.training.data.batching import plan_epoch
from metaphrase.training.data.streaming import StreamedCorpus
from metaphrase.training.data.tokenizer import prepare_tokenizer, train_tokenizer

from .conftest import made_up_pairs, write_pairs


@pytest.fixture
def options(folder) -> DataOptions:
    pairs = made_up_pairs(300)
    pairs[10] = ("", "blank")
    pairs[20] = (" ".join(["dog"] * 80), "long")
    write_pairs(folder, "train", pairs)
    return DataOptions(str(folder), source="xx", target="yy", streaming=True, window=70, max_length=60)


@pytest.fixture
def tokenizer(options):
    return train_tokenizer(StreamedCorpus(options).texts(), TokenizerOptions(vocab_size=340))


def windows(corpus, tokenizer, epoch):
    found = []
    while (window := corpus.window(epoch, len(found), tokenizer)) is not None:
        found.append([tuple(ids.tolist() for ids in pair) for pair in window[range(len(window))]])
    return found


def test_an_epoch_has_every_pair_once(options, tokenizer):
    corpus = StreamedCorpus(options)
    wanted = [
        (tokenizer(source).input_ids, tokenizer(target).input_ids)
        for number, (source, target) in enumerate(made_up_pairs(300))
        if number not in (10, 20)
    ]
    epochs = [windows(corpus, tokenizer, epoch) for epoch in (0, 1, 2)]
    for epoch in epochs:
        assert [pair for window in epoch for pair in window] == wanted
        assert all(len(window) <= 70 for window in epoch)
    assert len({len(epoch[0]) for epoch in epochs}) == 3  # windows begin elsewhere
    report = corpus.report
    assert (report.read, report.kept, report.dropped) == (300, 299, {"blank": 1, "too_long": 1})
    assert [(drop["line"], drop["reason"]) for drop in report.drops()] == [(11, "blank"), (21, "too_long")]


def test_any_place_is_found_again(options, tokenizer):
    through = [windows(StreamedCorpus(options), tokenizer, epoch) for epoch in (0, 1)]
    corpus = StreamedCorpus(options)
    for epoch, number in ((1, 2), (0, 3), (0, 1), (1, 2), (1, 3)):
        window = corpus.window(epoch, number, tokenizer)
        pairs = [tuple(ids.tolist() for ids in pair) for pair in window[range(len(window))]]
        assert pairs == through[epoch][number]
        assert (window.epoch, window.number) == (epoch, number)
    assert [drop["line"] for drop in corpus.report.drops()] == [11]  # line 21 was tokenized by nobody, 11 read often


def test_its_tokenizer_knows_the_tags(options, tmp_path, folder):
    options.tags = ["<2yy>"]
    corpus = StreamedCorpus(options)
    tokenizer = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=340), tmp_path)
    tag = tokenizer.convert_tokens_to_ids("<2yy>")
    assert all(source[0] == tag for source, _ in corpus.window(0, 0, tokenizer)[range(20)])
    before = corpus.fingerprint
    write_pairs(folder, "train", made_up_pairs(10))
    assert StreamedCorpus(options).fingerprint != before


def test_a_window_is_planned_like_an_epoch(options, tokenizer):
    corpus = StreamedCorpus(options)
    orders = []
    for number in (0, 1):
        window = corpus.window(0, number, tokenizer)
        plan = plan_epoch(window.source_lengths, window.target_lengths, tokens=100, seed=1, epoch=window.key)
        assert sorted(plan.order) == list(range(len(window)))
        orders.append(plan.order.tolist())
    assert orders[0] != orders[1]


def test_a_streamed_dataset(monkeypatch, tokenizer):
    rows = [{"translation": {"xx": source, "yy": target}} for source, target in made_up_pairs(50)]
    asked = []

    def load(path, config, *, split, streaming):
        asked.append((split, streaming))
        return datasets.IterableDataset.from_generator(lambda: iter(rows))

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, config: ["train", "validation"])
    corpus = StreamedCorpus(DataOptions("some/corpus", source="xx", target="yy", streaming=True, window=30))
    assert asked == [("train", True)]
    assert [len(window) for window in windows(corpus, tokenizer, 0)] == [30, 20]
    wrong = StreamedCorpus(DataOptions("some/corpus", source="xx", target="zz", streaming=True))
    with pytest.raises(MetaphraseError, match="no column zz, only translation, xx, yy"):
        wrong.window(0, 0, tokenizer)


def test_mistakes_are_told(options, tokenizer, folder):
    write_pairs(folder, "train", [("", "")])
    with pytest.raises(MetaphraseError, match=r"no pair to learn from .*1 blank"):
        StreamedCorpus(options).window(0, 0, tokenizer)
    write_pairs(folder, "train", made_up_pairs(3))
    options.max_length = 1
    with pytest.raises(MetaphraseError, match="from line 1 to 3 is longer than"):
        StreamedCorpus(options).window(0, 0, tokenizer)
