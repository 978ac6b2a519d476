"""What the Hub refuses in a README: front matter that is no YAML, has empty values, or breaks a rule.

The rules are those of the Hub's metadata specification as far as a model card written here can meet them.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

FRONT_MATTER = re.compile(r"\A\s*---\r?\n(.*?)\r?\n---(\r?\n|\Z)", re.DOTALL)
LANGUAGE = re.compile(r"([a-z]{2,3}|multilingual|code)\Z")
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*\Z")
TEXT_LISTS = ("tags", "datasets", "metrics")


def card_errors(readme: str) -> list[str]:
    """Every reason to refuse `readme`; an empty list for a good card, and for one without front matter."""
    found = FRONT_MATTER.match(readme)
    if found is None:
        return []
    try:
        metadata = yaml.safe_load(found.group(1))
    except yaml.YAMLError as error:
        return [f"YAML: {error}".replace("\n", " ")]
    if metadata is None:
        return []
    if not isinstance(metadata, dict):
        return ["the front matter must be a mapping"]
    return [*_empty_values(metadata, "metadata"), *_field_errors(metadata), *_result_errors(metadata)]


def card_tags(readme: str) -> list[str]:
    """The tags that the Hub derives from a card's metadata, as far as clients read them."""
    found = FRONT_MATTER.match(readme)
    metadata = yaml.safe_load(found.group(1)) if found else None
    if not isinstance(metadata, dict):
        return []
    licences = [f"license:{name}" for name in _as_list(metadata.get("license", []))]
    return [*_as_list(metadata.get("tags", [])), *_as_list(metadata.get("language", [])), *licences]


def _empty_values(value: Any, path: str) -> list[str]:
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return [f'"{path}" must have a value']
    if isinstance(value, dict):
        return [error for key, item in value.items() for error in _empty_values(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [error for index, item in enumerate(value) for error in _empty_values(item, f"{path}[{index}]")]
    return []


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _field_errors(metadata: dict[str, Any]) -> list[str]:
    errors = []
    for field, pattern in (("language", LANGUAGE), ("license", LICENCE)):
        for value in _as_list(metadata.get(field, [])):
            if not isinstance(value, str) or not pattern.match(value):
                errors.append(f'"{field}" is not valid: {value!r}')
    for field in TEXT_LISTS:
        if not all(isinstance(value, str) for value in _as_list(metadata.get(field, []))):
            errors.append(f'"{field}" must be an array of strings')
    return errors


def _result_errors(metadata: dict[str, Any]) -> list[str]:
    """Rules of `model-index`: a named model, and a task, a dataset and metrics with values in each result."""
    errors = []
    for index, model in enumerate(metadata.get("model-index", [])):
        place = f"model-index[{index}]"
        if not isinstance(model, dict) or not isinstance(model.get("name"), str):
            errors.append(f'"{place}.name" must be a string')
            continue
        for number, result in enumerate(model.get("results", [])):
            errors += _one_result(result, f"{place}.results[{number}]")
    return errors


def _one_result(result: dict[str, Any], place: str) -> list[str]:
    errors = []
    if not isinstance(result.get("task", {}).get("type"), str):
        errors.append(f'"{place}.task.type" is required')
    if not all(isinstance(result.get("dataset", {}).get(key), str) for key in ("type", "name")):
        errors.append(f'"{place}.dataset.type" and ".name" are required')
    for metric in result.get("metrics", []):
        if not isinstance(metric.get("type"), str) or not isinstance(metric.get("value"), (int, float, str)):
            errors.append(f'"{place}.metrics" need a type and a value')
    return errors
