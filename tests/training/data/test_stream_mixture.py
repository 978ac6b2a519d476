"""Several streamed corpora: weights and temperature as on disk, every pair as often as due, any place found again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import datasets
import pytest

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import CorpusOptions, DataOptions, TokenizerOptions
from metaphrase.training.data.mixture import times_an_epoch
from metaphrase.training.data.stream_mixture import StreamedMixture, open_stream
from metaphrase.training.data.streaming import StreamedCorpus
from metaphrase.training.data.tokenizer import prepare_tokenizer

SIZES = {"big": 300, "small": 40}


@pytest.fixture
def options(tmp_path) -> DataOptions:
    """Two corpora whose every line says where it stands; the big one has a blank line."""
    for name, lines in SIZES.items():
        (tmp_path / name).mkdir()
        text = [f"{name} {number}\n" for number in range(lines)]
        if name == "big":
            text[7] = "\n"
        for suffix in ("xx", "yy"):
            (tmp_path / name / f"train.{suffix}").write_text("".join(text))
    more = [CorpusOptions(path=str(tmp_path / "small"), tags=["<bt>"], weight=1.0)]
    return DataOptions(str(tmp_path / "big"), source="xx", target="yy", streaming=True, window=70, more=more)


def tokenizer_of(corpus, tmp_path: Path):
    return prepare_tokenizer(corpus, TokenizerOptions(kind="characters", vocab_size=300), tmp_path / "cache")


def texts(window, tokenizer) -> list[str]:
    sides = [
        tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in pair) for pair in window[range(len(window))]
    ]
    assert all(source in (target, f"<bt>{target}", f"<bt> {target}") for source, target in sides)
    assert all(source.startswith("<bt>") == target.startswith("small") for source, target in sides)
    return [target for _, target in sides]


def epoch_of(corpus, tokenizer, epoch: int) -> list[list[str]]:
    found = []
    while (window := corpus.window(epoch, len(found), tokenizer)) is not None:
        found.append(texts(window, tokenizer))
    return found


def test_every_pair_once_an_epoch_and_both_corpora_in_every_window(options, tmp_path):
    corpus = open_stream(options)
    tokenizer = tokenizer_of(corpus, tmp_path)
    wanted = {f"{name} {number}" for name, lines in SIZES.items() for number in range(lines)} - {"big 7"}
    for epoch in (0, 1, 2):
        windows = epoch_of(corpus, tokenizer, epoch)
        counts = Counter(text for window in windows for text in window)
        assert set(counts) == wanted and set(counts.values()) == {1}
        assert all(len(window) <= 71 for window in windows)
        shares = [sum(text.startswith("small") for text in window) / len(window) for window in windows[1:-1]]
        assert all(abs(share - 40 / 340) < 0.03 for share in shares)
    assert corpus.report.read == 340 and corpus.report.kept == 339 and corpus.report.dropped["blank"] == 1
    assert [drop["line"] for drop in corpus.report.drops()] == [8]


@pytest.mark.parametrize(("weights", "temperature"), [((1.0, 2.5), None), ((0.5, 0.0), None), ((1.0, 1.0), 5.0)])
def test_weights_and_temperature_say_how_often_a_pair_comes(options, tmp_path, weights, temperature):
    options.weight, options.more[0].weight, options.temperature = *weights, temperature
    corpus = open_stream(options)
    tokenizer = tokenizer_of(corpus, tmp_path)
    epochs = 4
    counts = Counter(
        text for epoch in range(epochs) for window in epoch_of(corpus, tokenizer, epoch) for text in window
    )
    times = times_an_epoch(list(SIZES.values()), weights, temperature)
    for name, expected in zip(SIZES, times, strict=True):
        seen = [counts[f"{name} {number}"] for number in range(SIZES[name]) if (name, number) != ("big", 7)]
        assert max(seen) - min(seen) <= 1  # none comes again before all others came as often
        assert sum(seen) / len(seen) == pytest.approx(epochs * expected, abs=0.05)


def test_any_place_is_found_again(options, tmp_path):
    options.more[0].weight = 1.7
    corpus = open_stream(options)
    tokenizer = tokenizer_of(corpus, tmp_path)
    through = [epoch_of(open_stream(options), tokenizer, epoch) for epoch in (0, 1)]
    for epoch, number in ((1, 2), (0, 3), (0, 1), (1, 2), (1, 3)):
        assert texts(corpus.window(epoch, number, tokenizer), tokenizer) == through[epoch][number]


def test_one_corpus_with_a_weight(options, tmp_path):
    options.more, options.weight = [], 2.0
    corpus = open_stream(options)
    assert isinstance(corpus, StreamedMixture)
    counts = Counter(text for window in epoch_of(corpus, tokenizer_of(corpus, tmp_path), 0) for text in window)
    assert set(counts.values()) == {2} and len(counts) == 299
    options.weight = 1.0
    assert isinstance(open_stream(options), StreamedCorpus)


def test_a_dataset_must_say_how_many_rows_it_has(options, tmp_path, monkeypatch):
    rows = [{"xx": f"hub {number}", "yy": f"hub {number}"} for number in range(30)]

    def load(path, config, *, split, streaming):
        stream = datasets.IterableDataset.from_generator(lambda: iter(rows), split=datasets.Split.TRAIN)
        if path == "some/told":
            stream.info.splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=30)})
        return stream

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, config: ["train"])
    options.more = [CorpusOptions(path="some/told")]
    assert open_stream(options).lines == [300, 30]
    options.more = [CorpusOptions(path="some/untold")]
    with pytest.raises(MetaphraseError, match=r"some/untold .* does not say how many rows it has.*data\.max_pairs"):
        open_stream(options)
    options.max_pairs = 20  # of each corpus
    assert open_stream(options).lines == [21, 20]


def test_mistakes_are_told(options, tmp_path):
    options.more[0].weight = options.weight = 0.0
    with pytest.raises(MetaphraseError, match="weights of the corpora"):
        open_stream(options)
    options.weight = options.more[0].weight = 1.0
    for suffix in ("xx", "yy"):
        (tmp_path / "small" / f"train.{suffix}").write_text("\n\n")
    tokenizer = tokenizer_of(StreamedCorpus(DataOptions(options.path, source="xx", target="yy")), tmp_path)
    with pytest.raises(MetaphraseError, match=r"no pair to learn from in .*small.*2 blank"):
        epoch_of(open_stream(options), tokenizer, 0)
    for suffix in ("xx", "yy"):
        (tmp_path / "small" / f"train.{suffix}").write_text("")
    with pytest.raises(MetaphraseError, match="it has no line"):
        open_stream(options)
