"""What a plan counts is what a run shows; what it measures is put together as a run spends its time."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training import costs, plan
from metaphrase.training.material import gather
from metaphrase.training.measure import WARM_UP, Measurement, matrix_peak
from metaphrase.training.plan import Assumptions, Epoch, Run, count_epoch, make_plan, on_gpus
from metaphrase.training.run import make_config, train


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plan of a run, and that run: `(plan, results, training records, options)`."""
    from metaphrase.configuration.options import DataOptions, RunOptions, TokenizerOptions

    from .conftest import TINY, write_corpus

    folder = tmp_path_factory.mktemp("planned")
    corpus = write_corpus(folder / "corpus", {"train": 120, "validation": 17, "test": 11})
    options = RunOptions(
        data=DataOptions(path=str(corpus), source="a", target="b", workers=1),
        tokenizer=TokenizerOptions(vocab_size=330),
        model={**TINY, "d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
        output=str(folder / "run"),
        epochs=2,
        trackers=[],
        threads=1,
        log_every=1,
    )
    options.batches.tokens, options.batches.accumulation = 160, 2
    options.evaluation.every, options.evaluation.sentences, options.evaluation.num_beams = 5, 5, 2
    options.optimizer.ema = 0.9
    planned = make_plan(options, recipe_name="toy", seconds=0.3)
    assert not (folder / "run").exists() and sorted(file.name for file in folder.iterdir()) == ["corpus"]
    result = train(options, recipe_name="toy")
    records = [json.loads(line) for line in (result / "train_log.jsonl").read_text().splitlines()]
    results = json.loads((result / "results.json").read_text())
    return planned, results, [record for record in records if record["kind"] == "training"], options


def test_what_is_counted_is_what_the_run_shows(made):
    planned, results, records, _ = made
    assert planned.parameters == results["model"]["parameters"]
    assert planned.epoch.pairs == results["data"]["train_pairs"]
    first_pass = [record for record in records if record["epoch"] <= 1]
    assert planned.epoch.updates == len(first_pass) and planned.epoch.updates > 3
    assert planned.epoch.target_tokens == first_pass[-1]["tokens"]
    assert planned.end["updates"] == results["training"]["updates"] == 2 * planned.epoch.updates
    assert planned.end["why"] == "epochs" and planned.accumulation == 2


def test_operations_are_those_of_every_batch(made):
    planned, _, _, options = made
    material = gather(options)
    config = make_config(options, material.tokenizer)
    from metaphrase.training.measure import batch_flops
    from metaphrase.training.stream import Stream

    stream = Stream(material, tokens=160, seed=options.seed)
    batches = [batch for _, update in zip(range(len(stream.plan)), stream, strict=False) for batch in update.batches]
    assert sum(batch_flops(config, batch) for batch in batches) == planned.epoch.flops
    tokens = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    assert tokens == planned.epoch.target_tokens and len(batches) == planned.epoch.micro_batches
    rows, source, target = planned.epoch.largest
    assert max(rows * source, rows * target) <= 160


def test_the_checkpoint_is_as_large_as_said(made):
    planned, _, _, options = made
    newest = max(Path(options.output).glob("checkpoints/checkpoint-*"), key=lambda path: int(path.name[11:]))
    size = sum(file.stat().st_size for file in newest.glob("*.safetensors"))
    assert planned.checkpoint_bytes == pytest.approx(size, rel=0.05)


def test_memory_of_the_process(made):
    """The highest mark of this process, which has held far more than this model, is what a run in it would show."""
    planned, *_ = made
    mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert planned.memory["process"] == pytest.approx(mark, rel=0.2)
    names = ("weights", "gradients", "optimizer", "running_mean")
    assert [planned.memory[name] / planned.parameters for name in names] == [4, 4, 8, 4]


def test_measured_parts_are_there(made):
    planned, *_ = made
    found = planned.measured
    assert found.updates >= 3 > WARM_UP - 1 and found.batch_tokens == 160
    for name in ("a_flop", "step", "loss", "greedy", "beam", "metrics", "checkpoint", "peak", "seconds", "memory"):
        assert getattr(found, name) > 0, name
    assert set(found.parts) == {"loss", "greedy", "beam"} and all(0 < part <= 1 for part in found.parts.values())
    json.loads(planned.to_json())


EPOCH = Epoch(1000, 50_000, 100, 100, 10**12, 10**12, (10, 20, 30))
FOUND = Measurement(a_flop=1e-12, loss=1.0, greedy=2.0, metrics=1.0, checkpoint=0.5, beam=0.25)


def run_of(tiny_options, **changes) -> Run:
    options = tiny_options(**{"max_updates": None, "evaluation.every": 30, **changes})
    return Run(options, EPOCH, 0.1, FOUND, 2.0)


def test_time_goes_by_as_in_a_run(tiny_options):
    run = run_of(tiny_options, max_updates=70)
    assert run.time_of(29) == pytest.approx(2 + 2.9)
    assert run.time_of(30) == pytest.approx(2 + 3 + 4.5)
    assert run.end(5.0)["trained"] == pytest.approx(2 + 7 + 3 * 4.5)
    assert run.end(5.0)["seconds"] == pytest.approx(2 + 7 + 3 * 4.5 + 5)
    assert run.end(5.0)["evaluations"] == 3
    assert run_of(tiny_options, **{"max_updates": 70, "checkpoints.every": 10}).time_of(29) == pytest.approx(
        2 + 2.9 + 1
    )


def test_the_limit_that_comes_first_ends_the_run(tiny_options):
    assert run_of(tiny_options, epochs=1.5).last_update() == (150, "epochs")
    assert run_of(tiny_options, epochs=1.5, max_updates=20).last_update() == (20, "max_updates")
    # 60 s less a start of 2 and two evaluations of 4; a round of 30 updates and a pause takes 7.5: 6 rounds, 50 updates
    updates, why = run_of(tiny_options, minutes=1, epochs=9).last_update()
    assert why == "minutes" and updates == 6 * 30 + 30
    assert run_of(tiny_options, minutes=0.081).last_update() == (28, "minutes")  # no evaluation was made, none is kept
    assert run_of(tiny_options, minutes=0.101).last_update() == (30, "minutes")
    with pytest.raises(MetaphraseError, match="no end"):
        run_of(tiny_options).last_update()
    assert run_of(tiny_options, epochs=1, **{"evaluation.every": None}).every == 100


def test_a_stream_has_no_known_length(tiny_options):
    changes = {"data.streaming": True, "data.window": 40, "data.test": None, "evaluation.every": 5}
    planned = make_plan(tiny_options(**changes), recipe_name="toy", seconds=0.1)
    assert not planned.epoch.whole and 0 < planned.epoch.pairs <= 40
    assert planned.end["updates"] == 12 and planned.tests == 0
    with pytest.raises(MetaphraseError, match="a stream is, is not known"):
        Run(tiny_options(max_updates=None, epochs=2), replace(EPOCH, whole=False), 0.1, FOUND, 2.0).last_update()


def test_batches_of_what_fits(tiny_options):
    planned = make_plan(tiny_options(**{"batches.tokens": "auto"}), recipe_name="toy", seconds=0.1)
    assert planned.batch_tokens >= 1024 and planned.epoch.updates >= 1


def test_scoring_at_the_end(tiny_options):
    assert plan.finish_seconds(run_of(tiny_options, max_updates=20), tests=0) == 4
    several = run_of(tiny_options, **{"max_updates": 70, "optimizer.ema": 0.9})
    assert plan.finish_seconds(several, tests=40) == 3 * 4 + 40 * 0.25


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    from metaphrase.configuration.options import DataOptions, RunOptions, TokenizerOptions

    from .conftest import TINY, write_corpus

    corpus = write_corpus(tmp_path_factory.mktemp("gpus"), {"train": 300, "validation": 5})
    data = DataOptions(path=str(corpus), source="a", target="b", workers=1, test=None)
    options = RunOptions(data=data, tokenizer=TokenizerOptions(vocab_size=330), model=dict(TINY), trackers=[])
    options.batches.tokens = 100
    found = gather(options)
    return options, found, make_config(options, found.tokenizer)


def test_many_gpus(material):
    options, found, config = material
    one = count_epoch(options, found, config, processes=1)
    eight = count_epoch(options, found, config, processes=8)
    assert eight.updates == math.ceil(one.updates / 8) and eight.flops == one.flops
    assert one.slowest_share == one.flops and eight.flops / 8 <= eight.slowest_share < eight.flops
    assumed = Assumptions(launch=0.0)
    alone, few, many = (on_gpus(replace(options, epochs=2), found, config, n, assumed, None) for n in (1, 8, 64))
    assert alone["sending"] == 0 and alone["efficiency"] == pytest.approx(1)
    assert few["sending"] == pytest.approx(costs.all_reduce_seconds(4 * costs.parameters(config), 8, 250e9))
    assert 1 > few["efficiency"] > many["efficiency"] > 0
    assert few["updates"] == 2 * eight.updates and few["tokens_an_update"] > 7 * alone["tokens_an_update"]
    assert not few["measured_speed"] and few["bound"] == "operations"
    slow = on_gpus(replace(options, epochs=2), found, config, 8, Assumptions(launch=1e6), None)
    assert slow["bound"] == "launches" and slow["update"] > costs.kernels(config)
    here = on_gpus(options, found, config, 8, assumed, FOUND)
    assert here["measured_speed"] and here["seconds"] is None


def test_a_slow_machine_measures_smaller_batches(material):
    from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
    from metaphrase.training.measure import affordable

    options, found, config = material
    model = MetaphraseForConditionalGeneration(config)
    large = replace(options, batches=replace(options.batches, tokens=100_000))
    assert affordable(large, found, model, peak=1e15, seconds=10) == 100_000
    assert affordable(large, found, model, peak=1e6, seconds=10) == 256
    assert affordable(options, found, model, peak=1e6, seconds=10) == 100


def test_values_that_cannot_be(tiny_options):
    for words, sentence in (({"gpus": 0}, "--gpus is 0"), ({"seconds": 0}, "--seconds is 0")):
        with pytest.raises(MetaphraseError, match=sentence):
            make_plan(tiny_options(), recipe_name="toy", **words)


def test_matrix_peak():
    import torch

    assert 1e8 < matrix_peak(torch.device("cpu"), size=128, seconds=0.01) < 1e14
