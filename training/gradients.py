"""Proof, on a user's own data, that a gradient does not depend on how an update is cut.

The same pairs are learned from once as one batch, once as several batches added up, and once by several processes, each
time by the code that trains (`loop.add_gradients`). Loss and gradient must agree to 1e-6 in float32. Dropout is off:
its noise depends on the cut by nature.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.options import BatchOptions, RunOptions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import states, together
from metaphrase.training.data.batching import collate, plan_epoch
from metaphrase.training.loop import add_gradients
from metaphrase.training.material import gather
from metaphrase.training.stream import Update

TOLERANCE = 1e-6
Pairs = Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class GradientCheck:
    """One way to cut an update, held against the first."""

    name: str
    loss: float
    norm: float
    loss_difference: float
    gradient_difference: float
    """Largest difference of a component, over the largest component where that is above 1."""

    @property
    def passed(self) -> bool:
        return max(self.loss_difference, self.gradient_difference) <= TOLERANCE


def check_gradients(options: RunOptions, *, batches: int = 4, processes: Sequence[int] = (2,)) -> list[GradientCheck]:
    """Compare the gradient of a run's first update under several cuts, on the data of the run.

    Args:
        options: the run; its data are read and its model is built as `train` does.
        batches: batches of the run's token budget that the update is made of.
        processes: numbers of processes to try, on this machine.

    Raises:
        MetaphraseError: what `train` would raise for these options.
    """
    from metaphrase.training.run import make_config

    material = gather(options)
    window = material.windows(0, 0)
    tokens = BatchOptions().tokens if options.batches.tokens == "auto" else options.batches.tokens
    plan = plan_epoch(window.source_lengths, window.target_lengths, tokens=tokens, seed=options.seed, epoch=0)
    chosen = [window[plan[number]] for number in range(min(batches, len(plan)))]
    return compare_cuts(
        make_config(options, material.tokenizer),
        chosen,
        processes=processes,
        seed=options.seed,
        overlapped=not options.batches.max_out_of_memory,
    )


def compare_cuts(
    config: MetaphraseConfig,
    batches: Sequence[Pairs],
    *,
    processes: Sequence[int] = (2,),
    seed: int = 1,
    overlapped: bool = False,
) -> list[GradientCheck]:
    """Gradients of a freshly drawn model over these batches: in one, added up, and by several processes.

    `overlapped`: the processes send gradients during the backward pass (DDP), not after it.
    """
    config.dropout = config.attention_dropout = config.activation_dropout = 0.0
    states.seed_everything(seed)
    model = MetaphraseForConditionalGeneration(config).train()
    everything = [pair for batch in batches for pair in batch]
    halves = [piece for batch in batches for piece in (batch[: len(batch) // 2], batch[len(batch) // 2 :]) if piece]
    results = {
        f"1 batch of {len(everything)} pairs": gradient(model, [everything]),
        f"{len(batches)} batches added up": gradient(model, batches),
        f"{len(halves)} smaller batches added up": gradient(model, halves),
        f"{len(batches)} batches and one that counts for nothing": gradient(model, batches, filling=batches[0]),
    }
    for number in processes:
        results[f"{number} processes"] = gradient_of_processes(model, batches, number, overlapped=overlapped)
    (loss, reference), *_ = results.values()
    scale = max(1.0, max(float(one.abs().max()) for one in reference.values()))
    norm = float(torch.stack([one.double().pow(2).sum() for one in reference.values()]).sum().sqrt())
    return [
        GradientCheck(
            name=name,
            loss=other_loss,
            norm=norm,
            loss_difference=abs(other_loss - loss) / max(1.0, abs(loss)),
            gradient_difference=max(float((other[k] - reference[k]).abs().max()) for k in reference) / scale,
        )
        for name, (other_loss, other) in results.items()
    ]


def gradient(
    model: torch.nn.Module, batches: Sequence[Pairs], *, filling: Pairs | None = None, accelerator: Any = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss a token and gradient of an update, by the code that trains."""
    accelerator = accelerator or Accelerator(cpu=True)
    collated = [collate(batch) for batch in batches]
    if filling is not None:
        collated.append(collate(filling, real=False))
    tokens = sum(int((batch["labels"] >= 0).sum()) for batch in collated)
    update = Update(collated, tokens, [np.arange(len(batch["labels"])) for batch in collated])
    model.zero_grad(set_to_none=True)
    counts = together.share_counts(accelerator, tokens, False, False)
    loss = add_gradients(accelerator, model, update, counts[0])
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(loss)
    plain = accelerator.unwrap_model(model)
    return float(loss), {name: p.grad.detach().clone() for name, p in plain.named_parameters()}


def gradient_of_processes(
    model: MetaphraseForConditionalGeneration,
    batches: Sequence[Pairs],
    processes: int,
    *,
    overlapped: bool = False,
    timeout: float = 300.0,
) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by several processes on this machine (gloo), dealt out in turn."""
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        place = Path(scratch)
        model.config.save_pretrained(place)
        states.save_tensors(place / "model.safetensors", states.model_tensors(model))
        plain = [[(list(map(int, source)), list(map(int, target))) for source, target in batch] for batch in batches]
        context = torch.multiprocessing.start_processes(
            _work, (processes, port, place, plain, overlapped), nprocs=processes, join=False, start_method="spawn"
        )
        if not _joined(context, timeout):
            raise TimeoutError(f"{processes} processes did not finish within {timeout:.0f} seconds")
        result = states.load_tensors(place / "gradient.safetensors")
    return float(result.pop("loss")), result


def _joined(context: Any, timeout: float) -> bool:
    try:
        return any(context.join(timeout=timeout / 100) for _ in range(100))
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _work(rank: int, processes: int, port: int, place: Path, batches: Sequence[Pairs], overlapped: bool) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = MetaphraseForConditionalGeneration(MetaphraseConfig.from_pretrained(place))
    states.load_model_tensors(model, states.load_tensors(place / "model.safetensors"), place)
    model.train()
    if overlapped:
        model = accelerator.prepare(model)
    rounds = -(-len(batches) // processes)
    mine = list(batches[rank::processes])
    filling = batches[0] if len(mine) < rounds else None
    loss, gradients = gradient(model, mine, filling=filling, accelerator=accelerator)
    if rank == 0:
        states.save_tensors(
            place / "gradient.safetensors", {"loss": torch.tensor(loss, dtype=torch.float64), **gradients}
        )
    together.end(accelerator)
