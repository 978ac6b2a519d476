"""One jsonargparse parser for a class of typed options: an argument a field, its docstring as the help.

jsonargparse checks types and merges recipe and command line; its messages are put into one sentence that names the
option, the value, and what would be right.
"""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser, Namespace

from .configuration.errors import MetaphraseError
from .configuration.limits import nearest

Options = TypeVar("Options")


def options_parser(option_class: type, **kwargs: Any) -> ArgumentParser:
    """A parser with an argument for every field; a field that is itself a class of options becomes a group.

    Args:
        option_class: a dataclass with a docstring a field.
        kwargs: for jsonargparse's `ArgumentParser`.
    """
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, **kwargs)
    known = known_options(option_class)
    for prefix, group_class in _groups(option_class).items():
        group = parser.add_argument_group(
            f"{prefix[:-1]}: {_title(group_class)}" if prefix else "options of the command"
        )
        helps = {param.arg_name: param.description for param in parse_from_object(group_class).params}
        for field in fields(group_class):
            name = prefix + field.name
            if name in known:
                group.add_argument(f"--{name}", type=known[name], default=_default(field), help=helps[field.name])
    return parser


@cache
def known_options(option_class: type) -> Mapping[str, Any]:
    """The type of every option, by dotted name (`data.path`)."""
    known = {}
    for prefix, group_class in _groups(option_class).items():
        hints = get_type_hints(group_class)
        known |= {prefix + field.name: hints[field.name] for field in fields(group_class)}
    return {name: hint for name, hint in known.items() if not is_dataclass(hint)}


def parse_command_line(
    parser: ArgumentParser, option_class: type, argv: Sequence[str], base: Namespace | None = None
) -> Namespace:
    """Reads a command line, on top of a recipe's values where there are some.

    Raises:
        MetaphraseError: if an option is unknown or a value has a wrong type.
    """
    with _in_one_sentence(parser, option_class):
        words = list(_expand(argv, known_options(option_class)))
        return parser.parse_args(words, namespace=base.clone() if base else None)


def parse_yaml(parser: ArgumentParser, option_class: type, text: str, path: str, lines: Mapping[str, int]) -> Namespace:
    """The values of a recipe's text on top of the defaults.

    Args:
        lines: where each key stands, for the message.

    Raises:
        MetaphraseError: if a value has a wrong type.
    """
    if not lines:
        return parser.get_defaults()
    with _in_one_sentence(parser, option_class, path, lines):
        return parser.parse_string(text, path, defaults=True)


def validated(parser: ArgumentParser, option_class: type, values: Namespace) -> Namespace:
    """The same values.

    Raises:
        MetaphraseError: if one has a wrong type.
    """
    with _in_one_sentence(parser, option_class):
        parser.validate(values)
    return values


def to_options(option_class: type[Options], values: Namespace, prefix: str = "") -> Options:
    """An instance of the option class with the parsed values."""
    hints = get_type_hints(option_class)
    return option_class(
        **{
            name: to_options(hint, values, f"{prefix}{name}.")
            if is_dataclass(hint)
            else _items(hint, values[prefix + name])
            for name, hint in hints.items()
        }
    )


def item_class(hint: Any) -> type | None:
    """The class of options that a list holds, where it holds such."""
    arguments = get_args(hint)
    return arguments[0] if get_origin(hint) is list and is_dataclass(arguments[0]) else None


def _items(hint: Any, value: Any) -> Any:
    """The value; a list of options as instances of their class, for jsonargparse leaves namespaces in lists."""
    item = item_class(hint)
    if item is None or not isinstance(value, list):
        return value
    return [one if isinstance(one, item) else item(**(one if isinstance(one, dict) else vars(one))) for one in value]


def in_words(hint: Any) -> str:
    """A type as a user would say it: `int | None` is "a whole number or null"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if item_class(hint):
        return f"a list of mappings with any of the keys {', '.join(get_type_hints(arguments[0]))}"
    if origin is list:
        return f"a list [a, b, …], each {in_words(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {in_words(arguments[0])}"
    if origin is dict:
        return "a mapping {key: value}"
    if arguments:  # a union
        return " or ".join(in_words(argument) for argument in arguments)
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}[hint]


def _groups(option_class: type) -> dict[str, type]:
    """Prefix to option class, in the order of the fields, which is that of the data: "" is the class itself."""
    hints = get_type_hints(option_class)
    return {"": option_class} | {f"{name}.": hint for name, hint in hints.items() if is_dataclass(hint)}


def _title(group_class: type) -> str:
    return (group_class.__doc__ or "").splitlines()[0].rstrip(".").lower()


def _default(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]


def _expand(argv: Sequence[str], known: Mapping[str, Any]) -> Iterator[str]:
    """`--data DIR` is short for `--data.path DIR`; a list may be written `a,b`."""
    option = ""
    for word in argv:
        name, equals, value = word.partition("=")
        if name == "--data" and "data.path" in known:
            name = "--data.path"
        if not name.startswith("--"):
            yield _as_list(word, known.get(option))
            option = ""
        elif equals:
            yield f"{name}={_as_list(value, known.get(name[2:]))}"
        else:
            yield name
            option = name[2:]


def _as_list(value: str, hint: Any) -> str:
    return f"[{value}]" if get_origin(hint) in (list, tuple) and not value.startswith("[") else value


@contextmanager
def _in_one_sentence(
    parser: ArgumentParser, option_class: type, path: str = "", lines: Mapping[str, int] | None = None
) -> Iterator[None]:
    """Turns jsonargparse's messages into a MetaphraseError of one sentence, with file and line where there are any."""
    try:
        yield
    except (ArgumentError, TypeError, ValueError) as error:
        key, sentence = _sentence(parser, known_options(option_class), str(error))
        line = f", line {lines[key]}" if lines and key in lines else ""
        raise MetaphraseError(f"{path}{line}: {sentence}" if path else sentence) from error


def _sentence(parser: ArgumentParser, known: Mapping[str, Any], message: str) -> tuple[str, str]:
    """The option that is wrong ("" where none is to blame), and the sentence."""
    wrong = re.search(r'Parser key "([\w.]+)"', message)
    item = item_class(known[wrong[1]]) if wrong and wrong[1] in known else None
    if item is not None:
        return wrong[1], f"{wrong[1]}: {_item_sentence(known[wrong[1]], get_type_hints(item), message)}"
    if wrong and wrong[1] in known:
        given = re.findall(r"(?:Got value|Given value): (.*)", message)
        value = f'is "{given[-1]}"; it' if given else "has a wrong value; it"
        quote = (
            ' (YAML reads no, yes, on and off as true or false: write "no")'
            if given[-1:] in (["True"], ["False"])
            else ""
        )
        return wrong[1], f"{wrong[1]} {value} must be {in_words(known[wrong[1]])}{quote}"
    unknown = re.match(r"unrecognized arguments: (\S+)", message)
    if unknown:
        option = unknown[1].split("=")[0]
        names = [string for action in parser._actions for string in action.option_strings]
        if option.startswith("-"):
            return "", f"there is no option {option}{nearest(option, names)}"
        return "", f'"{option}" is one word too many'
    valueless = re.match(r"argument (\S+): expected one argument", message)
    if valueless:
        return "", f"{valueless[1]} needs a value"
    return "", " ".join(message.split())


def _item_sentence(hint: Any, known: Mapping[str, Any], message: str) -> str:
    """What is wrong with an item of a list of options."""
    unknown = re.search(r"Option '([^']+)' is not accepted", message)
    if unknown:
        return f'there is no option "{unknown[1]}"{nearest(unknown[1], known)}'
    key = re.findall(r'Parser key "(\w+)"', message)
    given = re.findall(r"(?:Got value|Given value): (.*)", message)
    if key and key[-1] in known and given:
        return f'{key[-1]} is "{given[-1]}"; it must be {in_words(known[key[-1]])}'
    return f"it must be {in_words(hint)}"
