"""A recipe: a YAML file with the options of one run, by name (`configuration/recipes/`) or by path.

Recipe and command line are read by the one parser of `options_parser.py`. Here the file is found and its keys are
checked against the options, so that a mistake is told with its line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from .configuration.errors import MetaphraseError
from .configuration.limits import check_limits, nearest
from .configuration.options import RunOptions
from .configuration.recipe_files import locate_recipe, recipe_names
from .options_parser import (
    item_class,
    known_options,
    options_parser,
    parse_command_line,
    parse_yaml,
    to_options,
    validated,
)


def read_recipe(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> RunOptions:
    """The options of a recipe, checked.

    Args:
        recipe: a name of `recipe_names()`, or the path of a YAML file.
        overrides: values on top of it, by dotted name: `{"data.path": "corpus", "model.d_model": 192}`.

    Raises:
        MetaphraseError: if there is no such recipe, or if it or an override has an unknown key, a wrong type or an
            impossible value.
    """
    parser = options_parser(RunOptions)
    found = find_recipe(recipe)
    values = parse_yaml(parser, RunOptions, found.text, found.path, found.lines)
    known = known_options(RunOptions)
    for key, value in (overrides or {}).items():
        if key.startswith("model."):
            values.model[key.removeprefix("model.")] = value
        elif key in known:
            values[key] = value
        else:
            raise MetaphraseError(f'there is no option "{key}"{nearest(key, known)}')
    options = to_options(RunOptions, validated(parser, RunOptions, values))
    check_limits(options)
    return options


def parse_run(
    parser: ArgumentParser, argv: Sequence[str], *, needs_recipe: bool = True
) -> tuple[Namespace, RunOptions]:
    """Reads a command line over the recipe that it names: all that was parsed, and the run's options, checked.

    Args:
        parser: one for `RunOptions` with an argument `recipe`.
        needs_recipe: refuse a command line that names none; else the defaults stand for it.

    Raises:
        MetaphraseError: a mistake in the recipe or on the command line.
    """
    values = parse_command_line(parser, RunOptions, argv)
    if values.recipe is not None:
        found = find_recipe(values.recipe)
        base = parse_yaml(parser, RunOptions, found.text, found.path, found.lines)
        values = parse_command_line(parser, RunOptions, argv, base)
    elif needs_recipe:
        raise MetaphraseError(f"which recipe? Give one of {', '.join(recipe_names())}, or the path of a YAML file")
    options = to_options(RunOptions, values)
    check_limits(options)
    return values, options


def check_model(options: RunOptions) -> None:
    """Refuses sizes that no model can have. It imports transformers, so that it comes after every cheaper check.

    Raises:
        MetaphraseError: the sentence names the field, its value and what would be right.
    """
    from .configuration.configuration_metaphrase import MetaphraseConfig

    values = {"vocab_size": options.tokenizer.vocab_size, **options.model}
    try:
        MetaphraseConfig.from_preset(values.pop("preset", "base"), **values)
    except (ValueError, TypeError) as error:
        raise MetaphraseError(f"model: {error}") from error


@dataclass(frozen=True)
class Recipe:
    """The text of a recipe whose keys are all known."""

    text: str
    """The file's text."""
    path: str
    """The file's name, for messages."""
    lines: dict[str, int]
    """The line of every key, by dotted name, counted from 1."""


def find_recipe(recipe: str | Path) -> Recipe:
    """Finds a recipe and checks its keys.

    Raises:
        MetaphraseError: if it is not there or cannot be read, is not YAML, or has a key that is unknown or is there
            twice; the sentence names file and line.
    """
    path = locate_recipe(recipe)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MetaphraseError(f"{path} is not UTF-8 text (byte {error.start})") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise MetaphraseError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    lines: dict[str, int] = {}
    if node is not None:
        _check_keys(node, str(path), "", known_options(RunOptions), lines)
    return Recipe(text, str(path), lines)


def _check_keys(node: yaml.Node, path: str, group: str, known: Mapping[str, Any], lines: dict[str, int]) -> None:
    """Every key of a mapping is an option, or a group of options, and is there once; notes the line of each."""
    names = list(dict.fromkeys(key[len(group) :].split(".")[0] for key in known if key.startswith(group)))
    if not isinstance(node, yaml.MappingNode):
        where = f"{path}, line {node.start_mark.line + 1}"
        what = group.rstrip(".") or "a recipe"
        raise MetaphraseError(f"{where}: {what} must hold `key: value` lines ({', '.join(names)})")
    for key_node, value_node in node.value:
        key, line = f"{group}{key_node.value}", key_node.start_mark.line + 1
        if key in lines:
            raise MetaphraseError(f'{path}, line {line}: "{key}" is there twice, first in line {lines[key]}')
        lines[key] = line
        if group.startswith("model.") or key == "model":  # its fields are the model's; the model's class knows them
            if isinstance(value_node, yaml.MappingNode):
                _check_keys(value_node, path, f"{key}.", known, lines)
        elif str(key_node.value) not in names:
            close = nearest(key, [group + name for name in names])
            raise MetaphraseError(f'{path}, line {line}: there is no option "{key}"{close}')
        elif key not in known:
            _check_keys(value_node, path, f"{key}.", known, lines)
        elif (item := item_class(known[key])) and isinstance(value_node, yaml.SequenceNode):
            for number, item_node in enumerate(value_node.value):
                prefix = f"{key}[{number}]."
                options = {prefix + name: hint for name, hint in known_options(item).items()}
                _check_keys(item_node, path, prefix, options, lines)
