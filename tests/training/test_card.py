"""The model card: valid metadata whatever the run was called or scored, and every figure from results.json."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from metaphrase.training.card import render_card, write_card
from metaphrase.training.card_rules import card_faults

RESULTS = {
    "name": "captions",
    "recipe": "multi30k_en_de",
    "command": "metaphrase train multi30k_en_de --minutes 30",
    "created": "2026-01-02",
    "data": {
        "path": "bentrevett/multi30k",
        "source": "en",
        "target": "de",
        "train_pairs": 29000,
        "dropped": {"blank": 2, "too long": 3, "undecodable": 0},
        "validation_pairs": 1014,
        "test_pairs": 1000,
    },
    "tokenizer": {"kind": "bpe", "vocab_size": 4000},
    "model": {"parameters": 2612345, "encoder_layers": 3, "decoder_layers": 3},
    "training": {"updates": 12345, "minutes": 30.25, "tokens_per_second": 4021.3, "final": "average of 5"},
    "validation": {"loss": 1.5, "perplexity": 4.4817, "sacrebleu": {"score": 35.11, "signature": "nrefs:1|case:mixed"}},
    "test": {"sacrebleu": {"score": 36.42, "signature": "nrefs:1|case:mixed"}, "chrf": {"score": 60.5}},
    "versions": {"torch": "2.13.0", "python": None},
    "hardware": "2 cores",
    "licence": "cc-by-4.0",
    "limits": "Captions of pictures.",
}


def front(card: str) -> dict:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))


def flatten(value) -> list:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in flatten(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


def test_the_card_says_what_the_run_did():
    card = render_card(RESULTS, curves=True)
    assert card_faults(card) == []
    for told in (
        "29,000",
        "2 blank, 3 too long",
        "12,345",
        "30.25",
        "4,021",
        "average of 5",
        "torch 2.13.0",
        "2 cores",
    ):
        assert told in card, told
    for told in ("2,612,345", "36.42", "35.11", "60.50", "4.482", "`nrefs:1\\|case:mixed`", "curves.png"):
        assert told in card, told
    assert "undecodable" not in card and "python None" not in card and "None" not in card
    assert "metaphrase train multi30k_en_de --minutes 30" in card and "Captions of pictures." in card


def test_metadata_follows_the_hub():
    meta = front(render_card(RESULTS))
    assert meta["language"] == ["en", "de"] and meta["license"] == "cc-by-4.0"
    assert meta["datasets"] == ["bentrevett/multi30k"] and meta["metrics"] == ["sacrebleu", "chrf"]
    assert meta["library_name"] == "transformers" and meta["pipeline_tag"] == "translation"
    result = meta["model-index"][0]["results"][0]
    assert result["dataset"] == {"name": "multi30k", "type": "bentrevett/multi30k", "split": "test"}
    assert result["metrics"][0]["value"] == 36.42
    assert result["metrics"][0]["args"] == {"signature": "nrefs:1|case:mixed"}


@pytest.mark.parametrize(
    "name", ["A: \"quoted\" 'name'", "- dash", "#1", "{{ 7 * 7 }}", "null", "yes", "ünïcode | pipe", "a\nb"]
)
def test_hub_card(name):
    """HUB-CARD: no dataset, no licence, a language that is none, a metric that is not a number, an odd name."""
    results = {
        "name": name,
        "licence": None,
        "data": {"path": None, "source": "xx", "target": "xx-invalid", "train_pairs": None},
        "test": {"sacrebleu": {"score": math.nan, "signature": None}, "chrf": {"score": 12.5}, "loss": math.inf},
        "training": {"minutes": math.nan},
        "versions": None,
    }
    card = render_card(results)
    meta = front(card)
    assert card_faults(card) == []
    leaves = flatten(meta)
    assert None not in leaves and not any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves)
    assert "language" not in meta and "license" not in meta and "datasets" not in meta
    assert meta["metrics"] == ["chrf"]
    assert isinstance(meta["model-index"][0]["name"], str)
    assert (
        "nan" not in card.lower().replace("finance", "") and "inf" not in card.split("## Scores")[1].split("## Data")[0]
    )
    assert "No licence is stated" in card


def test_nothing_known_is_still_a_card():
    card = render_card({})
    assert card_faults(card) == [] and "has not been scored" in card and "model-index" not in card


@pytest.mark.parametrize(
    ("source", "target", "languages"),
    [
        ("en", "de", ["en", "de"]),
        ("pt-BR", "gsw", ["pt", "gsw"]),
        ("no", "nb_NO", ["no", "nb"]),  # `no` must stay a text in YAML
        ("en", "arpabet", ["en"]),
        ("src", "tgt", None),
        ("source", "target", None),
        ("en", "en", ["en"]),
    ],
)
def test_languages(source, target, languages):
    meta = front(render_card({**RESULTS, "data": {"path": "x", "source": source, "target": target}}))
    assert meta.get("language") == languages
    assert ("pipeline_tag" in meta) == (languages is not None and len(languages) == 2)


@pytest.mark.parametrize(
    ("licence", "written", "warned"),
    [
        ("Apache-2.0", {"license": "apache-2.0"}, False),
        ("cc-by-nc-sa-4.0", {"license": "cc-by-nc-sa-4.0"}, True),
        ("PolyForm-Noncommercial-1.0.0", {"license": "other", "license_name": "polyform-noncommercial-1.0.0"}, True),
        ("My: own", {"license": "other", "license_name": "my-own"}, False),
    ],
)
def test_licences(licence, written, warned):
    card = render_card({**RESULTS, "licence": licence})
    meta = front(card)
    assert {key: meta[key] for key in written} == written and card_faults(card) == []
    assert ("Not for commercial use" in card) == warned


def test_a_folder_is_no_dataset_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "data" / "corpus").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    meta = front(render_card({**RESULTS, "data": {"path": "data/corpus", "source": "en", "target": "de"}}))
    assert "datasets" not in meta
    assert meta["model-index"][0]["results"][0]["dataset"] == {"name": "corpus", "type": "corpus", "split": "test"}


def test_further_corpora_are_told():
    more = [{"path": "alice/news", "source": "en", "target": "fr"}, {"path": "/srv/secret", "source": "en"}]
    card = render_card({**RESULTS, "data": {**RESULTS["data"], "more": more}})
    meta = front(card)
    assert meta["language"] == ["en", "de", "fr"] and meta["pipeline_tag"] == "translation"
    assert meta["datasets"] == ["bentrevett/multi30k", "alice/news"]
    assert "| further corpora | alice/news (en → fr), secret (en) |" in card and "/srv" not in card
    assert card_faults(card) == []


def test_a_run_without_a_test_set_shows_validation(tmp_path):
    write_card(tmp_path, {**RESULTS, "test": None})
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "There was no test set." in card
    assert front(card)["model-index"][0]["results"][0]["dataset"]["split"] == "validation"


def test_the_template_is_in_a_wheel(tmp_path):
    """An installed package has the template beside card.py; a checkout has it at the top."""
    root = Path(__file__).resolve().parents[2]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "model_card.md"):
        (source / name).write_bytes((root / name).read_bytes())
    for folder in ("src", "configuration", "modeling", "training", "decoding", "inspection", "conversion"):
        (source / folder).symlink_to(root / folder)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, timeout=120, capture_output=True
    )
    wheel = next(tmp_path.glob("*.whl"))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'Editable' not in str(finder)]\n"
        "from metaphrase.training import card; print(card.__file__, len(card.render_card({})))\n"
        "from metaphrase.configuration.recipe_files import recipe_names; assert 'g2p_cmudict' in recipe_names()\n"
        "from importlib.resources import files; assert (files('metaphrase.inspection') / 'web' / 'page.html').is_file()"
    )
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "site")], check=True, timeout=60)
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "site")],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(tmp_path / "site"))
