"""The command that tells what a run will cost: `plan`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .configuration.errors import MetaphraseError
from .configuration.limits import check_end
from .configuration.options import RunOptions
from .configuration.recipe_files import recipe_help, recipe_name
from .options_parser import options_parser
from .recipes import check_model, parse_run

if TYPE_CHECKING:
    from .training.plan import Plan

USAGE = "metaphrase plan RECIPE [--data DIR] [--minutes M | --max_updates N | --epochs E] [--gpus N] [--json FILE] …"

ASSUMED = {
    "gpu_tflops": ("312", "peak of a GPU that is not at hand, 10^12 bfloat16 operations a second (A100: 312)"),
    "mfu": ("0.3", "part of that peak which training reaches (0.3)"),
    "link": ("25", "10^9 bytes a second that a GPU sends to another machine (200 Gbit/s: 25)"),
    "link_inside": ("250", "10^9 bytes a second that a GPU sends to another of its machine (NVLink: 250)"),
}


def plan_command(argv: Sequence[str]) -> int:
    """Prints what a run will cost.

    Raises:
        MetaphraseError: what `train` would refuse, or a number that cannot be.
    """
    parser = options_parser(
        RunOptions,
        prog="metaphrase plan",
        usage=USAGE + " [--key value …]",
        description="Tells parameters, operations, memory, speed and time of a run before it is started, from a "
        "measurement of seconds on this machine. It takes the options of train.",
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=recipe_help())
    parser.add_argument("--gpus", metavar="N", help="also tell what so many GPUs would do")
    parser.add_argument("--seconds", default="10", help="what measuring updates may take (10)")
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - for the standard output")
    for name, (default, text) in ASSUMED.items():
        parser.add_argument(f"--{name}", default=default, help=f"assumed {text}")
    values, options = parse_run(parser, argv)
    gpus = None if values.gpus is None else int(_number("gpus", values.gpus, whole=True))
    seconds, *assumed = (_number(name, values[name]) for name in ("seconds", *ASSUMED))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise MetaphraseError("plan runs in one process; give the number of GPUs by --gpus")
    check_end(options)
    check_model(options)

    from .training.plan import Assumptions, make_plan

    with _progress() as tell:
        plan = make_plan(
            options,
            recipe_name=recipe_name(values.recipe),
            gpus=gpus,
            seconds=seconds,
            assumptions=Assumptions(**dict(zip(ASSUMED, assumed, strict=True))),
            imports=time.process_time(),
            tell=tell,
        )
    if values.json == "-":
        print(plan.to_json())
        return 0
    print(table(plan))
    if values.json is not None:
        Path(values.json).write_text(plan.to_json() + "\n", encoding="utf-8")
    return 0


def _number(name: str, text: str, *, whole: bool = False) -> float:
    """A value of the command line, above 0."""
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        number = -1
    if not 0 < number < float("inf"):
        raise MetaphraseError(f"--{name} is {text}; it must be a {'whole ' if whole else ''}number above 0")
    return number


class _progress:
    """A bar on a terminal; a line for each thing done elsewhere."""

    def __enter__(self) -> Callable[[str, float], None]:
        from tqdm import tqdm

        style = "{percentage:3.0f}%|{bar:20}| {desc}"
        self.bar = tqdm(total=1.0, bar_format=style, disable=not sys.stderr.isatty(), file=sys.stderr, leave=False)
        self.said = ""
        return self.tell

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def tell(self, what: str, done: float) -> None:
        if self.bar.disable and what and what != self.said:
            print("Reading the data …" if what == "reading the data" else f"Measuring: {what} …", file=sys.stderr)
        self.said = what
        self.bar.n = done
        self.bar.set_description_str(what)


def table(plan: Plan) -> str:
    """The figures, a line each, with what each is: counted, measured or assumed."""
    rows = [*_model_rows(plan), *_speed_rows(plan), *_time_rows(plan), *_gpu_rows(plan)]
    width = max(len(name) for name, *_ in rows)
    kind_width = max(len(kind) for *_, kind in rows)
    lines = [f"{plan.recipe} on {plan.hardware}", ""]
    lines += [f"{name:{width}}  {kind:{kind_width}}  {text}" for name, text, kind in rows]
    return "\n".join(lines)


Rows = list[tuple[str, str, str]]


def _model_rows(plan: Plan) -> Rows:
    epoch, memory = plan.epoch, plan.memory
    each = "an epoch" if epoch.whole else "the first window of the stream"
    tokens = epoch.target_tokens / epoch.updates
    names = ("weights", "gradients", "optimizer", "running_mean", "activations", "loss")
    parts = ", ".join(f"{name.replace('_', ' ')} {size(memory[name])}" for name in names if memory[name])
    return [
        ("model", f"{plan.parameters:,} parameters", "counted"),
        (
            "data",
            f"{epoch.pairs:,} pairs, {epoch.target_tokens:,} target tokens, {epoch.updates:,} updates in {each}; "
            f"{tokens:,.0f} target tokens an update",
            "counted",
        ),
        (
            "operations",
            f"{plan.flops_a_token / 1e6:,.1f} MFLOP a target token, {epoch.flops / epoch.updates / 1e9:,.1f} GFLOP an "
            f"update, {epoch.flops / 1e12:,.1f} TFLOP {each}",
            "counted",
        ),
        ("memory", f"{parts}; at most {size(memory['formula'])} at one time", "counted"),
        ("process", f"{size(memory['process'])} at its highest", "measured"),
        (
            "disk",
            f"{size(plan.checkpoint_bytes)} a checkpoint, at most {plan.checkpoints} are kept: "
            f"{size(plan.checkpoint_bytes * plan.checkpoints)}",
            "counted",
        ),
    ]


def _speed_rows(plan: Plan) -> Rows:
    found = plan.measured
    reach = 1 / found.a_flop
    smaller = f", in batches of {found.batch_tokens:,} tokens" if found.batch_tokens < plan.batch_tokens else ""
    rows = [
        (
            "speed",
            f"{plan.tokens_per_second:,.0f} target tokens a second ({found.updates} updates in {found.seconds:.1f} s"
            f"{smaller}); {reach / 1e9:,.1f} GFLOP/s, {reach / found.peak:.0%} of a plain matrix product",
            "measured",
        ),
        ("update", f"{plan.update:.3f} s, of it {found.step:.3f} s for clipping and Adam", "measured"),
    ]
    if found.evaluation:
        parts = f"loss {found.loss:.1f}, greedy search {found.greedy:.1f}, metrics {found.metrics:.1f}"
        rows.append(("evaluation", f"{found.evaluation:.1f} s ({parts})", "measured"))
    rows.append(("checkpoint", f"{found.checkpoint:.2f} s", "measured"))
    first = f"; {plan.first_reading:.0f} s more the first time" if plan.first_reading else ""
    rows.append(
        ("start", f"{plan.imports:.0f} s of imports, {plan.start:.1f} s to the first update{first}", "measured")
    )
    scored = f", and score {plan.tests:,} test lines" if plan.tests else ""
    rows.append(("end", f"{plan.finish:.0f} s to choose the final weights{scored}", "measured"))
    return rows


def _time_rows(plan: Plan) -> Rows:
    rows = [
        (f"after {step['updates']:,.0f}", f"{span(step['seconds'])}, {step['epochs']:.2f} epochs", "predicted")
        for step in plan.milestones
    ]
    end = plan.end
    text = f"{end['updates']:,} updates, {end['epochs']:.2f} epochs, trained after {span(end['trained'])}"
    return [*rows, ("the run", f"{text}, done after {span(end['seconds'] + plan.imports)} ({end['why']})", "predicted")]


def _gpu_rows(plan: Plan) -> Rows:
    found = plan.gpus
    if found is None:
        return []
    assumed: dict[str, Any] = found["assumptions"]
    speed = (
        "a GPU's speed is that measured here"
        if found["measured_speed"]
        else f"a GPU reaches {assumed['mfu']:.0%} of {assumed['gpu_tflops']:,.0f} TFLOP/s"
    )
    name = f"{found['gpus']} GPU{'s' if found['gpus'] > 1 else ''}"
    rows = [
        (
            name,
            f"{found['tokens_per_second']:,.0f} target tokens a second, {found['efficiency']:.0%} of {found['gpus']} "
            f"times one ({found['sending'] * 1e3:,.1f} ms of {found['update'] * 1e3:,.1f} ms an update for gradients, "
            f"shares of {found['balance']:.0%} evenness)",
            "assumed",
        ),
        (
            "",
            f"{found['updates_an_epoch']:,} updates an epoch of {found['tokens_an_update']:,.0f} target tokens, "
            f"{span(found['epoch'])} an epoch, {size(found['memory'])} a GPU",
            "counted",
        ),
    ]
    if found["seconds"] is not None:
        rows.append(("", f"{found['updates']:,} updates in {span(found['seconds'])}, without evaluation", "assumed"))
    if found["bound"] == "launches":
        speed += f" but needs {assumed['launch']:.0f} µs for each piece of work, which is what takes the time here"
    link = assumed["link_inside" if found["gpus"] <= assumed["machine"] else "link"]
    sent = f"gradients travel after the backward pass, in a ring of {link:,.0f} GB/s"
    rows.append(
        ("", f"{speed}; {sent}; a batch a GPU, so an update learns from {found['gpus']} times as much", "assumed")
    )
    return rows


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit in ("B", "kB") or count >= 100 else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def span(seconds: float) -> str:
    """A time as a person reads it."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
