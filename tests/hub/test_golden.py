"""Repositories that earlier versions wrote still load, with the package and by their own code, and answer the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/*/expected.json"))


def load(folders: list[str], trust: bool) -> list[Any]:
    """The answers of each repository, as `write_golden.py` asks for them."""
    import importlib.util

    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    spec = importlib.util.spec_from_file_location("write_golden", Path(folders[0]).parents[1] / "write_golden.py")
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    if not trust:
        import metaphrase  # noqa: F401
    found = []
    for folder in folders:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=trust)
        assert type(model).__module__.startswith("transformers_modules" if trust else "metaphrase.")
        found.append(writer.answers(model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)))
    return found


def same(found: dict[str, Any], folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    assert found.keys() == expected.keys()
    for name in ("input_ids", "greedy", "beams"):
        assert found[name] == expected[name], f"{folder}: {name}"
    for name in ("logits", "cross_attention"):
        assert flat(found[name]) == pytest.approx(flat(expected[name]), abs=2e-5), f"{folder}: {name}"


def flat(values: Any) -> list[float]:
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [values]


def test_there_are_golden_repositories() -> None:
    assert {folder.name for folder in FOLDERS} == {"paper", "learned"}
    assert all((folder / "modeling_metaphrase.py").is_file() for folder in FOLDERS)
    size = sum(file.stat().st_size for folder in FOLDERS for file in folder.iterdir() if file.is_file())
    assert size / len({folder.parent for folder in FOLDERS}) < 300_000
    answers = json.loads((FOLDERS[0] / "expected.json").read_text())
    assert len({str(row) for row in answers["greedy"]}) > 1  # outputs that differ from source to source


def test_with_the_package() -> None:
    from metaphrase.modeling.companions import weights_digest

    for folder in FOLDERS:  # scores that people have published stay with their weights
        assert weights_digest(folder) == json.loads((folder / "results.json").read_text())["weights"]
    for folder, found in zip(FOLDERS, load([str(folder) for folder in FOLDERS], trust=False), strict=True):
        same(found, folder)


def test_by_their_own_code(client: Callable[..., Any]) -> None:
    folders = [str(folder) for folder in FOLDERS]
    for folder, found in zip(FOLDERS, client(load, folders=folders, trust=True, blocked=("metaphrase",)), strict=True):
        same(found, folder)
