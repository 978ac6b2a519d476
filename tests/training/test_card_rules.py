"""What the Hub would refuse in a card is found before anything is sent, and a good card has no fault."""

from __future__ import annotations

import pytest

from metaphrase.training.card import render_card
from metaphrase.training.card_rules import card_faults

GOOD = """---
language: [de, en]
license: apache-2.0
datasets: owner/name
model-index:
- name: 'odd: "name" #1'
  results:
  - task: {type: translation}
    dataset: {type: owner/name, name: name}
    metrics: [{type: sacrebleu, value: 36.4}]
---
# A card
"""
BAD = {
    "# no front matter": "there is no front matter between two lines of three dashes",
    "---\na: [\n---\n": "the front matter is not YAML",
    "---\n- a\n---\n": "the front matter is not a list of fields with values",
    "---\nlanguage: null\n---\n": "language is empty",
    "---\nlanguage: [de, null]\n---\n": "language[1] is empty",
    "---\ndatasets: ['']\n---\n": "datasets[0] is empty",
    "---\nlanguage: xx-invalid\n---\n": "language 'xx-invalid' is no code like de or deu",
    "---\nlanguage: German\n---\n": "language 'German' is no code like de or deu",
    "---\nlicense: My own!\n---\n": "license 'My own!' is no identifier like apache-2.0",
    "---\nlicense: other\n---\n": "license other needs a license_name",
    "---\ntags: [1]\n---\n": "tags holds 1, which is not text",
    "---\nmodel-index: [{results: []}]\n---\n": "model-index needs a name that is text",
    GOOD.replace("36.4", ".nan"): "model-index[0].results[0].metrics[0].value is nan",
    GOOD.replace(", value: 36.4", ""): "a metric of model-index needs type and value",
    GOOD.replace("{type: translation}", "{}"): "a result of model-index needs task.type",
    GOOD.replace("{type: owner/name, name: name}", "null"): "model-index[0].results[0].dataset is empty",
}


def test_a_good_card_has_no_fault() -> None:
    assert card_faults(GOOD) == []
    assert card_faults(GOOD.replace("\n", "\r\n")) == []


@pytest.mark.parametrize("text", BAD)
def test_faults_are_named(text: str) -> None:
    assert card_faults(text)[0].startswith(BAD[text])


def test_cards_of_runs_with_odd_names_and_unknown_values_pass() -> None:
    """The data folder is the working folder, a metric is not a number, and nothing else is known."""
    scores = {"sacrebleu": {"score": 1.0, "signature": "a|b:c"}, "chrf": {"score": float("nan")}}
    for path in (".", "/", None, "a: 'b' \"c\"", "owner/name"):
        results = {"name": 'x: "y" #z', "data": {"path": path, "source": "xx-invalid", "target": "en"}, "test": scores}
        assert card_faults(render_card(results)) == []
