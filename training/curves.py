"""Learning curves of a run as a PNG, from `train_log.jsonl` alone."""

from __future__ import annotations

import json
from pathlib import Path

INK, MUTED, TRAIN, DEV = "#222222", "#888888", "#8fb3d9", "#c44e52"


def draw_curves(log: Path, picture: Path, metric: str | None = None) -> None:
    """Draw loss, the metric that chooses, and the learning rate over the updates.

    Args:
        log: `train_log.jsonl`.
        picture: PNG to write.
        metric: name of the metric in the evaluation records; None or "loss" draws none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    training = [record for record in records if record["kind"] == "training"]
    scored = [record for record in records if record["kind"] == "evaluation" and "loss" in record]
    with_metric = [record for record in scored if metric not in (None, "loss") and metric in record]
    panels = 3 if with_metric else 2
    figure = Figure(figsize=(4.6 * panels, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)

    loss = axes[0]
    loss.plot(
        [r["update"] for r in training],
        [r["loss"] for r in training],
        color=TRAIN,
        lw=1,
        label="training (dropout, smoothing)",
    )
    loss.plot(
        [r["update"] for r in scored], [r["loss"] for r in scored], color=DEV, marker="o", ms=3, label="validation"
    )
    loss.set_title("loss a target token", loc="left", fontsize=10, color=INK)
    if training or scored:
        loss.legend(frameon=False, fontsize=9)
    if with_metric:
        updates, scores = [r["update"] for r in with_metric], [r[metric] for r in with_metric]
        axes[1].plot(updates, scores, color=DEV, marker="o", ms=3)
        axes[1].annotate(
            f"{scores[-1]:.1f}", (updates[-1], scores[-1]), textcoords="offset points", xytext=(0, 7), ha="right",
            fontsize=9, color=INK,
        )  # fmt: skip
        axes[1].set_title(f"{metric} on validation", loc="left", fontsize=10, color=INK)
    rate = axes[-1]
    rate.plot([r["update"] for r in training], [r["lr"] for r in training], color=TRAIN, lw=1.5)
    rate.set_title("learning rate", loc="left", fontsize=10, color=INK)
    for axis in axes:
        axis.set_xlabel("update", fontsize=9, color=MUTED)
        axis.tick_params(labelsize=8, colors=MUTED)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(picture)
