"""Token ids on disk, and how often an epoch brings each corpus."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import CorpusOptions, DataOptions, TokenizerOptions
from metaphrase.training.data import encoding
from metaphrase.training.data.batching import plan_epoch
from metaphrase.training.data.corpus import read_corpus
from metaphrase.training.data.encoding import encode_corpus, encode_texts
from metaphrase.training.data.mixture import draw_epoch, times_an_epoch
from metaphrase.training.data.tokenizer import prepare_tokenizer, train_tokenizer

from .conftest import made_up_pairs, write_pairs


@pytest.fixture
def options(folder) -> DataOptions:
    return DataOptions(str(folder), source="xx", target="yy")


def test_ids_are_those_of_the_tokenizer(options, tmp_path):
    corpus = read_corpus(options, tmp_path)
    tokenizer = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=350), tmp_path)
    for cache in (None, tmp_path, tmp_path):
        encoded = encode_corpus(corpus, tokenizer, options, cache)
        assert len(encoded) == 300 and encoded.sizes == [300]
        chosen = [299, 0, 5]
        for index, (source, target) in zip(chosen, encoded[chosen], strict=True):
            assert source.tolist() == tokenizer(corpus.train[index]["source"]).input_ids
            assert target.tolist() == tokenizer(corpus.train[index]["target"]).input_ids
            assert encoded.source_lengths[index] == len(source)
            assert encoded.target_lengths[index] == len(target)
        assert encoded.source_lengths.dtype == encoded.target_lengths.dtype == np.int32
    with pytest.raises(IndexError, match="pair 300 of 300"):
        encoded[[300]]


def test_over_long_pairs_are_counted_and_listed(options, tmp_path):
    corpus = read_corpus(options, tmp_path)
    tokenizer = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=350), tmp_path)
    options.max_length = 7
    encoded = encode_corpus(corpus, tokenizer, options, tmp_path)
    assert max(encoded.source_lengths.max(), encoded.target_lengths.max()) == 7
    drops = list(encoded.report.drops())
    assert encoded.report.dropped["too_long"] == len(drops) == 300 - len(encoded) > 0
    assert sorted([*(drop["line"] - 1 for drop in drops), *encoded.rows]) == list(range(300))
    assert "train.xx" in drops[0]["file"] and "of at most 7" in drops[0]["detail"]
    for index in (0, len(encoded) - 1):
        text = corpus.train[int(encoded.rows[index])]["source"]
        assert encoded[[index]][0][0].tolist() == tokenizer(text).input_ids
    options.max_length = 1
    with pytest.raises(MetaphraseError, match=r"every training pair is longer than data.max_length 1"):
        encode_corpus(corpus, tokenizer, options, tmp_path)


def test_the_account_is_whole(options, folder, tmp_path):
    pairs = made_up_pairs(100)
    pairs[3], pairs[7] = ("", "blank"), (" ".join(["dog"] * 90), "long")
    write_pairs(folder, "train", pairs)
    options.max_length = 80
    corpus = read_corpus(options, tmp_path)
    tokenizer = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=350), tmp_path)
    report = encode_corpus(corpus, tokenizer, options, tmp_path).report
    assert report.summary() == "100 lines read, 98 pairs kept; left out: 1 blank, 1 too_long"
    assert [(drop["line"], drop["reason"]) for drop in report.drops()] == [(4, "blank"), (8, "too_long")]


def test_the_cache_hangs_on_the_tokenizer(options, tmp_path, monkeypatch):
    corpus = read_corpus(options, tmp_path)
    small, large = (prepare_tokenizer(corpus, TokenizerOptions(vocab_size=size), None) for size in (330, 400))
    encode_corpus(corpus, small, options, tmp_path)
    assert encode_corpus(corpus, large, options, tmp_path).source_lengths.sum() < (
        encode_corpus(corpus, small, options, tmp_path).source_lengths.sum()
    )
    monkeypatch.setattr(encoding, "_write_ids", None)
    encode_corpus(corpus, small, options, tmp_path)


def test_settings_left_over_from_other_calls_do_not_matter(options):
    tokenizer = train_tokenizer(["the dog </s>"] * 9, TokenizerOptions(vocab_size=300))
    texts = ["the dog sees </s> the house of the père", "a"]
    plain = [tokenizer(text).input_ids for text in texts]
    tokenizer(texts, truncation=True, max_length=2, padding=True, split_special_tokens=False)
    assert encode_texts(tokenizer, texts) == plain
    assert encode_texts(tokenizer, texts, workers=1) == plain


def test_pages_are_handed_back(options, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "FETCHES", 10)
    corpus = read_corpus(options, tmp_path)
    tokenizer = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=350), tmp_path)
    encoded = encode_corpus(corpus, tokenizer, options, tmp_path)
    before = [pair[0].tolist() for pair in encoded[range(300)]]
    for index in range(300):
        assert encoded[[index]][0][0].tolist() == before[index]


def test_several_corpora_with_tags_and_weights(options, folder, tmp_path):
    write_pairs(folder, "more", made_up_pairs(50, 5))
    options.tags = ["<2yy>"]
    options.more = [CorpusOptions(train="more", weight=3, tags=["<bt>", "<2yy>"])]
    corpus = read_corpus(options, tmp_path)
    tokenizer = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=350), tmp_path)
    encoded = encode_corpus(corpus, tokenizer, options, tmp_path)
    assert encoded.sizes == [300, 50] and encoded.times == [1, 3]
    back, german = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<bt>", "<2yy>"))
    (main, _), (more, _) = encoded[[0, 300]]
    assert main.tolist() == [german, *tokenizer(corpus.train[0]["source"]).input_ids]
    assert more.tolist() == [back, german, *tokenizer(corpus.train[300]["source"]).input_ids]
    plan = plan_epoch(
        encoded.source_lengths, encoded.target_lengths, tokens=200, seed=1, epoch=0, draw=encoded.draw(seed=1, epoch=0)
    )
    counts = Counter(plan.order.tolist())
    assert all(counts[index] == (1 if index < 300 else 3) for index in range(350))


def test_a_part_of_a_corpus_rotates():
    halves = [draw_epoch([10, 4], [0.5, 1], seed=1, epoch=epoch) for epoch in range(4)]
    assert [len(half) for half in halves] == [9] * 4
    for first in (0, 2):
        big = np.concatenate(halves[first : first + 2])
        assert sorted(big[big < 10]) == list(range(10))
        assert sorted(big[big >= 10]) == sorted([*range(10, 14)] * 2)
    assert draw_epoch([10, 4], [1, 1], seed=1, epoch=0) is None
    assert sorted(draw_epoch([3], [2.5], seed=1, epoch=0).tolist())[:6].count(0) >= 2
    assert draw_epoch([3, 2], [0, 1], seed=1, epoch=0).tolist() in ([3, 4], [4, 3])
    same = [draw_epoch([10], [0.5], seed=seed, epoch=3).tolist() for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


def test_temperature_evens_out():
    assert times_an_epoch([900, 100], [1, 1], 1) == pytest.approx([1, 1])
    times = times_an_epoch([900, 100], [1, 1], 2)
    assert times[0] * 900 / (times[1] * 100) == pytest.approx(3)
    assert times[0] * 900 + times[1] * 100 == pytest.approx(1000)
    assert times_an_epoch([900, 100], [2, 1]) == [2, 1]
    for weights, temperature in (([1, -1], None), ([0, 0], None), ([1, 1], 0)):
        with pytest.raises(MetaphraseError, match="must be above zero"):
            times_an_epoch([1, 1], weights, temperature)
