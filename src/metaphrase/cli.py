"""The command line: `metaphrase train | translate | score | attend | publish`.

Only what a command needs is imported, when it is needed: help and most error messages come before torch does.
A mistake of the user's ends in one sentence on stderr and exit code 2; `METAPHRASE_DEBUG=1` shows the traceback too.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence

from . import __version__
from .configuration.errors import MetaphraseError
from .configuration.limits import nearest
from .configuration.recipe_files import recipe_name, recipe_names
from .mistakes import sentence_for

HELP = """\
usage: metaphrase COMMAND …

From raw parallel text to a scored model that loads anywhere.

  metaphrase train RECIPE [--data DIR] [--output DIR] [--minutes M] [--resume] [--key value …]
      RECIPE is a name ({recipes}) or a YAML file

  metaphrase translate MODEL < in.txt > out.txt
      MODEL is a result folder or an id of the Hugging Face Hub

  metaphrase score MODEL --source FILE --reference FILE
      prints scores with their signatures as JSON

  metaphrase attend MODEL "a sentence" [-o page.html] [--explain WORD] [--png]
      writes a page that shows what every head attends to; --summary and --align are for whole files

  metaphrase publish MODEL REPO [--private] [--revision BRANCH] [--create-pr]
      uploads a result folder to the Hugging Face Hub; it then loads with this package and without it

metaphrase COMMAND --help lists the options of a command. On several processes or GPUs:
  accelerate launch -m metaphrase train RECIPE …
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0, 2 after a mistake that was told in one sentence, 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`| head`): nothing more to say, to anybody
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except SystemExit as exit:  # `--help` of a command
        return exit.code if isinstance(exit.code, int) else 2
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None or os.environ.get("METAPHRASE_DEBUG", "0") != "0":
            raise
        print(f"metaphrase{_process()}: {sentence}", file=sys.stderr)
        return 2


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP.format(recipes=", ".join(recipe_names())), end="")
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"metaphrase {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        raise MetaphraseError(
            f'there is no command "{argv[0]}"{nearest(argv[0], COMMANDS)}; there are {", ".join(COMMANDS)}'
        )
    return COMMANDS[argv[0]](argv[1:])


def _train(argv: list[str]) -> int:
    from .configuration.limits import check_limits
    from .configuration.options import RunOptions
    from .options_parser import options_parser, parse_command_line, parse_yaml, to_options
    from .recipes import check_model, find_recipe

    parser = options_parser(
        RunOptions,
        prog="metaphrase train",
        usage="metaphrase train RECIPE [--data DIR] [--output DIR] [--minutes M | --max_updates N | --epochs E] "
        "[--resume] [--key value …]",
        description="Trains a model from a recipe and writes it, scored, to a folder. --data is short for --data.path.",
    )
    names = ", ".join(recipe_names())
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=f"one of {names}, or a YAML file")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the output folder")
    recipe = parse_command_line(parser, RunOptions, argv).recipe
    if recipe is None:
        raise MetaphraseError(f"which recipe? Give one of {names}, or the path of a YAML file")
    found = find_recipe(recipe)
    base = parse_yaml(parser, RunOptions, found.text, found.path, found.lines)
    values = parse_command_line(parser, RunOptions, argv, base)
    options = to_options(RunOptions, values)
    check_limits(options)
    check_model(options)

    from .training.run import train

    command = shlex.join(["metaphrase", "train", *argv])
    folder = train(options, recipe_name=recipe_name(recipe), resume=values.resume, command=command)
    if _is_first():
        print(folder)
    return 0


def _translate(argv: list[str]) -> int:
    from .using import TranslateOptions, translate_command

    options, model = _parse_use(argv, TranslateOptions, "translate", "MODEL [--num_beams N] < in.txt > out.txt")
    translate_command(model, options)
    return 0


def _score(argv: list[str]) -> int:
    from .using import ScoreOptions, score_command

    options, model = _parse_use(argv, ScoreOptions, "score", "MODEL --source FILE --reference FILE")
    score_command(model, options)
    return 0


def _attend(argv: list[str]) -> int:
    from .attending import AttendOptions, attend_command
    from .options_parser import options_parser, parse_command_line, to_options

    parser = options_parser(
        AttendOptions,
        prog="metaphrase attend",
        usage='metaphrase attend MODEL "a sentence" [-o page.html] [--explain WORD] [--png]\n'
        "       metaphrase attend MODEL --summary --input FILE [--reference FILE]\n"
        "       metaphrase attend MODEL --align --input FILE [--reference FILE] [--gold FILE]",
        description=(AttendOptions.__doc__ or "").splitlines()[0],
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a result folder, or an id on the Hugging Face Hub")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the sentence")
    parser.add_argument("--png", action="store_true", help="write heat maps beside the page, as PNG files")
    parser.add_argument("--summary", action="store_true", help="print the health of every head")
    parser.add_argument("--align", action="store_true", help="print word alignments in Pharaoh format")
    values = parse_command_line(parser, AttendOptions, ["--output" if word == "-o" else word for word in argv])
    if values.model is None:
        raise MetaphraseError("which model? Give a result folder, or an id on the Hugging Face Hub")
    flags = {name: values[name] for name in ("png", "summary", "align")}
    attend_command(values.model, values.text, to_options(AttendOptions, values), **flags)
    return 0


def _publish(argv: list[str]) -> int:
    from .options_parser import options_parser, parse_command_line, to_options
    from .sharing import PublishOptions, publish_command

    parser = options_parser(
        PublishOptions,
        prog="metaphrase publish",
        usage="metaphrase publish MODEL REPO [--private] [--revision BRANCH] [--create-pr]",
        description=(PublishOptions.__doc__ or "").splitlines()[0],
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a result folder")
    parser.add_argument("repo", nargs="?", metavar="REPO", help="owner/name on the Hugging Face Hub")
    parser.add_argument("--private", action="store_true", help="make the repo private, where it is new")
    parser.add_argument("--create-pr", dest="create_pr", action="store_true", help="propose it as a pull request")
    values = parse_command_line(parser, PublishOptions, argv)
    if values.model is None or values.repo is None:
        raise MetaphraseError("what is published where? Give a result folder and a repo: metaphrase publish MODEL REPO")
    flags = {name: values[name] for name in ("private", "create_pr")}
    publish_command(values.model, values.repo, to_options(PublishOptions, values), **flags)
    return 0


def _parse_use(argv: list[str], option_class: type, command: str, usage: str) -> tuple:
    """The options of a command that uses a model, and the model's name, checked as far as can be without torch."""
    from .options_parser import options_parser, parse_command_line, to_options
    from .using import check_model_name

    parser = options_parser(
        option_class,
        prog=f"metaphrase {command}",
        usage=f"metaphrase {command} {usage}",
        description=(option_class.__doc__ or "").splitlines()[0],
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a result folder, or an id on the Hugging Face Hub")
    values = parse_command_line(parser, option_class, argv)
    if values.model is None:
        raise MetaphraseError("which model? Give a result folder, or an id on the Hugging Face Hub")
    check_model_name(values.model)
    return to_options(option_class, values), values.model


def _process() -> str:
    """Names the process in a message, where there are several."""
    return f" (process {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "translate": _translate,
    "score": _score,
    "attend": _attend,
    "publish": _publish,
}
