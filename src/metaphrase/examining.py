"""`metaphrase doctor data | gradients`: what is wrong with the data, and whether an update's gradient is right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from .configuration.errors import MetaphraseError
from .configuration.limits import nearest
from .configuration.options import RunOptions
from .configuration.recipe_files import recipe_help
from .options_parser import options_parser
from .recipes import check_model, parse_run

USAGE = """\
usage: metaphrase doctor data [RECIPE] [--data DIR] [--fix NEW_DIR] [--json FILE] [--key value …]
       metaphrase doctor gradients RECIPE [--data DIR] [--processes P] [--key value …]
"""


def doctor_command(argv: Sequence[str]) -> int:
    """Runs one of the doctor's examinations and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if argv[0] not in EXAMINATIONS:
        known = " and ".join(EXAMINATIONS)
        raise MetaphraseError(f'the doctor does not examine "{argv[0]}"{nearest(argv[0], EXAMINATIONS)}, only {known}')
    return EXAMINATIONS[argv[0]](argv[1:])


def _data(argv: Sequence[str]) -> int:
    """0: nothing worse than a note, 1: a warning, 3: an error."""
    parser = _parser(
        "data", "[RECIPE] [--data DIR] [--fix NEW_DIR] [--json FILE]", "Looks for faults in parallel data."
    )
    parser.add_argument("--fix", metavar="NEW_DIR", help="write a cleaned copy of the data into this new folder")
    parser.add_argument("--json", metavar="FILE", help="write all that was found, with examples, as JSON")
    values, options = parse_run(parser, argv, needs_recipe=False)
    if values.recipe is None and options.data.path is None and isinstance(options.data.train, str):
        raise MetaphraseError("which data? Give a recipe, or --data DIR with --data.source and --data.target")

    from .training.data.cleaning import clean, refuse_existing
    from .training.data.doctor import examine

    if values.fix is not None:
        refuse_existing(Path(values.fix))
    diagnosis = examine(options.data)
    print(diagnosis.table())
    if values.json is not None:
        Path(values.json).write_text(diagnosis.to_json() + "\n", encoding="utf-8")
    if values.fix is not None:
        print(f"\n{clean(options.data, values.fix).summary()}")
    return diagnosis.exit_code


def _gradients(argv: Sequence[str]) -> int:
    """0: all cuts of an update give the same loss and gradient; 1: one does not."""
    description = "Holds the gradients of one update, cut in several ways, against each other."
    parser = _parser("gradients", "RECIPE [--data DIR] [--processes P]", description)
    parser.add_argument("--processes", type=int, default=2, metavar="P", help="processes to try; 1: no others")
    values, options = parse_run(parser, argv)
    if values.processes < 1:
        raise MetaphraseError(f"--processes is {values.processes}; it must be 1 or more")
    check_model(options)

    from .training.gradients import check_gradients

    print("Reading the data and computing gradients …", file=sys.stderr)
    checks = check_gradients(options, processes=(values.processes,) if values.processes > 1 else ())
    width = max(len(check.name) for check in checks)
    print(f"{'name':{width}}  loss_difference  gradient_difference  passed")
    for check in checks:
        passed = "yes" if check.passed else "NO"
        print(f"{check.name:{width}}  {check.loss_difference:15.1e}  {check.gradient_difference:19.1e}  {passed}")
    return 0 if all(check.passed for check in checks) else 1


def _parser(examination: str, usage: str, description: str) -> ArgumentParser:
    parser = options_parser(
        RunOptions,
        prog=f"metaphrase doctor {examination}",
        usage=f"metaphrase doctor {examination} {usage} [--key value …]",
        description=description,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=recipe_help())
    return parser


EXAMINATIONS: dict[str, Callable[[Sequence[str]], int]] = {"data": _data, "gradients": _gradients}
