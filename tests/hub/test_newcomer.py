"""From a corpus on the Hub to a model on the Hub, by the commands that docs/sharing.md tells a newcomer to type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPE = """
data: {path: alice/numbers, source: de, target: en}
tokenizer: {kind: units, vocab_size: 20}
model: {preset: tiny}
batches: {tokens: 256}
max_updates: 4
evaluation: {every: 2}
licence: cc-by-nc-4.0
"""


def walk() -> dict[str, Any]:
    import contextlib
    import io

    from datasets import Dataset
    from huggingface_hub import HfApi, ModelCard, hf_hub_download

    from metaphrase.cli import main
    from metaphrase.modeling.companions import weights_digest

    words = {"eins": "one", "zwei": "two", "drei": "three"}
    for split, count in (("train", 60), ("validation", 6), ("test", 6)):
        lines = [[list(words)[(i * k + 1) % 3] for k in range(1 + i % 4)] for i in range(count)]
        pairs = {"de": [" ".join(line) for line in lines], "en": [" ".join(words[w] for w in line) for line in lines]}
        Dataset.from_dict(pairs).push_to_hub("alice/numbers", split=split, private=True)
    Path("numbers.yaml").write_text(RECIPE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train = main(["train", str(Path("numbers.yaml").resolve()), "--output", "runs/numbers"])
        publish = main(["publish", "runs/numbers", "alice/numbers-de-en", "--private"])
    results = json.loads(Path(hf_hub_download("alice/numbers-de-en", "results.json")).read_text())
    recipe = Path(hf_hub_download("alice/numbers-de-en", "recipe.yaml")).read_text()
    log = Path(hf_hub_download("alice/numbers-de-en", "train_log.jsonl")).read_text()
    Path("in").write_text("eins zwei\n\ndrei\n")
    translate = main(["translate", "alice/numbers-de-en", "--input", "in", "--output", "out"])
    return {
        "codes": [train, publish, translate],
        "printed": printed.getvalue().split(),
        "results": results,
        "digest": weights_digest("runs/numbers"),
        "card": ModelCard.load("alice/numbers-de-en").data.to_dict(),
        "places": [text for text in (json.dumps(results), recipe, log) if str(Path.cwd()) in text],
        "samples": "samples" in log,
        "logged": len(log.splitlines()),
        "lines": Path("out").read_text().split("\n"),
        "private": HfApi().model_info("alice/numbers-de-en").private,
    }


def test_from_a_corpus_to_a_model_on_the_hub(client: Callable[..., Any]) -> None:
    found = client(walk)
    assert found["codes"] == [0, 0, 0] and found["private"] is True
    assert found["printed"][-1].endswith("/alice/numbers-de-en")
    assert found["results"]["weights"] == found["digest"]
    assert found["results"]["command"] == "metaphrase train numbers.yaml --output runs/numbers"
    assert found["places"] == [] and found["samples"] is False and found["logged"] >= 2
    card = found["card"]
    assert card["datasets"] == ["alice/numbers"] and card["language"] == ["de", "en"]
    assert card["license"] == "cc-by-nc-4.0" and card["model-index"][0]["results"]
    assert len(found["lines"]) == 4 and found["lines"][1] == found["lines"][3] == ""
