"""What the values of `RunOptions` may be, beyond their types: checked once, before anything is read or written."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from .errors import MetaphraseError
from .options import RunOptions
from .presets import PRESETS

_AT_LEAST_ONE = (
    "data.validation_size",
    "data.max_length",
    "data.max_pairs",
    "data.workers",
    "data.window",
    "batches.tokens",
    "batches.accumulation",
    "evaluation.every",
    "evaluation.sentences",
    "evaluation.num_beams",
    "evaluation.patience",
    "checkpoints.keep_last",
    "checkpoints.every",
    "optimizer.max_skipped",
    "max_updates",
    "log_every",
    "timeout",
    "threads",
)
_NOT_NEGATIVE = (
    "data.weight",
    "batches.max_out_of_memory",
    "optimizer.warmup",
    "checkpoints.keep_best",
    "optimizer.weight_decay",
    "optimizer.rdrop",
    "evaluation.length_penalty",
    "evaluation.attention",
    "seed",
)
_ABOVE_ZERO = (
    "data.temperature",
    "optimizer.learning_rate",
    "optimizer.epsilon",
    "optimizer.max_grad_norm",
    "optimizer.skip_above",
    "optimizer.ema",
    "epochs",
    "minutes",
)
SPECIAL_TOKENS = 4


def check_limits(options: RunOptions) -> None:
    """Refuses a value that no run can have.

    Raises:
        MetaphraseError: the sentence names the option, its value and what would be right.
    """
    for keys, right, wanted in (
        (_AT_LEAST_ONE, lambda value: value >= 1, "1 or more"),
        (_NOT_NEGATIVE, lambda value: value >= 0, "0 or more"),
        (_ABOVE_ZERO, lambda value: value > 0, "above 0"),
    ):
        for key in keys:
            value = _get(options, key)
            _check(key, value, value in (None, "auto") or right(value), wanted)
    mean = options.optimizer.ema
    _check("optimizer.ema", mean, mean is None or mean < 1, "a number above 0 and below 1")
    dropout = options.tokenizer.dropout
    _check("tokenizer.dropout", dropout, 0 <= dropout < 1, "a number from 0 up to, but not, 1")
    for number, more in enumerate(options.data.more):
        _check(f"data.more[{number}].weight", more.weight, more.weight >= 0, "0 or more")
        _check_split(f"data.more[{number}].train", more.train)
    for beta in options.optimizer.betas:
        _check("optimizer.betas", options.optimizer.betas, 0 <= beta < 1, "two numbers from 0 up to, but not, 1")
    size = options.tokenizer.vocab_size
    _check("tokenizer.vocab_size", size, size > SPECIAL_TOKENS, f"more than the {SPECIAL_TOKENS} special tokens")
    _check_split("data.train", options.data.train)
    _check_split("data.validation", options.data.validation)
    _check_split("data.test", options.data.test)
    _check_preset(options.model.get("preset", "base"))


def check_end(options: RunOptions) -> None:
    """Refuses a run that nothing would end.

    Raises:
        MetaphraseError: no limit is set.
    """
    if options.max_updates is None and options.epochs is None and options.minutes is None:
        raise MetaphraseError("The run has no end: set max_updates, epochs or minutes.")


def nearest(name: str, names: Any) -> str:
    """` (did you mean "x"?)` for the closest of `names`, or nothing where none is close."""
    known = [str(known) for known in names]
    close = get_close_matches(str(name), known, n=1) or [full for full in known if name and full.startswith(str(name))]
    return f' (did you mean "{close[0]}"?)' if close else ""


def _check_split(key: str, value: str | list[str] | None) -> None:
    if isinstance(value, list):
        _check(key, value, len(value) == 2, "the name of a split, or a list of exactly two files, source first")


def _check_preset(name: Any) -> None:
    if name not in PRESETS:
        raise MetaphraseError(f'there is no preset "{name}"{nearest(name, PRESETS)}; there are {", ".join(PRESETS)}')


def _check(key: str, value: Any, right: bool, wanted: str) -> None:
    if not right:
        raise MetaphraseError(f"{key} is {value}; it must be {wanted}")


def _get(options: RunOptions, key: str) -> Any:
    value: Any = options
    for name in key.split("."):
        value = getattr(value, name)
    return value
