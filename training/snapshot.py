"""A run as checkpoints hold it: taken whole, and put back bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import RunOptions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import checkpoint, states
from metaphrase.training.judge import Judge
from metaphrase.training.lock import FolderLock
from metaphrase.training.loop import Progress
from metaphrase.training.material import Material
from metaphrase.training.running_mean import NAME as MEAN
from metaphrase.training.running_mean import RunningMean
from metaphrase.training.stream import Position, Stream

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


@dataclass
class Learner:
    """What learns: the model, its optimizer's moments, and the running mean of its weights where one is kept."""

    accelerator: Accelerator
    plain: MetaphraseForConditionalGeneration
    optimizer: torch.optim.Optimizer
    mean: RunningMean | None


def process_seed(seed: int, rank: int, update: int = 0) -> int:
    """Every process draws its own dropout masks."""
    return seed + 1_000_003 * (rank + 1) + 7919 * update


def restore(learner: Learner, origin: Path, seed: int, material: Material) -> tuple[Progress, Position]:
    """Put a checkpoint back. Every process calls it and reads the folder.

    Raises:
        BrokenCheckpoint: a file is not what the manifest says.
        MetaphraseError: it is of another model, or the training pairs or the tokenizer changed since.
    """
    state = checkpoint.read_state(origin)
    check_same_material(origin, state.get("material", {}), material.identity)
    accelerator, plain = learner.accelerator, learner.plain
    states.load_model_tensors(plain, states.load_tensors(origin / MODEL), origin)
    states.load_optimizer_tensors(plain, learner.optimizer, states.load_tensors(origin / OPTIMIZER))
    if learner.mean is not None:
        learner.mean.load(origin)
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    progress, position = Progress(**state["progress"]), Position(**state["position"])
    rank = accelerator.process_index
    if rank < len(state["random"]):
        states.restore_random_states(state["random"][rank])
    else:  # a process that was not there before
        states.seed_everything(process_seed(seed, rank, progress.updates))
    if not accelerator.is_main_process:
        progress.window.pop("loss", None)  # the main process was given the sum of all
    return progress, position


def check_same_material(origin: Path, before: dict[str, str], now: dict[str, str]) -> None:
    """A run goes on with the pairs and the token ids that it began with.

    Raises:
        MetaphraseError: says which of the two is another one.
    """
    for name, what in (("tokenizer", "The tokenizer is not the one"), ("pairs", "The training pairs are not those")):
        if name in before and name in now and before[name] != now[name]:
            raise MetaphraseError(
                f"{what} that {origin} was written with; put the data back as they were, or choose another --output."
            )


def choose_origin(accelerator: Accelerator, root: Path, resume: bool | str | Path) -> Path | None:
    """The checkpoint to go on from. The main process looks, so that all take the same one.

    Raises:
        BrokenCheckpoint: the one that `resume` names is broken; of those in `root` a broken one is passed over.
    """
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


@dataclass
class Saver:
    """Writes checkpoints of a run into `root`, and deletes those that are no longer wanted."""

    root: Path
    learner: Learner
    stream: Stream
    judge: Judge
    lock: FolderLock
    options: RunOptions

    def save(self, progress: Progress) -> None:
        """Every process calls it, for tensors may be spread over them; the main one writes.

        Raises:
            MetaphraseError: the disk is full; names the last checkpoint that can be used.
        """
        accelerator, plain = self.learner.accelerator, self.learner.plain
        self.judge.log.settle(progress)
        state = self._state(progress)
        files = {
            MODEL: states.model_tensors(plain),
            OPTIMIZER: states.optimizer_tensors(plain, self.learner.optimizer),
        }
        if self.learner.mean is not None:
            files[MEAN] = self.learner.mean.tensors(plain)
        if accelerator.is_main_process:
            self.lock.touch()

            def fill(place: Path) -> None:
                for name, tensors in files.items():
                    states.save_tensors(place / name, tensors)
                plain.config.save_pretrained(place)

            checkpoint.write_checkpoint(self.root, progress.updates, fill, state)
            best = self.judge.best_updates(progress, self.options.checkpoints.keep_best)
            checkpoint.rotate(self.root, keep_last=self.options.checkpoints.keep_last, best=best)
        accelerator.wait_for_everyone()

    def _state(self, progress: Progress) -> dict[str, Any]:
        accelerator = self.learner.accelerator
        random = [states.random_states()]
        return {
            "progress": vars(progress),
            "position": vars(self.stream.position),
            "random": gather_object(random) if accelerator.num_processes > 1 else random,
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
            "processes": accelerator.num_processes,
            "material": self.stream.material.identity,
        }
