"""The result folder at the start of a run: refused where it holds something else, and given the options as run.

The options are written once the data was read and the model built, so that a mistake in either leaves the folder free
for the corrected command.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import RunOptions
from metaphrase.training import checkpoint

RECIPE, CHECKPOINTS, RESULTS = "recipe.yaml", "checkpoints", "results.json"
MAY_CHANGE = {"workers", "test"}
"""Options of the data that a run may change on its way."""


def prepare_folder(folder: Path, options: RunOptions, resume: bool | str | Path) -> None:
    """Refuse a folder that holds something else, and clear what a dead process left.

    Raises:
        MetaphraseError: says what the folder holds and what would be right.
    """
    used = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if used and not resume:
        what = "a run" if RECIPE in used else f"other files ({', '.join(used[:3])})"
        raise MetaphraseError(f"{folder} already holds {what}; go on with it by --resume, or choose another --output.")
    if used and RECIPE not in used:
        raise MetaphraseError(f"{folder} holds no run to go on with: there is no {RECIPE} in it.")
    if RECIPE in used:
        check_same_run(folder / RECIPE, options)
    checkpoint.clean(folder)
    checkpoint.clean(folder / CHECKPOINTS)


def write_recipe(folder: Path, options: RunOptions) -> None:
    """Write the options as run. From now on the folder holds a run."""
    text = yaml.safe_dump(plain_options(options), sort_keys=False, allow_unicode=True)
    checkpoint.write_file(folder / RECIPE, text)


def check_same_run(recipe: Path, options: RunOptions) -> None:
    """A run goes on with the data, tokenizer, model and seed that it began with.

    Raises:
        MetaphraseError: names the option that changed, and both values.
    """
    before, now = flat(yaml.safe_load(recipe.read_text(encoding="utf-8"))), flat(plain_options(options))
    fixed = ("data.", "tokenizer.", "model.", "seed")
    for key in now:
        group, _, name = key.partition(".")
        added_to_model = group == "model" and key not in before
        changed = added_to_model or (key in before and before[key] != now[key])
        if changed and key.startswith(fixed) and name not in MAY_CHANGE:
            raise MetaphraseError(
                f"The run in {recipe.parent} has {key} {before.get(key, 'unset')}, not {now[key]}; "
                "go on with the same, or choose another --output."
            )


def plain_options(options: RunOptions) -> dict[str, Any]:
    """The options as YAML can hold them."""
    values = asdict(options)
    values["optimizer"]["betas"] = list(values["optimizer"]["betas"])
    return values


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by dotted name, with values that every tracker takes."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[prefix + key] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return result
