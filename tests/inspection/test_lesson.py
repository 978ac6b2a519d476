"""The lesson and its notebook are one text, and all of its code runs: its assertions are the test."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make() -> object:
    spec = importlib.util.spec_from_file_location(
        "make_attention_notebook", ROOT / "examples/make_attention_notebook.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notebook_runs_from_end_to_end(capsys):
    notebook = json.loads((ROOT / "examples/attention.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"attention.ipynb {cell['id']}", "exec"), names)
    told = capsys.readouterr().out
    assert "of 50 sentences are right" in told
    assert names["attention"]._repr_html_().startswith("<iframe")


def test_notebook_is_the_lesson():
    module = make()
    lesson = module.LESSON.read_text(encoding="utf-8")
    assert module.NOTEBOOK.read_text(encoding="utf-8") == module.notebook_of(lesson) + "\n"


def test_every_file_and_function_that_the_lesson_names_exists():
    lesson = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", lesson):
        assert (ROOT / "docs" / link).exists(), link
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "modeling").glob("*.py"))
    for name in re.findall(r"`([A-Za-z_]+)(?:\.[a-z_]+)?` in \[`", lesson):
        assert re.search(rf"(def|class) {name}\b", code), name
