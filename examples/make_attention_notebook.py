"""Make examples/attention.ipynb from docs/attention.md: one text, two forms.

python examples/make_attention_notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
LESSON = ROOT / "docs" / "attention.md"
NOTEBOOK = ROOT / "examples" / "attention.ipynb"


def notebook_of(lesson: str) -> str:
    """The notebook's JSON: prose as it stands, every ```python block a cell; links and pictures from docs/ as well."""
    prose_and_code = re.split(r"```python\n(.*?)```\n", lesson, flags=re.DOTALL)
    cells = []
    for place, text in enumerate(prose_and_code):
        if not text.strip():
            continue
        code = place % 2 == 1
        text = re.sub(r"  # noqa: \w+", "", text) if code else text.replace("](images/", "](../docs/images/")
        lines = text.strip("\n").splitlines(keepends=True)
        cell = {
            "cell_type": "code" if code else "markdown",
            "id": f"cell-{len(cells)}",
            "metadata": {},
            "source": lines,
        }
        cells.append(cell | ({"execution_count": None, "outputs": []} if code else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps(
        {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, ensure_ascii=False, indent=1
    )


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook_of(LESSON.read_text(encoding="utf-8")) + "\n", encoding="utf-8")
    print(NOTEBOOK)
