"""The command line: `metaphrase plan | train | translate | score | doctor | attend | publish`.

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
from .configuration.recipe_files import recipe_help, recipe_name, recipe_names
from .mistakes import sentence_for

HELP = """\
usage: metaphrase COMMAND …

From raw parallel text to a scored model that loads anywhere.

  metaphrase train RECIPE [--data DIR] [--output DIR] [--minutes M] [--resume] [--key value …]
      RECIPE is a name ({recipes}) or a YAML file;
      --resume goes on from the newest checkpoint, --resume FOLDER from that one

  metaphrase plan RECIPE [--gpus N] [--json FILE] [options of train]
      tells parameters, memory, speed and time of a run beforehand, from a measurement of seconds

  metaphrase translate MODEL < in.txt > out.txt
      MODEL is a result folder or an id of the Hugging Face Hub

  metaphrase score MODEL --source FILE --reference FILE
      prints scores with their signatures as JSON

  metaphrase doctor data [RECIPE] [--data DIR] [--fix NEW_DIR] [--json FILE]
      looks for faults in parallel data, and writes a cleaned copy; exit code 0, 1 (warnings) or 3 (errors)

  metaphrase doctor gradients RECIPE [--data DIR] [--processes P] [--key value …]
      proves that a gradient does not depend on batches, accumulation and processes; exit code 1 where it does

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
    from .configuration.options import RunOptions
    from .options_parser import options_parser, parse_command_line
    from .recipes import check_model, parse_run

    parser = options_parser(
        RunOptions,
        prog="metaphrase train",
        usage="metaphrase train RECIPE [--data DIR] [--output DIR] [--minutes M | --max_updates N | --epochs E] "
        "[--resume [CHECKPOINT]] [--key value …]",
        description="Trains a model from a recipe and writes it, scored, to a folder. --data is short for --data.path.",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="CHECKPOINT",
        help="go on from the newest checkpoint of the output folder, or from the checkpoint folder named here",
    )
    words = list(argv)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=recipe_help())
    if "--resume" in words and parse_command_line(parser, RunOptions, words).recipe is None:
        at = words.index("--resume")  # `--resume RECIPE`: the only free word is the recipe
        words[at : at + 2] = [*words[at + 1 : at + 2], "--resume"]
    values, options = parse_run(parser, words)
    check_model(options)

    from .training.run import train

    command = shlex.join(["metaphrase", "train", *argv])
    folder = train(options, recipe_name=recipe_name(values.recipe), resume=values.resume, command=command)
    if _is_first():
        print(folder)
    return 0


def _plan(argv: list[str]) -> int:
    from .planning import plan_command

    return plan_command(argv)


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


def _doctor(argv: list[str]) -> int:
    from .examining import doctor_command

    return doctor_command(argv)


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
    "plan": _plan,
    "translate": _translate,
    "score": _score,
    "doctor": _doctor,
    "attend": _attend,
    "publish": _publish,
}
