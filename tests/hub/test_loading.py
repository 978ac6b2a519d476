"""A shared model loads three ways with identical logits, beams and attention: with the package, with the code that the
repo carries in a process that cannot import the package, and from the cache when there is no Hub. Each function without
fixtures is one such process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Answer

Client = Callable[..., Any]
NO_PACKAGE = ("metaphrase",)


# With the package


def share(folder: str, marker: str) -> dict[str, Any]:
    """Two versions of a model under a tag and on main, the same weights with other code, and with code that leaves a
    file when it runs."""
    from huggingface_hub import HfApi
    from tiny import fingerprint, save_tiny

    from metaphrase.training.publish import publish

    prints: dict[str, Any] = {}
    for name, seed in (("old", 1), ("new", 2)):
        model, tokenizer = save_tiny(f"{folder}/{name}.v1.0", seed)
        model.set_attn_implementation("eager")
        prints[name] = fingerprint(model, tokenizer)
        publish(f"{folder}/{name}.v1.0", "alice/shared")
        if name == "old":
            HfApi().create_tag("alice/shared", tag="v1")
    publish(f"{folder}/new.v1.0", "alice/other")
    change_code(f"{folder}/new.v1.0", "alice/other", "attention.py", "self.scaling = ", "self.scaling = 3 * ")
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling *= 3
    prints["other"] = fingerprint(model, tokenizer)
    publish(f"{folder}/new.v1.0", "alice/marked")
    for name in ("configuration_metaphrase.py", "modeling_metaphrase.py"):
        change_code(f"{folder}/new.v1.0", "alice/marked", name, "", f"open({marker!r}, 'w').close()\n")
    return prints


def change_code(folder: str, repo: str, name: str, old: str, new: str) -> None:
    """Replace the first `old` in a file of a repo's code."""
    from huggingface_hub import HfApi

    code = (Path(folder) / name).read_text()
    assert old in code
    HfApi().upload_file(path_or_fileobj=code.replace(old, new, 1).encode(), path_in_repo=name, repo_id=repo)


def load_with_package(folder: str) -> dict[str, Any]:
    import sys

    from tiny import fingerprint, tokenizer_print
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

    import metaphrase

    found = {}
    for name, source, where in (
        ("local", f"{folder}/new.v1.0", {}),
        ("hub", "alice/shared", {}),
        ("tag", "alice/shared", {"revision": "v1"}),
        ("trusted", "alice/other", {"trust_remote_code": True}),  # the package wins over the repo's changed code
        ("again", "alice/again", {}),  # saved and pushed by a process without the package
        ("tuned", "alice/tuned", {}),
    ):
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
        config = AutoConfig.from_pretrained(source, **where)
        by_config = AutoTokenizer.from_pretrained(source, config=config, **where)
        assert tokenizer_print(by_config) == tokenizer_print(tokenizer)
        model, info = AutoModelForSeq2SeqLM.from_pretrained(
            source, attn_implementation="eager", output_loading_info=True, **where
        )
        assert not any(info.values()), info
        assert type(model) is metaphrase.MetaphraseForConditionalGeneration
        assert type(config) is metaphrase.MetaphraseConfig
        assert type(AutoModel.from_pretrained(source, **where)) is metaphrase.MetaphraseModel
        found[name] = fingerprint(model, tokenizer)
    assert not [name for name in sys.modules if name.startswith("transformers_modules")]
    refuse_pickle(f"{folder}/new.v1.0")
    return found


class Payload:
    """Leaves a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("unpickled", "w"))


def refuse_pickle(folder: str) -> None:
    """A repo whose weights are a pickle is refused by the command line, which does not open it."""
    import contextlib
    import io

    import torch
    from huggingface_hub import HfApi

    from metaphrase.cli import main

    torch.save({"model.shared.weight": Payload()}, "pytorch_model.bin")
    HfApi().create_repo("alice/pickled")
    names = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    for path in [*(Path(folder) / name for name in names), Path("pytorch_model.bin")]:
        HfApi().upload_file(path_or_fileobj=path, path_in_repo=path.name, repo_id="alice/pickled")
    for words in (["translate", "alice/pickled"], ["score", "alice/pickled", "--source", "s", "--reference", "s"]):
        Path("s").write_text("a b\n")
        with contextlib.redirect_stderr(io.StringIO()) as told:
            assert main(words) == 2
        assert "model.safetensors" in told.getvalue()
    assert not Path("unpickled").exists()


# Without the package


def load_without_package(folder: str) -> dict[str, Any]:
    """Load by the repo's own code, in many ways; save, fine-tune and push from there."""
    from huggingface_hub import HfApi
    from tiny import fingerprint
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

    def load(source: str, **where: Any) -> tuple[Any, Any]:
        trusted = {"trust_remote_code": True, **where}
        model, info = AutoModelForSeq2SeqLM.from_pretrained(
            source, attn_implementation="eager", output_loading_info=True, **trusted
        )
        assert not any(info.values()), info
        assert type(model).__module__.startswith("transformers_modules.")
        assert AutoConfig.from_pretrained(source, **trusted).model_type == "metaphrase"
        base = AutoModel.from_pretrained(source, **trusted)
        assert (base.get_input_embeddings().weight == model.get_input_embeddings().weight).all()
        revision = {key: value for key, value in where.items() if key == "revision"}
        return model, AutoTokenizer.from_pretrained(source, trust_remote_code=False, **revision)

    main = HfApi().model_info("alice/shared").sha
    model, tokenizer = load("alice/shared")
    found = {
        "local": fingerprint(*load(f"{folder}/new.v1.0")),
        "hub": fingerprint(model, tokenizer),
        "tag": fingerprint(*load("alice/shared", revision="v1")),
        "code of a commit": fingerprint(*load("alice/shared", code_revision=main)),
        "old weights, new code": fingerprint(*load("alice/shared", revision="v1", code_revision=main)),
    }
    for size, name in (("20KB", "again"), ("1GB", "again")):  # in shards, and then back over them in one file
        model.save_pretrained(name, max_shard_size=size)
        tokenizer.save_pretrained(name)
        found[f"saved, {size}"] = fingerprint(*load(name))
    found["files"] = sorted(path.name for path in Path("again").iterdir())
    found["code of"] = json.loads(Path("again/config.json").read_text())["auto_map"]
    model.push_to_hub("alice/again")
    tokenizer.push_to_hub("alice/again")
    found["pushed"] = fingerprint(*load("alice/again"))
    found["tuned"] = fingerprint(fine_tune(model, tokenizer), tokenizer)
    found["tuned, from the hub"] = fingerprint(*load("alice/tuned"))
    found["tuned files"] = sorted(HfApi().list_repo_files("alice/tuned"))
    return found


def fine_tune(model: Any, tokenizer: Any) -> Any:
    """One step of the library's trainer, which pushes the result to alice/tuned."""
    from datasets import Dataset
    from tiny import SENTENCES
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    pairs = tokenizer(SENTENCES, text_target=SENTENCES)
    arguments = Seq2SeqTrainingArguments(
        "tuned",
        max_steps=1,
        learning_rate=0.1,
        use_cpu=True,
        report_to=[],
        push_to_hub=True,
        hub_model_id="alice/tuned",
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model)
    trainer = Seq2SeqTrainer(model, arguments, collator, Dataset.from_dict(dict(pairs)), processing_class=tokenizer)
    trainer.train()
    trainer.push_to_hub()
    return trainer.model


def load_offline() -> dict[str, Any]:
    from tiny import fingerprint
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    found = {}
    for name, revision in (("hub", None), ("tag", "v1")):
        where = {"revision": revision} if revision else {}
        model = AutoModelForSeq2SeqLM.from_pretrained(
            "alice/shared", attn_implementation="eager", trust_remote_code=True, **where
        )
        found[name] = fingerprint(model, AutoTokenizer.from_pretrained("alice/shared", **where))
    return found


def load_without_trust() -> list[bool]:
    """Whether each way to load tells to ask for trust; then load, with trust, two repos with different code."""
    import sys

    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

    errors = []
    for auto in (AutoConfig, AutoModelForSeq2SeqLM):
        for trust in (False, None):
            try:
                auto.from_pretrained("alice/marked", trust_remote_code=trust)
            except ValueError as error:
                errors.append("trust_remote_code=True" in str(error))
    AutoTokenizer.from_pretrained("alice/marked", trust_remote_code=False)
    assert not [name for name in sys.modules if name.startswith("transformers_modules")]
    return errors


def load_two_codes() -> dict[str, Any]:
    """Load all, and only then use them: code that was mixed up would show in one of them."""
    from tiny import fingerprint
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    found: dict[str, Any] = {"errors": load_without_trust()}
    repos = ("alice/other", "alice/shared", "alice/other")
    models = [
        AutoModelForSeq2SeqLM.from_pretrained(repo, attn_implementation="eager", trust_remote_code=True)
        for repo in repos
    ]
    tokenizer = AutoTokenizer.from_pretrained(repos[0], trust_remote_code=False)
    found["prints"] = [fingerprint(model, tokenizer) for model in models]
    return found


@dataclass(frozen=True)
class Shared:
    """What was put on the Hub: folder, fingerprints by name, and a file that marked code would make."""

    folder: Path
    prints: dict[str, Any]
    marker: Path


@pytest.fixture(scope="module")
def shared(prepare: Callable[..., Answer], tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = tmp_path_factory.mktemp("shared")
    marker = folder / "marked code has run"
    return Shared(folder, prepare(share, folder=folder, marker=marker).value, marker)


@pytest.fixture(scope="module")
def elsewhere(prepare: Callable[..., Answer], shared: Shared) -> dict[str, Any]:
    """What a process without the package loads and makes; its cache stays for the offline test."""
    home = shared.folder / "home"
    return prepare(load_without_package, folder=shared.folder, home=home, blocked=NO_PACKAGE).value


def test_without_the_package(shared: Shared, elsewhere: dict[str, Any]) -> None:
    new, old = shared.prints["new"], shared.prints["old"]
    same = ("local", "hub", "code of a commit", "saved, 20KB", "saved, 1GB", "pushed")
    assert [name for name in same if elsewhere[name] != new] == []
    assert elsewhere["tag"] == elsewhere["old weights, new code"] == old != new
    assert elsewhere["tuned"] == elsewhere["tuned, from the hub"] != new


def test_what_is_made_without_the_package_is_whole(shared: Shared, elsewhere: dict[str, Any]) -> None:
    names = {path.name for path in (shared.folder / "new.v1.0").iterdir()} - {"checkpoints"}
    assert set(elsewhere["files"]) == names
    own = ("configuration_metaphrase.", "modeling_metaphrase.")  # and not `alice/shared--modeling_metaphrase.`
    assert len(elsewhere["code of"]) == 3 and all(name.startswith(own) for name in elsewhere["code of"].values())
    # The library's trainer pickles its arguments; nothing here reads that file.
    assert set(elsewhere["tuned files"]) == {*names, ".gitattributes", "training_args.bin"}


def test_with_the_package(client: Client, shared: Shared, elsewhere: dict[str, Any]) -> None:
    new, old = shared.prints["new"], shared.prints["old"]
    assert new["tied"]
    assert client(load_with_package, folder=shared.folder) == {
        "local": new,
        "hub": new,
        "tag": old,
        "trusted": new,
        "again": new,
        "tuned": elsewhere["tuned"],
    }


def test_offline_from_the_cache(client: Client, shared: Shared, elsewhere: dict[str, Any]) -> None:
    home = shared.folder / "home"
    found = client(load_offline, offline=True, token=None, home=home, blocked=NO_PACKAGE)
    assert found == {"hub": elsewhere["hub"], "tag": elsewhere["tag"]}


def test_no_trust_runs_no_code_and_two_codes_do_not_mix(client: Client, shared: Shared) -> None:
    found = client(load_two_codes, blocked=NO_PACKAGE)
    assert found["errors"] == [True, True, True, True] and not shared.marker.exists()
    other, new = shared.prints["other"], shared.prints["new"]
    assert found["prints"] == [other, new, other] and other["all logits"] != new["all logits"]
