"""What goes along with the weights: `results.json`, the model card, the tokenizer.

A model that was loaded takes them along from where it came from. `results.json` names the weights that it speaks of, by
their digest. So scores go along only as long as the weights are those that were scored; for other weights a new
`results.json` says which model they come from, and repeats none of its scores as their own.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.utils.hub import cached_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
RESULTS, CARD = "results.json", "README.md"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
RUN_RECORDS = ("recipe.yaml", "train_log.jsonl", "curves.png")
MADE_FROM_RESULTS = "This card was made from"
SIZES = ("encoder_layers", "decoder_layers", "d_model", "vocab_size")
INHERITED = ("language", "license", "license_name", "license_link", "pipeline_tag")
NOT_MEASURED = (
    "Nothing is recorded of how good these weights are, of their training or its data. Measure them on your own data "
    "(`metaphrase score`) before you rely on them."
)
CODE_BLOCK = """
## How to use it

```python
import metaphrase  # pip install metaphrase; or leave it out, and load with trust_remote_code=True
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained("{name}")  # this folder, or its id on the Hub
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


@dataclass(frozen=True)
class Source:
    """Where a model was loaded from: a folder by its absolute path, or a repo of the Hub by its id; "" is nowhere."""

    name: str = ""
    revision: str | None = None
    subfolder: str = ""
    cache_dir: str | None = None
    vocab_size: int | None = None

    def find(self, file: str) -> str | None:
        """Path of a file of that place; None where it is not there, or cannot be had now."""
        if not self.name:
            return None
        missing_is_none = {
            f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "gated_repo", "connection_errors")
        }
        where = {"revision": self.revision, "subfolder": self.subfolder, "cache_dir": self.cache_dir}
        try:
            return cached_file(self.name, file, **where, **missing_is_none)
        except (OSError, ValueError):  # the folder is gone, the repo is not known any more
            return None

    @property
    def public_name(self) -> str:
        """An id of the Hub as it is; of a folder its name alone: where it lies is nobody's business."""
        return os.path.basename(self.name) if os.path.isabs(self.name) else self.name


def weights_digest(folder: str | os.PathLike) -> str | None:
    """SHA-256 of all tensors in a folder's weights, in the order of their names: the same in one file and in shards.

    It is taken over name, type, shape and bytes. None where the folder holds no weights.

    Raises:
        ValueError: if a file is no safetensors.
    """
    place: dict[str, tuple[str, int, dict[str, Any]]] = {}
    for path in _weight_files(folder):
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > os.path.getsize(path):
                raise ValueError(f"{path} is no safetensors file")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        place.update({name: (path, 8 + size, entry) for name, entry in header.items()})
    digest = hashlib.sha256()
    for name in sorted(place):
        path, start, entry = place[name]
        first, last = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        with open(path, "rb") as file:
            file.seek(start + first)
            for offset in range(first, last, 1 << 24):
                digest.update(file.read(min(1 << 24, last - offset)))
    return digest.hexdigest() if place else None


def _weight_files(folder: str | os.PathLike) -> list[str]:
    single = os.path.join(folder, SINGLE)
    if os.path.isfile(single):
        return [single]
    index = read_json(os.path.join(folder, INDEX))
    return sorted({os.path.join(folder, shard) for shard in index.get("weight_map", {}).values()})


def write_companions(model: Any, folder: str | os.PathLike, source: Source, name: str) -> None:
    """Puts results.json, a card and the tokenizer beside saved weights, as far as they are not there already.

    Results that speak of other weights are replaced, and so is a card that was made from such results; a card that
    somebody wrote stays.

    Args:
        model: the model whose weights `folder` holds.
        source: where it was loaded from.
        name: what its card calls it.
    """
    digest = weights_digest(folder)
    if digest is None:
        return
    _copy_tokenizer(model, folder, source)
    results, card = os.path.join(folder, RESULTS), os.path.join(folder, CARD)
    here, there = read_json(results), portable_results(read_json(source.find(RESULTS)))
    stale = here.get("weights") != digest
    carried = there.get("weights") == digest
    if stale:
        here = there if carried else _new_results(model, digest, source, there or portable_results(here))
        _write_json(results, here)
    text = read_text(card)
    if not text or (stale and is_made(text)):
        _write(card, (carried and portable_card(read_text(source.find(CARD)))) or plain_card(here, source, name))


def with_tags(card: str, tags: list[str] | None) -> str:
    """The card with these tags too."""
    model_card = ModelCard(card)
    known = model_card.data.tags or []
    missing = [tag for tag in tags or [] if tag not in known]
    if not missing:
        return card
    model_card.data.tags = [*known, *missing]
    return str(model_card)


def addressed(card: str, repo_id: str) -> str:
    """A card that was made here, with the repo's id in the lines that load the model."""
    if not is_made(card):
        return card
    card = re.sub(r'from_pretrained\("[^"]*"', f'from_pretrained("{repo_id}"', card)
    return re.sub(r"metaphrase translate \S+ <", f"metaphrase translate {repo_id} <", card)


def is_made(card: str) -> bool:
    """Whether a card was made from results, or by the library from nothing, rather than written by somebody."""
    return MADE_FROM_RESULTS in card or "This model card has been automatically generated" in card


def portable_results(value: Any) -> Any:
    """Results as they go along with a model: without the command and the places of data, which are of one machine, and
    without entries that are None or not a number."""
    if isinstance(value, list):
        return [portable_results(item) for item in value]
    if not isinstance(value, dict):
        return value
    known = {key: item for key, item in value.items() if item is not None and item == item and key != "command"}
    path = known.get("path")
    if isinstance(path, str) and (path.count("/") != 1 or os.path.exists(path) or path[0] in "./~"):
        known["path"] = os.path.basename(path.rstrip("/"))
    return {key: portable_results(item) for key, item in known.items()}


def portable_card(card: str) -> str:
    """A card as it goes along with a model: without the command, and without the curves, which stay."""
    return re.sub(r"```console\nmetaphrase train .*?\n```\n+|!\[[^\]]*\]\(curves\.png\)\n+", "", card, flags=re.DOTALL)


def plain_card(results: dict[str, Any], source: Source, name: str) -> str:
    """A card that tells what is known of weights that nobody has scored; licence and languages are those of `source`.

    Only known values stand in its metadata, so that the Hub takes it.
    """
    before = _metadata(read_text(source.find(CARD)))
    data = {key: before[key] for key in INHERITED if before.get(key)}
    origin = results.get("comes_from", {}).get("model")
    if origin and source.name == origin:
        data["base_model"] = origin
    text = [f"# {' '.join(name.split())}", _summary(results)]
    if origin:
        text.append(
            f"Its weights come from `{origin}` and are not those that were scored there: scores of `{origin}` are not "
            "its own."
        )
    if re.search(r"(^|[^a-z])nc([^a-z]|$)|noncommercial", str(results.get("licence", data.get("license", ""))).lower()):
        text.append("> **Not for commercial use.** The licence of the model that it comes from forbids it.")
    block = CODE_BLOCK.format(name=re.sub(r"[^\w./-]+", "-", name).strip("-") or "model").strip()
    text += [block, NOT_MEASURED, f"{MADE_FROM_RESULTS} the model's `{RESULTS}`."]
    metadata = ModelCardData(library_name="transformers", tags=["metaphrase"], **data)
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(text) + "\n"


def _summary(results: dict[str, Any]) -> str:
    model = results.get("model", {})
    size = f" with {model['parameters']:,} parameters" if "parameters" in model else ""
    layers = [model.get(name) for name in ("encoder_layers", "decoder_layers")]
    stacks = "" if None in layers else f" ({layers[0]} encoder and {layers[1]} decoder layers)"
    return f"An encoder-decoder Transformer{size}{stacks}."


def _new_results(model: Any, digest: str, source: Source, before: dict[str, Any]) -> dict[str, Any]:
    """What is known of weights that were not scored. Nothing unknown is in it, so nothing is null."""
    sizes = {name: getattr(model.config, name) for name in SIZES}
    results: dict[str, Any] = {
        "weights": digest,
        "model": {"parameters": model.num_parameters(), **sizes},
        "versions": {package: version(package) for package in ("torch", "transformers")},
    }
    if source.name:
        results["comes_from"] = {"model": source.public_name}
    if before:
        scored = before.get("comes_from", {}).get("results") if "training" not in before else before
        results |= {"licence": before["licence"]} if before.get("licence") else {}
        if scored:
            results["comes_from"] = {**results.get("comes_from", {}), "results": scored}
    return results


def _copy_tokenizer(model: Any, folder: str | os.PathLike, source: Source) -> None:
    """The tokenizer beside which the model lay, if there is none here and the vocabulary has kept its size."""
    if any(os.path.exists(os.path.join(folder, file)) for file in TOKENIZER):
        return
    if source.vocab_size != model.config.vocab_size:
        return
    found = {file: source.find(file) for file in TOKENIZER}
    if all(found.values()):
        for file, path in found.items():
            _write(os.path.join(folder, file), read_text(path))


def _metadata(card: str) -> dict[str, Any]:
    try:
        return ModelCard(card, ignore_metadata_errors=True).data.to_dict() if card else {}
    except (ValueError, TypeError):
        return {}


def read_text(path: str | os.PathLike | None) -> str:
    """Text of a file; "" where there is none."""
    if path is None or not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def read_json(path: str | os.PathLike | None) -> dict[str, Any]:
    """Content of a JSON file with one object; empty where there is none."""
    try:
        content = json.loads(read_text(path) or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: str, text: str) -> None:
    """A file that is there whole or not at all."""
    part = f"{path}.part"
    with open(part, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    os.replace(part, path)


def _write_json(path: str, content: dict[str, Any]) -> None:
    _write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
