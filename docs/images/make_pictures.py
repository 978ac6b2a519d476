"""Draw the pictures of docs/attention.md again.

    python docs/images/make_pictures.py                      # from the small model that the lesson trains
    python docs/images/make_pictures.py MODEL "a sentence"   # heads.png and alignment.png of a model of yours

A model's alignment picture shows the head that attends most sharply.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from metaphrase.inspection.attend import Attention, attend
from metaphrase.inspection.heatmap import draw_head, draw_heads, save_png

HERE = Path(__file__).parent


def lesson() -> dict[str, Any]:
    """What the lesson's code leaves: its model, its sentence's attention, its best head."""
    text = (HERE.parent / "attention.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "attention.md", "exec"), names)
    return names


def draw(attention: Attention, layer: int, head: int | None) -> None:
    print(save_png(draw_heads(attention, "cross"), HERE / "heads.png"))
    print(save_png(draw_head(attention, "cross", layer, head), HERE / "alignment.png"))


def main(words: list[str]) -> None:
    if not words:
        names = lesson()
        draw(names["attention"], names["best"].layer, names["best"].head)
        return
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(words[0]), AutoTokenizer.from_pretrained(words[0])
    attention = attend(model.eval(), tokenizer, words[1])
    sharpness = attention.maps.cross.max(-1).values.mean(-1)
    draw(attention, *divmod(int(sharpness.argmax()), sharpness.shape[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
