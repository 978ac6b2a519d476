"""What `push_to_hub`, `save_pretrained(push_to_hub=True)`, the Trainer and `PublishCallback` leave on the Hub.

The functions that take no fixture run in client processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Answer, Hub

CODE = {path.name for path in (Path(__file__).parents[2] / "modeling").glob("[!_]*.py")} | {"presets.py"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
BESIDE = {".gitattributes", "README.md", "config.json", "generation_config.json", "results.json", *CODE, *TOKENIZER}
WHOLE = {*BESIDE, "model.safetensors"}


def look(repo: str) -> dict[str, Any]:
    """What a repo holds: files, titles of its commits, card, results, and one weight as loaded."""
    from huggingface_hub import HfApi, ModelCard
    from transformers import AutoModelForSeq2SeqLM

    api = HfApi()
    model = AutoModelForSeq2SeqLM.from_pretrained(repo)
    return {
        "files": sorted(api.list_repo_files(repo)),
        "titles": [commit.title for commit in api.list_repo_commits(repo)],
        "card": str(ModelCard.load(repo)),
        "results": json.loads(Path(api.hf_hub_download(repo, "results.json")).read_text()),
        "weight": model.model.shared.weight[5, 3].item(),
    }


def push_many_ways() -> dict[str, Any]:
    import torch
    from huggingface_hub import HfApi
    from tiny import save_tiny, tiny_model
    from transformers import AutoModelForSeq2SeqLM

    import metaphrase

    found: dict[str, Any] = {}
    save_tiny("run")
    model = AutoModelForSeq2SeqLM.from_pretrained("run")
    model.push_to_hub("alice/carried", tags=["mine"])
    found["carried"] = look("alice/carried")
    with torch.no_grad():
        model.model.shared.weight[5, 3] = 0.25
    model.push_to_hub("alice/carried", max_shard_size="20KB")
    found["changed"] = look("alice/carried")
    again = AutoModelForSeq2SeqLM.from_pretrained("alice/carried")
    again.save_pretrained("kept", push_to_hub=True, repo_id="alice/saved", private=True)
    found["saved"] = look("alice/saved")
    found["private"] = HfApi().model_info("alice/saved").private
    (Path("hand") / "written").mkdir(parents=True)
    Path("hand/README.md").write_text("---\nlicense: mit\n---\n# By hand\n")
    tiny_model(280).save_pretrained("hand", push_to_hub=True, repo_id="alice/hand")
    found["by hand"] = Path("hand/README.md").read_text()
    again.push_to_hub("alice/hand", revision="next")
    found["hand"] = look("alice/hand")
    found["branch"] = sorted(HfApi().list_repo_files("alice/hand", revision="next"))
    request = again.push_to_hub("alice/hand", create_pr=True)
    found["request"] = sorted(HfApi().list_repo_files("alice/hand", revision=request.pr_revision))
    Path("run/recipe.yaml").write_text("seed: 1\n")
    metaphrase.publish("run", "alice/records", tell=lambda line: None)
    for name, source in (("same", AutoModelForSeq2SeqLM.from_pretrained("run")), ("other", again)):
        source.push_to_hub("alice/records")
        found[f"records, {name} weights"] = sorted(HfApi().list_repo_files("alice/records"))
    metaphrase.publish("run", "alice/records", tell=lambda line: None)
    metaphrase.publish("kept", "alice/records", tell=lambda line: None)
    found["records, published"] = sorted(HfApi().list_repo_files("alice/records"))
    metaphrase.publish("kept", "alice/hand", tell=lambda line: None)
    found["published"] = look("alice/hand")
    return found


@pytest.fixture(scope="module")
def pushed(prepare: Callable[..., Answer]) -> dict[str, Any]:
    return prepare(push_many_ways).value


def test_scores_and_card_go_along_with_unchanged_weights(pushed: dict[str, Any]) -> None:
    carried = pushed["carried"]
    assert set(carried["files"]) == WHOLE
    assert carried["titles"] == ["Add the model card", "Upload model", "initial commit"]
    assert carried["results"]["test"]["sacrebleu"]["score"] == 12.5 and "command" not in carried["results"]
    assert "12.5" in carried["card"] and "- mine" in carried["card"]
    assert 'from_pretrained("alice/carried")' in carried["card"]


def test_changed_weights_in_shards_take_the_place_of_the_old_ones(pushed: dict[str, Any]) -> None:
    changed = pushed["changed"]
    assert changed["weight"] == 0.25 != pushed["carried"]["weight"]
    weights = set(changed["files"]) - BESIDE
    assert "model.safetensors" not in weights and "model.safetensors.index.json" in weights and len(weights) > 3
    assert "test" not in changed["results"] and "12.5" not in changed["card"] and "- mine" in changed["card"]
    assert "license: cc-by-nc-4.0" in changed["card"] and "Not for commercial use" in changed["card"]


def test_saving_can_push(pushed: dict[str, Any]) -> None:
    saved = pushed["saved"]
    assert set(saved["files"]) == WHOLE and pushed["private"] is True and saved["weight"] == 0.25
    assert saved["results"] == pushed["changed"]["results"]
    assert 'from_pretrained("alice/saved")' in saved["card"]


def test_a_card_that_somebody_wrote_stays(pushed: dict[str, Any]) -> None:
    hand = "---\nlicense: mit\n---\n# By hand\n"
    assert pushed["by hand"] == hand and pushed["hand"]["card"] == hand
    assert set(pushed["hand"]["files"]) == WHOLE - TOKENIZER  # none was known
    assert set(pushed["branch"]) == set(pushed["request"]) == WHOLE
    assert set(pushed["published"]["files"]) == WHOLE and "By hand" not in pushed["published"]["card"]


def test_records_of_a_run_stay_with_its_weights(pushed: dict[str, Any]) -> None:
    assert set(pushed["records, same weights"]) == {*WHOLE, "recipe.yaml"}
    assert set(pushed["records, other weights"]) == set(pushed["records, published"]) == WHOLE


def push_refused(repo: str) -> dict[str, Any]:
    from huggingface_hub import HfApi
    from tiny import tiny_model

    model = tiny_model(280)
    model.push_to_hub(repo)
    return {
        "files": sorted(HfApi().list_repo_files(repo)),
        "titles": [c.title for c in HfApi().list_repo_commits(repo)],
    }


def test_HUB_CARD_a_refused_card_loses_no_weights(run_client: Callable[..., Answer], hub: Hub) -> None:
    hub.fail("POST", "/api/validate-yaml", "status", status=400)
    answer = run_client(push_refused, repo="alice/refused-card")
    assert set(answer.value["files"]) == WHOLE - TOKENIZER - {"README.md"}
    assert answer.value["titles"] == ["Upload model", "initial commit"]
    assert "The model is at alice/refused-card without its card, which the Hub refuses" in answer.output
    assert "hf_alice" not in answer.output


# The library's Trainer


def train(repo: str, **options: Any) -> Any:
    """Two steps from alice/base."""
    from datasets import Dataset
    from tiny import SENTENCES
    from transformers import (
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained("alice/base"), AutoTokenizer.from_pretrained("alice/base")
    callbacks = options.pop("callbacks", [])
    arguments = Seq2SeqTrainingArguments(
        repo.replace("/", "-"), max_steps=2, learning_rate=0.1, use_cpu=True, report_to=[], hub_model_id=repo, **options
    )
    data = Dataset.from_dict(dict(tokenizer(SENTENCES, text_target=SENTENCES)))
    collator = DataCollatorForSeq2Seq(tokenizer, model)
    trainer = Seq2SeqTrainer(model, arguments, collator, data, processing_class=tokenizer, callbacks=callbacks)
    trainer.train()
    return trainer


def weight_of(trainer: Any) -> float:
    return trainer.model.model.shared.weight[5, 3].item()


def push_from_trainers() -> dict[str, Any]:
    import logging
    from functools import partial

    from huggingface_hub import HfApi
    from tiny import save_tiny
    from transformers.utils import logging as library

    import metaphrase

    library.set_verbosity_info()
    logging.basicConfig(level=logging.DEBUG)
    api, found = HfApi(), {}
    save_tiny("base")
    metaphrase.publish("base", "alice/base")
    trainer = train("alice/stock", push_to_hub=True)
    for name, size in (("one file", "1GB"), ("shards", "20KB"), ("one file again", "1GB")):
        # The Trainer cuts weights above 50 GB only
        trainer.model.save_pretrained = partial(type(trainer.model).save_pretrained, trainer.model, max_shard_size=size)
        trainer.model.model.shared.weight.data[5, 3] += 1
        trainer.push_to_hub()
        found[name] = {"files": sorted(api.list_repo_files("alice/stock")), "made": weight_of(trainer)}
        metaphrase.publish("alice-stock", "alice/stock")
        found[f"{name}, published"] = look("alice/stock") | {"made": weight_of(trainer)}
    trainer.model.model.shared.weight.data[5, 3] += 1
    del trainer.model.save_pretrained
    trainer.push_to_hub()
    found["stock"] = look("alice/stock") | {"made": weight_of(trainer)}
    trainer = train("alice/ours", callbacks=[metaphrase.PublishCallback("alice/ours", private=True)])
    found["ours"] = look("alice/ours") | {"made": weight_of(trainer), "private": api.model_info("alice/ours").private}
    trainer = train("alice/foreign", callbacks=[metaphrase.PublishCallback("bob/theirs")])
    found["local"] = sorted(path.name for path in Path("alice-foreign").iterdir() if path.is_file())
    return found


@pytest.fixture(scope="module")
def trained(prepare: Callable[..., Answer]) -> Answer:
    return prepare(push_from_trainers)


def test_the_trainer_leaves_a_whole_repo_and_its_pickle(trained: Answer) -> None:
    stock = trained.value["stock"]
    assert set(stock["files"]) == {*WHOLE, "training_args.bin"} and stock["weight"] == stock["made"]
    assert "generated_from_trainer" in stock["card"] and "license: cc-by-nc-4.0" in stock["card"]
    assert stock["results"]["comes_from"]["model"] == "alice/base" and "test" not in stock["results"]


@pytest.mark.parametrize("name", ["one file", "shards", "one file again"])
def test_publishing_cleans_up_after_the_trainer(trained: Answer, name: str) -> None:
    """Neither weights in another form, nor the pickle; what is loaded is what was trained."""
    found = trained.value[f"{name}, published"]
    weights = set(found["files"]) - BESIDE
    assert found["weight"] == found["made"] and "training_args.bin" in trained.value[name]["files"]
    if name == "shards":
        assert "model.safetensors" not in weights and len(weights) > 3
    else:
        assert weights == {"model.safetensors"}


def test_the_callback_publishes_at_the_end(trained: Answer) -> None:
    ours = trained.value["ours"]
    assert set(ours["files"]) == WHOLE and ours["private"] is True and ours["weight"] == ours["made"]
    assert "base_model: alice/base" in ours["card"] and "license: cc-by-nc-4.0" in ours["card"]
    assert (
        "this token may not write to bob/theirs. Later: metaphrase publish alice-foreign bob/theirs" in trained.output
    )
    assert {"model.safetensors", "tokenizer.json", "results.json"} <= set(trained.value["local"])


def test_no_token_is_logged_by_any_of_them(trained: Answer) -> None:
    assert "hf_alice" not in trained.output and "DEBUG" in trained.output
