"""The picture of a run can be drawn from any log: empty, without evaluations, with a metric."""

from __future__ import annotations

import json

import matplotlib.image
import pytest

from metaphrase.training.curves import draw_curves

TRAINING = [{"kind": "training", "update": u, "loss": 8.0 / u, "lr": u * 1e-4} for u in range(1, 40)]
SCORED = [{"kind": "evaluation", "update": u, "loss": 7.0 / u, "chrf": 2.0 * u} for u in (10, 20, 30)]


@pytest.mark.parametrize(
    ("records", "metric", "panels"),
    [([], "chrf", 2), (TRAINING, "chrf", 2), (TRAINING + SCORED, "chrf", 3), (TRAINING + SCORED, "loss", 2)],
)
def test_any_log_gives_a_picture(tmp_path, records, metric, panels):
    log, picture = tmp_path / "train_log.jsonl", tmp_path / "curves.png"
    log.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    draw_curves(log, picture, metric)
    image = matplotlib.image.imread(picture)
    assert image.shape[1] == int(690 * panels)
    assert (image[..., :3] < 0.9).any() and image[..., :3].mean() > 0.9  # ink on white
