"""The page: one HTML file that holds its style, its script and its numbers, and asks nothing of a network.

Weights are stored as 16-bit fractions, exact to 1e-5. Where there are very many (200 tokens at 6 x 16 heads are eleven
million) they take 8 bits in steps of the square root, exact to half a percent and finer for small weights.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .attend import Attention
from .modules import KINDS, Kind
from .words import Pieces

if TYPE_CHECKING:
    from .explain import Explanation

STYLES = ("style.css", "explain.css")
SCRIPTS = ("data", "state", "figure", "matrix", "readout", "engine", "explain", "worked", "main")
FINE = 1_500_000  # up to so many weights are stored in 16 bits
MARKS = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def write_page(
    attention: Attention,
    path: str | Path,
    *,
    explanation: Explanation | None = None,
    kind: Kind = "cross",
    layer: int | None = None,
    head: int | None = None,
    token: int | None = None,
) -> Path:
    """Write the page to a file and return its path.

    Args:
        attention: what `attend` gave.
        explanation: what `explain` gave, for the part that goes step by step.
        kind, layer, head: what is shown first; layers and heads count from 0, and no head means the mean of all.
            Unset, the last layer.
        token: the asking word (counted from 0) that is held when the page opens.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render_page(attention, explanation=explanation, kind=kind, layer=layer, head=head, token=token)
    path.write_text(page, encoding="utf-8")
    return path


def render_page(
    attention: Attention,
    *,
    explanation: Explanation | None = None,
    kind: Kind = "cross",
    layer: int | None = None,
    head: int | None = None,
    token: int | None = None,
) -> str:
    """The page as text; arguments as for `write_page`."""
    weights, layout, bits = pack_weights(attention)
    layers = layout[kind]["layers"]
    start = {"kind": kind, "layer": layers - 1 if layer is None else layer, "head": -1 if head is None else head}
    if token is not None:
        start["pin"] = {"side": "row", "index": token}
    payload: dict[str, Any] = {
        "model": attention.model_name,
        "source": describe(attention.source),
        "read": describe(attention.read),
        "written": describe(attention.written),
        "maps": layout,
        "bits": bits,
        "start": start,
        "explanation": explanation.outline() if explanation else None,
    }
    numbers = explanation.numbers().astype("<f4").tobytes() if explanation else b""
    folder = files("metaphrase.inspection") / "web"
    parts = {
        "title": html.escape(f"Attention: {attention.source.text}"[:120]),
        "style": "\n".join((folder / name).read_text("utf-8") for name in STYLES),
        "data": json_in_script(payload),
        "weights": _base64(weights),
        "numbers": _base64(numbers) if numbers else "",
        "script": "\n".join(["(() => {", '"use strict";', *(_script(folder, name) for name in SCRIPTS), "})();"]),
    }
    page = (folder / "page.html").read_text("utf-8")
    before, *rest = page.split("{{")
    return before + "".join(parts[name] + after for name, after in (piece.split("}}", 1) for piece in rest))


def _script(folder: Any, name: str) -> str:
    return (folder / f"{name}.js").read_text("utf-8")


def notebook_frame(attention: Attention, height: int = 760) -> str:
    """The page inside a frame of its own, for notebooks: neither its style nor its script meets the notebook's."""
    page = html.escape(render_page(attention), quote=True)
    title = html.escape(f"Attention: {attention.source.text}"[:120], quote=True)
    return (
        f'<iframe title="{title}" sandbox="allow-scripts" style="width:100%;height:{height}px;border:0" '
        f'srcdoc="{page}"></iframe>'
    )


def json_in_script(value: Any) -> str:
    """JSON that can stand inside a script element whatever its texts say (`</script>`, `<!--`)."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return "".join(MARKS.get(character, character) for character in text)


def describe(pieces: Pieces) -> dict[str, Any]:
    """Pieces and words of a sequence for the page: texts, which are special tokens, and the word of each piece."""
    labels, groups = pieces.units()
    special = {group: piece.special for group, piece in zip(groups, pieces.pieces, strict=True)}
    return {
        "tokens": [
            {"text": piece.text.strip() or piece.text, "special": piece.special, "space": piece.text[:1].isspace()}
            for piece in pieces.pieces
        ],
        "words": [{"text": label, "special": special[group]} for group, label in enumerate(labels)],
        "groups": groups,
    }


def pack_weights(attention: Attention) -> tuple[bytes, dict[str, Any], int]:
    """All weights as bytes, where each kind begins (in weights, not bytes), and how many bits a weight takes."""
    layout: dict[str, Any] = {}
    offset = 0
    arrays = []
    for kind in KINDS:
        weights = attention.weights(kind).numpy()
        layers, heads, rows, cols = weights.shape
        layout[kind] = {"layers": layers, "heads": heads, "rows": rows, "cols": cols, "offset": offset}
        offset += weights.size
        arrays.append(weights.reshape(-1))
    values = np.clip(np.concatenate(arrays), 0, 1)
    if offset <= FINE:
        return np.rint(values * 65535).astype("<u2").tobytes(), layout, 16
    return np.rint(np.sqrt(values) * 255).astype("u1").tobytes(), layout, 8


def _base64(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 9 if len(raw) < 4_000_000 else 4)).decode()
