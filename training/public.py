"""What everybody may see of a run's records: where data lay on somebody's disk, and lines of that data, stay behind.

The folder keeps its records as they are, as a run goes on from them; only what is sent to the Hub passes through here.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from metaphrase.training.card import is_hub_id

PLACE = re.compile(
    r"""(?<![\w:/\\.~-])                   # not within a word, an address, or a longer path
    (?:
        (?:~[\w.-]*|\.{1,2}|[A-Za-z]:)     # ~, ~name, ., .., C:
        (?:[/\\][^\s/\\'",;|]+)+
      | (?:/[^\s/\\'",;|]+){2,}            # /a/b
    )[/\\]?""",
    re.VERBOSE,
)
DATA_LINES = ("samples", "attention")
"""What an evaluation logs of the data itself."""


def without_places(value: Any) -> Any:
    """`value` with every path that names a place on a disk cut to its last part; lists and dictionaries throughout.

    Such are absolute paths, and those that begin with `~`, `.` or `..`; `owner/name` and `runs/mine` stay.
    """
    if isinstance(value, str):
        return _last_part(value) if _is_absolute(value) else PLACE.sub(lambda found: _last_part(found[0]), value)
    if isinstance(value, dict):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    return value


def without_unknown(value: Any) -> Any:
    """`value` without entries that are None or not a finite number; `json` would write those as no JSON."""
    if isinstance(value, dict):
        return {key: without_unknown(item) for key, item in value.items() if _is_known(item)}
    if isinstance(value, list):
        return [without_unknown(item) for item in value if _is_known(item)]
    return value


def public_results(text: str) -> str:
    """results.json for the Hub: no places, nothing null, and of local corpora their names alone."""
    results = without_places(without_unknown(json.loads(text)))
    if results.get("command"):
        results["command"] = public_command(json.loads(text)["command"])
    data = results.get("data") or {}
    for corpus in (data, *data.get("more", [])):
        if corpus.get("path") and not is_hub_id(corpus["path"]):
            corpus["path"] = _last_part(corpus["path"])
    return json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def public_recipe(text: str) -> str:
    """recipe.yaml for the Hub."""
    return yaml.safe_dump(without_places(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)


def public_log(text: str) -> str:
    """train_log.jsonl for the Hub: figures, and no lines of the data."""
    records = [json.loads(line) for line in text.splitlines()]
    kept = [{key: value for key, value in record.items() if key not in DATA_LINES} for record in records]
    return "".join(json.dumps(without_places(without_unknown(record))) + "\n" for record in kept)


def public_card(text: str) -> str:
    """A card for the Hub: the command on it as `public_command` gives it."""
    return re.sub(r"^metaphrase train .*$", lambda line: public_command(line[0]), text, flags=re.MULTILINE)


def public_command(command: str) -> str:
    """A command line whose arguments name no places; read as the shell does, as paths with spaces are quoted."""
    try:
        words = shlex.split(command)
    except ValueError:
        return without_places(command)
    return shlex.join("=".join(map(without_places, word.split("=", 1))) for word in words)


PUBLIC: dict[str, Callable[[str], str]] = {
    "results.json": public_results,
    "recipe.yaml": public_recipe,
    "train_log.jsonl": public_log,
}
"""How a file is made fit for the Hub; the others go as they are."""


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _is_absolute(text: str) -> bool:
    return "\n" not in text and (PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute())


def _last_part(place: str) -> str:
    """Name of the file or folder at the end of a path; of one that has no name, what stands there."""
    parts = [part for part in re.split(r"[/\\]+", place) if part not in ("", ".", "..", "~")]
    return parts[-1] if parts else "."
