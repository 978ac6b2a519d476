"""What a GPU would punish, found without one: tensors on the wrong device, and reads that make the processor wait.

The meta device stands for a GPU: an operator that mixes it with the CPU fails, and so does any read of a value.
"""

from __future__ import annotations

import collections
import time

import pytest
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import spread
from metaphrase.training.log import TrainLog
from metaphrase.training.loop import Progress, Task, learn
from metaphrase.training.material import gather
from metaphrase.training.objective import plain_loss
from metaphrase.training.run import build_model
from metaphrase.training.stream import Stream

READS = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.nonzero", "aten.equal.", "aten.masked_select")


class Reads(TorchDispatchMode):
    """Counts operators whose result the processor waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if str(operator).startswith(READS):
            self.found[str(operator)] += 1
        return operator(*arguments, **(keywords or {}))


@pytest.mark.parametrize("others", [{}, {"position_embedding_type": "learned"}, {"normalize_before": True}], ids=str)
def test_a_training_step_touches_no_other_device(others):
    config = MetaphraseConfig.from_preset("tiny", vocab_size=50, **others)
    with torch.device("meta"):
        model = MetaphraseForConditionalGeneration(config).train()
        ids = torch.ones(3, 7, dtype=torch.long)
        tokens = torch.ones((), dtype=torch.float64)
    loss = plain_loss(model, {"input_ids": ids, "labels": ids}, tokens)
    loss.backward()
    assert loss.device.type == "meta"
    assert {parameter.grad.device.type for parameter in model.parameters()} == {"meta"}


def reads_of(options, updates: int, tmp_path) -> int:
    options.max_updates = updates
    material = gather(options)
    plain = build_model(options, material.tokenizer)
    accelerator = Accelerator(cpu=True)
    model, optimizer = spread.prepare(accelerator, plain, options.optimizer, compiled=False)
    log = TrainLog(tmp_path, accelerator, every=1, show=False)
    log.open(after=0)
    stream = Stream(material, tokens=options.batches.tokens, seed=1)
    task = Task(accelerator, model, optimizer, stream, options, 1e-3, log, lambda _: None, lambda _: None)
    with Reads() as reads:
        learn(task, Progress(), started=time.monotonic())
    log.close()
    return sum(reads.found.values())


def test_an_update_reads_little(tiny_options, tmp_path, monkeypatch):
    """The tokens of a batch while it is still on the processor, and whether a source has padding, for each stack. (That
    `tolist` reads loss and norm once an update, no operator shows.)"""
    monkeypatch.setattr("metaphrase.modeling.loss._may_look", lambda tensor: False)  # as off the CPU
    options = tiny_options(**{"evaluation.every": 10**9})
    few, many = (reads_of(options, updates, tmp_path) for updates in (2, 6))
    assert (many - few) / 4 <= 3
