"""How a model lies over the processes: whole on each, or in pieces (FSDP2), as the Accelerate config says.

FSDP2 is applied here, a unit a layer and one unit for the rest, because Accelerate 1.15 cannot: it gives embeddings and
output projection a unit of their own, and one matrix that three modules share may lie in one unit only. On a CPU it
ignores its own FSDP config altogether.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, str_to_bool
from torch import nn

from metaphrase.configuration.options import OptimizerOptions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import states, together
from metaphrase.training.schedule import build_optimizer


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the Accelerate config asks for FSDP, and there is more than one process to spread over."""
    return accelerator.num_processes > 1 and bool(str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "false")))


def prepare(
    accelerator: Accelerator,
    plain: MetaphraseForConditionalGeneration,
    options: OptimizerOptions,
    *,
    compiled: bool,
    overlapped: bool = False,
) -> tuple[nn.Module, Any]:
    """The model to call in training, and its optimizer. `plain` stays the model that is saved and loaded into.

    Args:
        overlapped: DDP sends gradients during the backward pass; else the model is whole on each process, and
            `together.add_up` sends them afterwards.
    """
    plain.to(accelerator.device)
    if compiled:
        plain.compile(dynamic=True)
    if is_sharded(accelerator):
        shard(plain, accelerator.mixed_precision)
        return plain, accelerator.prepare_optimizer(build_optimizer(plain, options), device_placement=False)
    optimizer = build_optimizer(plain, options)
    if overlapped or accelerator.num_processes == 1:
        return accelerator.prepare(plain, optimizer)
    together.same_weights(plain)
    model = accelerator.prepare_model(plain, evaluation_mode=True)  # mixed precision, and no DDP around it
    return model, accelerator.prepare_optimizer(optimizer)


def shard(model: MetaphraseForConditionalGeneration, mixed_precision: str) -> None:
    """Spread the weights, in place: FSDP2 as the environment that `accelerate launch` sets describes it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    precision = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    for layer in [*model.model.encoder.layers, *model.model.decoder.layers]:
        fully_shard(layer, mp_policy=precision, reshard_after_forward=bool(plugin.reshard_after_forward))
    fully_shard(model, mp_policy=precision)


@contextlib.contextmanager
def hold_back(model: nn.Module) -> Iterator[None]:
    """Inside, gradients are added up on each process and do not travel."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif hasattr(model, "no_sync"):  # DDP
        with model.no_sync():
            yield
    else:
        yield


def whole(accelerator: Accelerator, plain: MetaphraseForConditionalGeneration) -> MetaphraseForConditionalGeneration:
    """A model that one process can call alone: itself, or a copy put together where it is spread."""
    if not is_sharded(accelerator):
        return plain
    tensors = states.model_tensors(plain)
    copy = MetaphraseForConditionalGeneration(plain.config)
    named = states.named_tensors(copy)
    with torch.no_grad():
        for name, tensor in tensors.items():
            named[name].copy_(tensor)
    return copy.to(accelerator.device)
