"""docs/scale.md says what its script computes, from the records that are there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.training import costs
from metaphrase.training.assumed import Assumptions

_spec = importlib.util.spec_from_file_location("make_scale", Path(__file__).parents[2] / "docs" / "make_scale.py")
make_scale = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_scale)


def test_the_page_is_up_to_date():
    assert make_scale.TARGET.read_text(encoding="utf-8") == make_scale.page(), "run: python docs/make_scale.py"


def test_its_pictures_are_there():
    text = make_scale.TARGET.read_text(encoding="utf-8")
    pictures = [line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) == 2 and all((make_scale.TARGET.parent / picture).is_file() for picture in pictures)


@pytest.mark.parametrize("preset", ["base", "big"])
def test_what_more_gpus_bring(preset):
    """Eight GPUs of a machine lose little; many machines lose much with one batch, and little with sixteen."""
    config, assumed = MetaphraseConfig.from_preset(preset), Assumptions()
    flops = 3 * 104 * costs.forward_flops(config, 32, 32)
    alone = assumed.update(config, 1, flops, 1)
    assert alone.sending == 0 and alone.operations == pytest.approx(flops / (312e12 * 0.3))

    def efficiency(gpus: int, batches: int) -> float:
        one, many = (assumed.update(config, n, batches * flops, batches) for n in (1, gpus))
        return one.seconds / many.seconds

    assert 1 > efficiency(8, 1) > 0.8 > efficiency(512, 1)
    assert efficiency(512, 1) < efficiency(512, 4) < efficiency(512, 16) < 1 and efficiency(512, 16) > 0.8
    sent = 2 * 511 / 512 * 4 * costs.parameters(config) / 25e9
    assert assumed.update(config, 512, flops, 1).sending == pytest.approx(sent)


def test_small_batches_wait_for_the_start_of_work():
    config, assumed = MetaphraseConfig.from_preset("base"), Assumptions()
    small = assumed.update(config, 1, 3 * costs.forward_flops(config, 32, 32), 1)
    assert small.learning == small.launches > small.operations


def test_sizes_and_times():
    assert [make_scale.size(n) for n in (5, 252_330_000, 28e9, 1e13)] == ["5 B", "252 MB", "28 GB", "10 TB"]
    assert [make_scale.span(n) for n in (9, 600, 9000, 864_000)] == ["9 s", "10.0 min", "2.5 h", "10.0 days"]
