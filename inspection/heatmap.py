"""Heat maps as PNG files: one head, or every head of one kind."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .attend import Attention
from .modules import Kind

COLOURS = "Blues"
FRAME = "#c8ccd0"
TITLES = {"encoder": "Encoder", "decoder": "Decoder", "cross": "Cross"}


def draw_head(attention: Attention, kind: Kind, layer: int, head: int | None = None, *, words: bool = True) -> Figure:
    """One head (None: the mean of its layer) with labels: a row for each asking unit, a column for each asked one."""
    weights = attention.weights(kind, words=words)[layer]
    matrix = weights.mean(0) if head is None else weights[head]
    rows, cols = attention.labels(kind, words=words)
    size = (max(3.2, 1.6 + 0.3 * len(cols)), max(2.6, 1.2 + 0.27 * len(rows)))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.subplots()
    image = axes.imshow(matrix.numpy(), cmap=COLOURS, vmin=0, aspect="auto")
    axes.set_xticks(range(len(cols)), [_plain(label) for label in cols], rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), [_plain(label) for label in rows])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=8)
    name = "mean of all heads" if head is None else f"head {head + 1}"
    axes.set_xlabel(f"{TITLES[kind]} attention, layer {layer + 1}, {name}", fontsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.7)
    bar.ax.tick_params(labelsize=7, length=0)
    bar.outline.set_visible(False)
    axes.spines[:].set_color(FRAME)
    return figure


def draw_heads(attention: Attention, kind: Kind, *, words: bool = True) -> Figure:
    """Every head of one kind, small: a row for each layer, a column for each head."""
    weights = attention.weights(kind, words=words)
    layers, heads = weights.shape[:2]
    figure = Figure(figsize=(1.15 * heads + 0.5, 1.15 * layers + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            axes = grid[layer][head]
            axes.imshow(weights[layer, head].numpy(), cmap=COLOURS, vmin=0, aspect="auto")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_color(FRAME)
            if layer == 0:
                axes.set_title(f"head {head + 1}", fontsize=7)
            if head == 0:
                axes.set_ylabel(f"layer {layer + 1}", fontsize=7)
    return figure


def save_png(figure: Figure, path: str | Path) -> Path:
    """Write a figure and return its path. Characters that no font has are drawn as boxes, without a warning."""
    import warnings

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing", category=UserWarning)
        figure.savefig(path, dpi=160)
    return path


def _plain(label: str) -> str:
    """A label without the signs that matplotlib reads as mathematics."""
    return (label.strip() or label).replace("$", r"\$")
