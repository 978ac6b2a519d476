"""What the Hub asks of a model card's front matter, checked here before anything is sent.

Source: https://huggingface.co/docs/hub/model-cards (metadata specification). A card that breaks a rule is refused by
the Hub, and with it the commit that carries it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

FRONT_MATTER = re.compile(r"\A---\r?\n(?P<yaml>.*?)\r?\n---(\r?\n|\Z)", re.DOTALL)
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}")
LANGUAGE_WORDS = ("code", "multilingual")
LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def card_faults(text: str) -> list[str]:
    """Every rule that a card breaks, each in a few words that name the field; an empty list for a good card."""
    found = FRONT_MATTER.match(text)
    if found is None:
        return ["there is no front matter between two lines of three dashes"]
    try:
        metadata = yaml.safe_load(found["yaml"])
    except yaml.YAMLError as error:
        return ["the front matter is not YAML: " + " ".join(str(error).split())]
    if not isinstance(metadata, dict):
        return ["the front matter is not a list of fields with values"]
    return [*_empty_values("", metadata), *_wrong_names(metadata), *_wrong_results(metadata)]


def _empty_values(place: str, value: Any) -> Iterator[str]:
    if value is None or value == "":
        yield f"{place} is empty"
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place} is {value}"
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _empty_values(f"{place}.{key}" if place else str(key), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _empty_values(f"{place}[{index}]", item)


def _wrong_names(metadata: dict[str, Any]) -> Iterator[str]:
    for language in _listed(metadata.get("language")):
        if language not in LANGUAGE_WORDS and not _matches(LANGUAGE_CODE, language):
            yield f"language {language!r} is no code like de or deu"
    for licence in _listed(metadata.get("license")):
        if not _matches(LICENCE_ID, licence):
            yield f"license {licence!r} is no identifier like apache-2.0"
    if metadata.get("license") == "other" and not metadata.get("license_name"):
        yield "license other needs a license_name"
    for field in ("tags", "datasets", "metrics"):
        for item in _listed(metadata.get(field)):
            if item is not None and not isinstance(item, str):
                yield f"{field} holds {item!r}, which is not text"


def _wrong_results(metadata: dict[str, Any]) -> Iterator[str]:
    for model in _listed(metadata.get("model-index")):
        if not isinstance(model, dict) or not isinstance(model.get("name"), str):
            yield "model-index needs a name that is text"
            continue
        for result in _listed(model.get("results")):
            yield from _wrong_result(result)


def _wrong_result(result: Any) -> Iterator[str]:
    parts = {"task": ("type",), "dataset": ("type", "name")}
    for part, fields in parts.items():
        for field in fields:
            if not isinstance(result, dict) or not isinstance((result.get(part) or {}).get(field), str):
                yield f"a result of model-index needs {part}.{field}"
    for metric in _listed(result.get("metrics")) if isinstance(result, dict) else []:
        if not isinstance(metric, dict) or not isinstance(metric.get("type"), str) or "value" not in metric:
            yield "a metric of model-index needs type and value"


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
