"""A corpus that a tiny model learns in seconds, and the options of a run over it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from metaphrase.configuration.options import DataOptions, RunOptions, TokenizerOptions

TINY = {
    "preset": "base",
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}


def write_corpus(folder: Path, sizes: dict[str, int]) -> Path:
    """Lines of made-up words; the translation is in capitals and backwards."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(5)
    words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 4))) for _ in range(30)]
    for split, lines in sizes.items():
        with open(folder / f"{split}.a", "w") as source, open(folder / f"{split}.b", "w") as target:
            for _ in range(lines):
                line = [draw.choice(words) for _ in range(draw.randint(1, 9))]
                print(*line, file=source)
                print(*[word.upper() for word in reversed(line)], file=target)
    return folder


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), {"train": 120, "validation": 17, "test": 11})


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """One cache for all tests, away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METAPHRASE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path_factory.mktemp("metrics"))
        yield


@pytest.fixture
def tiny_options(corpus_folder, tmp_path) -> Callable[..., RunOptions]:
    """Options of a run of seconds; dotted names change single ones: `tiny_options(**{"batches.tokens": 64})`."""

    def make(**changes: object) -> RunOptions:
        options = RunOptions(
            data=DataOptions(path=str(corpus_folder), source="a", target="b", workers=1),
            tokenizer=TokenizerOptions(vocab_size=330),
            model=dict(TINY),
            output=str(tmp_path / "run"),
            max_updates=12,
            trackers=[],
            threads=1,
            log_every=1,
        )
        options.batches.tokens = 160
        options.optimizer.warmup = 20
        options.optimizer.learning_rate = 3e-3
        options.evaluation.every = 4
        options.evaluation.sentences = 5
        options.evaluation.num_beams = 2
        for name, value in changes.items():
            place = options
            *path, last = name.split(".")
            for step in path:
                place = getattr(place, step)
            assert hasattr(place, last), name
            setattr(place, last, value)
        return options

    return make
