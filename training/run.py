"""The whole story of a training run, from raw text to a folder that loads anywhere: read `train` from top to bottom."""

from __future__ import annotations

import contextlib
import datetime
import json
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, LoggerType, ProjectConfiguration

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.limits import check_end, check_limits, nearest
from metaphrase.configuration.options import RunOptions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import checkpoint, kernels, processor, spread, states, together
from metaphrase.training.finish import Run, finish
from metaphrase.training.fit import largest_batch
from metaphrase.training.folder import CHECKPOINTS, RESULTS, flat, plain_options, prepare_folder, write_recipe
from metaphrase.training.judge import Judge
from metaphrase.training.lock import FolderLock
from metaphrase.training.log import TrainLog
from metaphrase.training.loop import Budget, Progress, Task, learn
from metaphrase.training.material import Material, gather
from metaphrase.training.objective import make_loss
from metaphrase.training.running_mean import RunningMean
from metaphrase.training.schedule import peak_learning_rate
from metaphrase.training.snapshot import Learner, Saver, choose_origin, process_seed, restore
from metaphrase.training.stream import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
        KeyboardInterrupt: a signal stopped the run; everything is saved, and how to go on was said.
    """
    started = time.monotonic()
    check_limits(options)
    check_end(options)
    folder = Path(options.output or f"runs/{recipe_name}")
    accelerator = start_processes(options, folder)
    with together.naming(accelerator, "outside of training"), contextlib.ExitStack() as stack:
        stack.callback(kernels.remove)
        lock = FolderLock(folder)
        if accelerator.is_main_process:
            stack.enter_context(lock)
            prepare_folder(folder, options, resume)
        accelerator.wait_for_everyone()
        log = TrainLog(folder, accelerator, every=options.log_every)
        stack.callback(log.close)

        material = gather(options, accelerator)
        known = f"{material.pairs:,} pairs to learn from" if material.pairs is not None else "pairs are streamed"
        log.say(f"{material.report.summary()}; {known}, {len(material.tokenizer):,} tokens known")
        if not material.has_test:
            log.say(f"There is no test split {options.data.test} in the data: nothing is scored at the end.")

        plain = build_model(options, material.tokenizer)
        processes = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
        log.say(f"{plain.num_parameters():,} parameters, {processes} on {accelerator.device.type}")
        if kernels.compiler():
            log.say(f"Kernels compiled by {kernels.compiler()}")
        overlapped = not options.batches.max_out_of_memory
        model, optimizer = spread.prepare(
            accelerator, plain, options.optimizer, compiled=options.compile, overlapped=overlapped
        )
        mean = RunningMean(plain, options.optimizer.ema) if options.optimizer.ema is not None else None
        states.seed_everything(process_seed(options.seed, accelerator.process_index))

        learner = Learner(accelerator, plain, optimizer, mean)
        progress, position = Progress(), None
        origin = choose_origin(accelerator, folder / CHECKPOINTS, resume)
        if origin is not None:
            progress, position = restore(learner, origin, options.seed, material)
            log.say(f"Going on from {origin}: {progress.updates:,} updates, {position.seen:,} pairs seen")
            if accelerator.is_main_process and not isinstance(resume, bool):
                for later in checkpoint.set_aside(folder / CHECKPOINTS, after=progress.updates):
                    log.say(f"A later checkpoint is set aside as {later}")
            accelerator.wait_for_everyone()
        as_given = options
        if options.batches.tokens == "auto":
            tokens = position.tokens if position is not None else find_tokens(plain, material, options, accelerator)
            options = replace(options, batches=replace(options.batches, tokens=tokens))
            log.say(f"Batches of {tokens:,} tokens")
        stream = Stream(
            material,
            tokens=options.batches.tokens,
            seed=options.seed,
            accumulation=options.batches.accumulation,
            world_size=accelerator.num_processes,
            rank=accelerator.process_index,
            position=position,
        )

        if accelerator.is_main_process:
            write_recipe(folder, as_given)
        before = progress.updates
        log.open(after=before)
        accelerator.init_trackers("metaphrase", config=flat(plain_options(options)))
        log.remaining = Budget(options, stream, started).left
        judge = Judge(material.validation, material.tokenizer, options, plain.config, accelerator, log)
        saver = Saver(folder / CHECKPOINTS, learner, stream, judge, lock, options)
        task = Task(
            accelerator,
            model,
            optimizer,
            stream,
            options,
            peak=peak_learning_rate(options.optimizer, plain.config.d_model),
            log=log,
            evaluate=lambda progress: judge.evaluate(spread.whole(accelerator, plain), progress),
            save=saver.save,
            mean=mean,
        )
        reason = learn(task, progress, started=started - progress.seconds)
        log.close()
        if reason == "signal":
            again = to_go_on(command or f"metaphrase train {recipe_name}", resume)
            log.say(f"Stopped after {progress.updates:,} updates, all saved. Go on with: {again}")
            raise KeyboardInterrupt
        if progress.updates == 0:
            raise MetaphraseError("The time was up before the first update; give the run more minutes.")
        log.say(f"Training ended ({reason}) after {progress.updates:,} updates.")
        if progress.updates == before and is_finished(folder, before):
            log.say(f"{folder} is finished; give it a larger budget to train on.")
        else:
            finish(
                Run(folder, recipe_name, command, options, material, accelerator, judge), plain, progress, stream.epochs
            )
        together.end(accelerator)
    return folder


def start_processes(options: RunOptions, folder: Path) -> Accelerator:
    """Accelerate's view of this process: its device, its place among the others, precision and trackers."""
    mixed = options.mixed_precision
    if mixed is None:
        mixed = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
    check_trackers(options.trackers)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # without it a launcher's CPU processes do not find each other
        mixed_precision=mixed,
        log_with=options.trackers or None,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "trackers")),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=options.timeout)),
        ],
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # ours is exact; the environment's is not
    )
    if accelerator.device.type == "cpu":
        processor.settle(options.threads, accelerator.num_processes, compiled=options.kernels)
    return accelerator


def check_trackers(wanted: list[str]) -> None:
    """Raises where a tracker is unknown to Accelerate or not installed."""
    known, here = [str(kind) for kind in LoggerType if kind != LoggerType.ALL], list(map(str, get_available_trackers()))
    for name in wanted:
        if name not in known:
            raise MetaphraseError(f'trackers: there is no "{name}"{nearest(name, known)}, only {", ".join(known)}.')
        if name not in here:
            raise MetaphraseError(f"trackers: {name} is not installed; install it, or leave it out.")


def build_model(options: RunOptions, tokenizer: PreTrainedTokenizerFast) -> MetaphraseForConditionalGeneration:
    """A model drawn by the run's seed, the same on every process, that generates as the run is scored."""
    states.seed_everything(options.seed)
    model = MetaphraseForConditionalGeneration(make_config(options, tokenizer))
    model.generation_config.update(
        num_beams=options.evaluation.num_beams, length_penalty=options.evaluation.length_penalty
    )
    return model


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


def to_go_on(command: str, resume: bool | str | Path) -> str:
    """The command that goes on from the newest checkpoint, after one that was stopped."""
    resumed = ("--resume", f"--resume={resume}", *(() if isinstance(resume, bool) else (str(resume),)))
    return shlex.join([*(word for word in shlex.split(command) if word not in resumed), "--resume"])


def find_tokens(model: torch.nn.Module, material: Material, options: RunOptions, accelerator: Accelerator) -> int:
    """The batch size for `batches.tokens: auto`. No random state is changed by the search."""
    random = states.random_states()
    window = material.windows(0, 0)
    longest = int(max(window.source_lengths.max(), window.target_lengths.max()))
    loss = make_loss(options.optimizer.rdrop)
    tokens = largest_batch(model, loss, accelerator, longest=longest, vocabulary=len(material.tokenizer))
    states.restore_random_states(random)
    return tokens


def is_finished(folder: Path, updates: int) -> bool:
    """Whether the folder holds the results of a run of so many updates."""
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    return results.get("training", {}).get("updates") == updates  # a plain save has none
