"""What lies beside saved weights: results that say which weights they speak of, a card, a tokenizer."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from metaphrase.modeling.companions import CARD, RESULTS, portable_card, portable_results, weights_digest

from .tiny import tiny_model

SCORED = {
    "command": "metaphrase train x --data /home/me/secret",
    "data": {"path": "/home/me/secret", "source": "de", "target": "en"},
    "training": {"updates": 3},
    "test": {"sacrebleu": {"score": 12.5}, "chrf": {"score": math.nan}},
    "validation": None,
    "licence": "cc-by-nc-4.0",
}
CARD_OF_A_RUN = """---
license: cc-by-nc-4.0
language: [de, en]
---
# A run
It scored 12.5.

```console
metaphrase train x --data /home/me/secret
```

![Learning curves](curves.png)

This card was made from the run's `results.json`.
"""


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def scored(tmp_path):
    """A folder as a run leaves it: scores of these weights, and a card."""
    folder = tmp_path / "scored"
    tiny_model().save_pretrained(folder)
    (folder / RESULTS).write_text(json.dumps({**SCORED, "weights": weights_digest(folder)}))
    (folder / CARD).write_text(CARD_OF_A_RUN)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"is": name}))
    return folder


def test_a_new_model_has_results_and_a_card_without_scores(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "new: a model")
    results = read(tmp_path / "new: a model" / RESULTS)
    assert results["weights"] == weights_digest(tmp_path / "new: a model")
    assert results["model"]["parameters"] == model.num_parameters()
    assert results.keys() == {"weights", "model", "versions"} and None not in results["model"].values()
    card = (tmp_path / "new: a model" / CARD).read_text()
    assert "# new: a model" in card and 'from_pretrained("new-a-model")' in card and "model-index" not in card


def test_the_digest_is_of_the_values_not_of_the_files(tmp_path):
    model = tiny_model()
    digests = []
    for place, size in (("a", "1GB"), ("b", "9KB"), ("c", "1GB")):
        if place == "c":
            with torch.no_grad():
                model.model.encoder.layers[0].fc1.bias[3] += 1e-6
        model.save_pretrained(tmp_path / place, max_shard_size=size)
        digests.append(weights_digest(tmp_path / place))
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 2
    assert digests[0] == digests[1] != digests[2] and weights_digest(tmp_path) is None


@pytest.mark.parametrize("size", ["9KB", "1GB"])
def test_scores_go_along_with_the_weights_that_were_scored(scored, tmp_path, size):
    AutoModelForSeq2SeqLM.from_pretrained(scored).save_pretrained(tmp_path / "again", max_shard_size=size)
    results, card = read(tmp_path / "again" / RESULTS), (tmp_path / "again" / CARD).read_text()
    assert results["test"] == {"sacrebleu": {"score": 12.5}, "chrf": {}} and results["data"]["path"] == "secret"
    assert "It scored 12.5." in card and "/home/me" not in card + json.dumps(results) and "curves" not in card
    assert (tmp_path / "again" / "tokenizer.json").read_text() == (scored / "tokenizer.json").read_text()


def test_results_without_a_card_get_one(scored, tmp_path):
    (scored / CARD).unlink()
    model = AutoModelForSeq2SeqLM.from_pretrained(scored)
    for place in (scored, tmp_path / "again"):
        model.save_pretrained(place)
        assert read(place / RESULTS)["test"] and "An encoder-decoder Transformer." in (place / CARD).read_text()


def test_scores_do_not_go_along_with_other_weights(scored, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(scored)
    with torch.no_grad():
        model.model.shared.weight[5] += 1
    for place in ("tuned", "scored"):  # elsewhere, and over the old ones
        model.save_pretrained(tmp_path / place)
        results, card = read(tmp_path / place / RESULTS), (tmp_path / place / CARD).read_text()
        assert results["weights"] == weights_digest(tmp_path / place) and "test" not in results
        assert results["comes_from"]["model"] == "scored" and results["comes_from"]["results"]["training"]
        assert "12.5" not in card and "scores of `scored` are not its own" in card
        assert "license: cc-by-nc-4.0" in card and "Not for commercial use" in card and "- de" in card
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "tuned")
    with torch.no_grad():
        again.model.shared.weight[5] += 1
    for _ in range(3):  # origins do not pile up
        again.save_pretrained(tmp_path / "tuned")
        again.model.shared.weight.data[5] += 1
    comes_from = read(tmp_path / "tuned" / RESULTS)["comes_from"]
    assert comes_from["results"]["data"]["path"] == "secret" and "comes_from" not in comes_from["results"]


def test_what_somebody_wrote_stays(scored, tmp_path):
    (scored / CARD).write_text("# Mine\n")
    (tmp_path / "tokenizer_config.json").write_text("mine")
    model = AutoModelForSeq2SeqLM.from_pretrained(scored)
    model.resize_token_embeddings(model.config.vocab_size + 1)
    model.save_pretrained(scored)
    assert (scored / CARD).read_text() == "# Mine\n"
    model.save_pretrained(tmp_path / "larger")  # another vocabulary: the tokenizer does not fit
    assert not (tmp_path / "larger" / "tokenizer.json").exists()
    AutoModelForSeq2SeqLM.from_pretrained(scored).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == "mine" and not (tmp_path / "tokenizer.json").exists()


def test_a_source_that_is_gone_costs_nothing(scored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained("scored")
    monkeypatch.undo()
    model.save_pretrained(tmp_path / "found")
    assert read(tmp_path / "found" / RESULTS)["test"]
    scored.rename(tmp_path / "moved")
    model.save_pretrained(tmp_path / "kept")
    assert read(tmp_path / "kept" / RESULTS)["comes_from"] == {"model": "scored"}
    assert str(tmp_path) not in (tmp_path / "kept" / CARD).read_text()


def test_weights_are_never_unpickled(scored):
    class Payload:
        def __reduce__(self):
            return open, (str(scored / "ran"), "w")

    (scored / "model.safetensors").unlink()
    torch.save({"model.shared.weight": Payload()}, scored / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"scored has no model\.safetensors"):
        AutoModelForSeq2SeqLM.from_pretrained(scored)
    with pytest.raises(ValueError, match="never a pickle"):
        AutoModelForSeq2SeqLM.from_pretrained(scored, use_safetensors=False)
    assert not (scored / "ran").exists()


def test_what_goes_along_is_of_no_one_machine():
    assert portable_results({"data": {"path": "alice/corpus"}, "a": None, "b": [1]}) == {
        "data": {"path": "alice/corpus"},
        "b": [1],
    }
    assert portable_results({"data": {"path": "../me/corpus/"}}) == {"data": {"path": "corpus"}}
    assert "console" not in portable_card(CARD_OF_A_RUN) and "# A run" in portable_card(CARD_OF_A_RUN)
