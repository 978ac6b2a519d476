"""A toy corpus, a toy recipe, and a model with random weights: all that the command line needs to be tried."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from metaphrase.cli import main

RECIPE = """\
# Numbers in words to digits.
data:
  path: {corpus}
  source: words
  target: digits
tokenizer:
  kind: units
  vocab_size: 60
model:
  preset: tiny
  d_model: 16
  encoder_ffn_dim: 32
  decoder_ffn_dim: 32
  encoder_attention_heads: 2
  decoder_attention_heads: 2
  encoder_layers: 1
  decoder_layers: 1
batches:
  tokens: 256
optimizer:
  warmup: 10
evaluation:
  every: 10
  sentences: 8
  num_beams: 2
  metrics: [word_error_rate, sacrebleu]
trackers: []
max_updates: 20
"""
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_corpus(folder: Path, **sizes: int) -> Path:
    """Line-aligned text files of number words and digits; `train=300` writes train.words and train.digits."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, size in sizes.items():
        rows = [[draw.randrange(10) for _ in range(draw.randint(1, 6))] for _ in range(size)]
        words = [" ".join(DIGITS[digit] for digit in row) for row in rows]
        digits = [" ".join(map(str, row)) for row in rows]
        (folder / f"{split}.words").write_text("\n".join(words) + "\n", encoding="utf-8")
        (folder / f"{split}.digits").write_text("\n".join(digits) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), train=300, validation=12, test=12)


@pytest.fixture(scope="session")
def recipe(corpus, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "toy.yaml"
    path.write_text(RECIPE.format(corpus=corpus), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A model taught for a second or two to write number words as digits: its outputs differ, and end."""
    import torch

    from metaphrase import MetaphraseConfig, MetaphraseForConditionalGeneration
    from metaphrase.configuration.options import TokenizerOptions
    from metaphrase.training.data.batching import collate
    from metaphrase.training.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(
        [" ".join(DIGITS), "0 1 2 3 4 5 6 7 8 9"], TokenizerOptions(kind="units", vocab_size=60)
    )
    torch.manual_seed(3)
    sizes = {"vocab_size": len(tokenizer), "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0}
    model = MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset("tiny", **sizes, init_std=0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    draw = random.Random(0)
    for _ in range(80):
        rows = [[draw.randrange(10) for _ in range(draw.randint(1, 6))] for _ in range(16)]
        sources = tokenizer([" ".join(DIGITS[digit] for digit in row) for row in rows])["input_ids"]
        targets = tokenizer([" ".join(map(str, row)) for row in rows])["input_ids"]
        model(**collate(list(zip(sources, targets, strict=True)), pad=0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.update(num_beams=5)  # as a run leaves it
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path_factory):
    """No cache, setting or network of the machine comes into a test."""
    monkeypatch.setenv("METAPHRASE_CACHE", str(tmp_path_factory.getbasetemp() / "metaphrase-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("METAPHRASE_DEBUG", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capfd, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: `run("score", …, stdin=b"…")` gives exit code, standard output and error."""

    def command(*argv: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        code = main([str(argument) for argument in argv])
        return code, *capfd.readouterr()

    return command
