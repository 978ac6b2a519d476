"""The whole story of a training run, from raw text to a folder that loads anywhere: read `train` from top to bottom."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, broadcast_object_list

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import RunOptions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import checkpoint, spread, states
from metaphrase.training.finish import CHECKPOINTS, Run, finish
from metaphrase.training.judge import Judge
from metaphrase.training.lock import FolderLock
from metaphrase.training.log import TrainLog
from metaphrase.training.loop import Budget, Progress, Task, learn
from metaphrase.training.material import gather
from metaphrase.training.schedule import peak_learning_rate
from metaphrase.training.stream import Position, Stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RECIPE = "recipe.yaml"


def train(
    options: RunOptions, *, recipe_name: str, resume: bool | str | Path = False, command: str | None = None
) -> Path:
    """Train a model and return the folder that holds it, its scores and its card.

    Args:
        options: what the run wants.
        recipe_name: names the run, on its card and, unless `options.output` is set, its folder.
        resume: go on from the newest whole checkpoint of the folder (from the beginning where there is none yet), or
            from the checkpoint folder named here.
        command: the command line, for the card and to say how a run that was stopped goes on.

    Raises:
        MetaphraseError: anything a user can mend, in one sentence.
    """
    started = time.monotonic()
    if options.max_updates is None and options.epochs is None and options.minutes is None:
        raise MetaphraseError("The run has no end: set max_updates, epochs or minutes.")
    folder = Path(options.output or f"runs/{recipe_name}")
    accelerator = start_processes(options, folder)
    with contextlib.ExitStack() as stack:
        lock = FolderLock(folder)
        if accelerator.is_main_process:
            stack.enter_context(lock)
            prepare_folder(folder, options, resume)
        accelerator.wait_for_everyone()
        log = TrainLog(folder, accelerator, every=options.log_every)
        stack.callback(log.close)

        material = gather(options, accelerator)
        tokenizer = material.tokenizer
        known = f"{material.pairs:,} pairs to learn from" if material.pairs is not None else "pairs are streamed"
        log.say(f"{material.report.summary()}; {known}, {len(tokenizer):,} tokens known")

        states.seed_everything(options.seed)
        plain = MetaphraseForConditionalGeneration(make_config(options, tokenizer))
        plain.generation_config.update(
            num_beams=options.evaluation.num_beams, length_penalty=options.evaluation.length_penalty
        )
        processes = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
        log.say(f"{plain.num_parameters():,} parameters, {processes} on {accelerator.device.type}")
        model, optimizer = spread.prepare(accelerator, plain, options.optimizer, compiled=options.compile)
        states.seed_everything(options.seed + 1_000_003 * (accelerator.process_index + 1))

        progress, position = Progress(), None
        origin = chosen_checkpoint(accelerator, folder / CHECKPOINTS, resume)
        if origin is not None:
            progress, position = restore(origin, accelerator, plain, optimizer, options)
            log.say(f"Going on from {origin}: {progress.updates:,} updates, {position.seen:,} pairs seen")
        stream = Stream(
            material,
            tokens=options.batches.tokens,
            seed=options.seed,
            accumulation=options.batches.accumulation,
            world_size=accelerator.num_processes,
            rank=accelerator.process_index,
            position=position,
        )
        log.open(after=progress.updates)
        accelerator.init_trackers("metaphrase", config=flat(plain_options(options)))
        judge = Judge(material.validation, tokenizer, options, plain.config, accelerator, log)

        def save(progress: Progress) -> None:
            log.settle(progress)
            saved = snapshot(progress, stream, accelerator, options)
            tensors, moments = states.model_tensors(plain), states.optimizer_tensors(plain, optimizer)
            if accelerator.is_main_process:
                lock.touch()
                root = folder / CHECKPOINTS

                def fill(place: Path) -> None:
                    states.save_tensors(place / "model.safetensors", tensors)
                    states.save_tensors(place / "optimizer.safetensors", moments)
                    plain.config.save_pretrained(place)

                checkpoint.write_checkpoint(root, progress.updates, fill, saved)
                best = judge.best_updates(progress, options.checkpoints.keep_best)
                checkpoint.rotate(root, keep_last=options.checkpoints.keep_last, best=best)
            accelerator.wait_for_everyone()

        def evaluate(progress: Progress) -> None:
            judge.evaluate(spread.whole(accelerator, plain), progress)

        peak = peak_learning_rate(options.optimizer, plain.config.d_model)
        task = Task(accelerator, model, optimizer, stream, options, peak, log, evaluate, save)
        log.remaining = Budget(options, stream, started).left
        reason = learn(task, progress, started=started - progress.seconds)
        log.close()
        if reason == "signal":
            again = f"{command or f'metaphrase train {recipe_name}'}".removesuffix(" --resume")
            log.say(f"Stopped after {progress.updates:,} updates, all saved. Go on with: {again} --resume")
            raise KeyboardInterrupt
        log.say(f"Training ended ({reason}) after {progress.updates:,} updates.")
        run = Run(folder, recipe_name, command, options, material, accelerator, judge)
        finish(run, plain, progress, stream.epochs)
        accelerator.end_training()
    return folder


def start_processes(options: RunOptions, folder: Path) -> Accelerator:
    """Accelerate's view of this process: its device, its place among the others, precision and trackers."""
    mixed = options.mixed_precision
    if mixed is None:
        mixed = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # without it a launcher's CPU processes do not find each other
        mixed_precision=mixed,
        log_with=options.trackers or None,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "trackers")),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=options.timeout)),
        ],
    )
    if accelerator.device.type == "cpu":
        set_threads(options.threads, accelerator.num_processes)
    return accelerator


def set_threads(wanted: int | None, processes: int) -> None:
    """Share the cores out. OMP_NUM_THREADS rules for a single process; launchers set it to 1 on their own."""
    if wanted is None and processes == 1 and os.environ.get("OMP_NUM_THREADS"):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(wanted or max(1, cores // processes))


def prepare_folder(folder: Path, options: RunOptions, resume: bool | str | Path) -> None:
    """Refuse a folder that holds something else, clear what a dead process left, and write the options as run."""
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
    checkpoint.write_file(folder / RECIPE, yaml.safe_dump(plain_options(options), sort_keys=False, allow_unicode=True))


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


def check_same_run(recipe: Path, options: RunOptions) -> None:
    """A run goes on with the data, tokenizer, model and seed that it began with.

    Raises:
        MetaphraseError: names the option that changed, and both values.
    """
    before, now = yaml.safe_load(recipe.read_text(encoding="utf-8")), plain_options(options)
    for group in ("data", "tokenizer", "model", "seed"):
        old, new = before.get(group), now[group]
        if old == new:
            continue
        if not isinstance(new, dict) or not isinstance(old, dict):
            raise MetaphraseError(f"The run in {recipe.parent} has {group} {old}, not {new}; give it the same.")
        for key in sorted({*old, *new} - {"workers", "test"}):
            if old.get(key) != new.get(key):
                raise MetaphraseError(
                    f"The run in {recipe.parent} has {group}.{key} {old.get(key)}, not {new.get(key)}; "
                    "go on with the same, or choose another --output."
                )


def make_config(options: RunOptions, tokenizer: PreTrainedTokenizerFast) -> MetaphraseConfig:
    """The model's configuration: preset, fields on top of it, and what the tokenizer settles.

    Raises:
        MetaphraseError: an unknown preset, field or value.
    """
    fields = dict(options.model)
    preset = fields.pop("preset", "base")
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id
    settled = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": start,
    }
    try:
        return MetaphraseConfig.from_preset(preset, **{**settled, **fields})
    except ValueError as error:
        raise MetaphraseError(f"model: {error}") from None


def chosen_checkpoint(accelerator: Accelerator, root: Path, resume: bool | str | Path) -> Path | None:
    """The checkpoint to go on from. The main process looks, so that all take the same one."""
    found: list[str | None] = [None]
    if accelerator.is_main_process and resume:
        if isinstance(resume, bool):
            newest = checkpoint.newest_checkpoint(root)
            found = [str(newest) if newest is not None else None]
        else:
            checkpoint.verify(Path(resume))
            found = [str(resume)]
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    return Path(found[0]) if found[0] is not None else None


def snapshot(progress: Progress, stream: Stream, accelerator: Accelerator, options: RunOptions) -> dict[str, Any]:
    """state.json of a checkpoint; every process calls it."""
    from accelerate.utils import gather_object

    random = gather_object([states.random_states()]) if accelerator.num_processes > 1 else [states.random_states()]
    scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
    return {
        "progress": vars(progress),
        "position": vars(stream.position),
        "random": random,
        "scaler": scaler,
        "processes": accelerator.num_processes,
        "options": plain_options(options),
    }


def restore(
    origin: Path,
    accelerator: Accelerator,
    model: MetaphraseForConditionalGeneration,
    optimizer: torch.optim.Optimizer,
    options: RunOptions,
) -> tuple[Progress, Position]:
    """Weights, moments, random states and counts from a checkpoint; every process calls it and reads the folder."""
    state = checkpoint.read_state(origin)
    states.load_model_tensors(model, states.load_tensors(origin / "model.safetensors"), origin)
    states.load_optimizer_tensors(model, optimizer, states.load_tensors(origin / "optimizer.safetensors"))
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    progress, position = Progress(**state["progress"]), Position(**state["position"])
    rank = accelerator.process_index
    if rank < len(state["random"]):
        states.restore_random_states(state["random"][rank])
    else:  # a process that was not there before
        states.seed_everything(options.seed + 1_000_003 * (rank + 1) + 7919 * progress.updates)
    if not accelerator.is_main_process:
        progress.window.pop("loss", None)
    return progress, position
