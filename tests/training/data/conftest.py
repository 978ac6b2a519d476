"""Small corpora in every form."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

WORDS = "the a dog cat house tree runs sees big small red über schön Straße père élève дом 家 10 .".split()  # noqa: SIM905


def made_up_pairs(lines: int, seed: int = 0) -> list[tuple[str, str]]:
    """Sentences of a made-up language, and the same backwards."""
    draw = random.Random(seed)
    sentences = [[draw.choice(WORDS) for _ in range(draw.randint(2, 9))] for _ in range(lines)]
    return [(" ".join(words), " ".join(reversed(words))) for words in sentences]


def write_pairs(folder: Path, split: str, pairs: list[tuple[str, str]]) -> None:
    """Two text files, `split.xx` and `split.yy`."""
    folder.mkdir(exist_ok=True, parents=True)
    for side, suffix in enumerate(("xx", "yy")):
        text = "".join(pair[side] + "\n" for pair in pairs)
        (folder / f"{split}.{suffix}").write_bytes(text.encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text files of three splits: 300, 20 and 20 lines."""
    path = tmp_path / "corpus"
    for seed, (split, lines) in enumerate((("train", 300), ("validation", 20), ("test", 20))):
        write_pairs(path, split, made_up_pairs(lines, seed))
    return path
