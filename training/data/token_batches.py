"""Batches of so many tokens for a stock `Seq2SeqTrainer`, or any torch DataLoader.

    class TokenTrainer(Seq2SeqTrainer):
        def get_train_dataloader(self):
            return token_dataloader(self, tokens=4096)

    TokenTrainer(model, arguments, train_dataset=rows, data_collator=PairCollator()).train()

`rows` have `input_ids` and `labels`. Batches are those of `plan_epoch`: pairs of near-equal lengths, rows x longest
side within the budget, met and ordered anew each epoch. Every pair comes once an epoch, on any number of processes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training.data.batching import EpochPlan, collate, plan_epoch

if TYPE_CHECKING:
    from transformers import Trainer

COLUMNS = ("input_ids", "attention_mask", "labels")


class TokenBatchSampler(Sampler[list[int]]):
    """Lists of pair indices, each list a batch of at most `tokens` padded tokens.

    Every epoch has the same number of batches; the largest are halved until it is a multiple of that of the processes.
    """

    def __init__(
        self,
        source_lengths: Sequence[int] | np.ndarray,
        target_lengths: Sequence[int] | np.ndarray,
        *,
        tokens: int = 4096,
        seed: int = 0,
        multiple_of: int = 1,
    ) -> None:
        """
        Args:
            source_lengths, target_lengths: of each pair, in tokens.
            tokens: the most that a batch may cost: rows x longest side. Longer pairs are left out, with a warning.
            seed: with the epoch, chooses the order.
            multiple_of: the number of processes that share the batches.

        Raises:
            MetaphraseError: no pair fits the budget, or there are too few pairs for as many batches in each process.
        """
        self.lengths = np.asarray(source_lengths, dtype=np.int32), np.asarray(target_lengths, dtype=np.int32)
        self.tokens, self.seed, self.epoch = tokens, seed, 0
        self.sampler = self  # accelerate looks for `set_epoch` here
        first = self._plan(0)
        self.batches = -(-len(first) // multiple_of) * multiple_of
        if self.batches > first.pairs:
            raise MetaphraseError(
                f"{first.pairs} pairs cannot be shared by {multiple_of} processes: {self.batches} batches are needed"
            )

    def _plan(self, epoch: int) -> EpochPlan:
        return plan_epoch(*self.lengths, tokens=self.tokens, seed=self.seed, epoch=epoch)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in halve_largest(list(self._plan(self.epoch)), self.batches):
            yield batch.tolist()


def halve_largest(batches: list[np.ndarray], count: int) -> list[np.ndarray]:
    """Cuts the batch with the most rows in two until there are `count` batches; none becomes empty."""
    parts = [[batch] for batch in batches]
    queue = [(-len(batch), number, 0) for number, batch in enumerate(batches)]
    heapq.heapify(queue)
    for _ in range(count - len(batches)):
        rows, number, part = heapq.heappop(queue)
        whole, middle = parts[number][part], -rows // 2
        parts[number][part] = whole[:middle]
        parts[number].append(whole[middle:])
        heapq.heappush(queue, (-middle, number, part))
        heapq.heappush(queue, (-(len(whole) - middle), number, len(parts[number]) - 1))
    return [batch for pieces in parts for batch in pieces]


@dataclass(frozen=True)
class PairCollator:
    """Pads rows with `input_ids` and `labels` on the right, labels with -100; other columns are left out."""

    pad_token_id: int = 0

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Rows -> input_ids, attention_mask [rows, longest source] and labels [rows, longest target]."""
        return collate([(row["input_ids"], row["labels"]) for row in rows], pad=self.pad_token_id)


def token_dataloader(trainer: Trainer, *, tokens: int = 4096) -> DataLoader:
    """What a Trainer's `get_train_dataloader` should return for batches of so many tokens.

    The batch sizes in the Trainer's arguments no longer count; accumulation, processes, epochs, seeds and going on from
    a checkpoint work as they do there.

    Args:
        tokens: the most that a process's batch may cost: rows x longest side.

    Raises:
        MetaphraseError: the training data has no length, or rows without `input_ids` or `labels`.
    """
    data, arguments = trainer.train_dataset, trainer.args
    if hasattr(data, "select_columns"):  # as the Trainer does, a collator is not shown columns that the model ignores
        data = data.select_columns([name for name in data.column_names if name in COLUMNS])
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    sampler = TokenBatchSampler(
        *pair_lengths(data), tokens=tokens, seed=seed, multiple_of=trainer.accelerator.num_processes
    )
    loader = DataLoader(
        data,
        batch_sampler=sampler,
        collate_fn=trainer.data_collator,
        num_workers=arguments.dataloader_num_workers,
        pin_memory=arguments.dataloader_pin_memory and torch.cuda.is_available(),
    )
    prepared = trainer.accelerator.prepare(loader)
    if prepared.batch_sampler is not sampler:  # accelerate deals the batches out, and must pass `set_epoch` on
        prepared.batch_sampler.sampler = sampler
    return prepared


def pair_lengths(data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens each row's `input_ids` and `labels` have.

    Raises:
        MetaphraseError: as in `token_dataloader`.
    """
    if not hasattr(data, "__len__"):
        raise MetaphraseError(
            f"batches of so many tokens need training data of a known length, not {type(data).__name__}"
        )
    columns = ("input_ids", "labels")
    if hasattr(data, "with_format"):  # datasets.Dataset: lengths come from Arrow, without a Python list a row
        missing = [name for name in columns if name not in data.column_names]
        if missing:
            raise MetaphraseError(
                f"the training data has no column {missing[0]!r}, only {', '.join(data.column_names)}"
            )
        import pyarrow.compute

        tables = data.with_format("arrow").iter(10_000)
        parts = [[pyarrow.compute.list_value_length(table[name]).to_numpy() for name in columns] for table in tables]
        return tuple(np.concatenate(side) for side in zip(*parts, strict=True))
    try:
        both = [(len(row["input_ids"]), len(row["labels"])) for row in (data[index] for index in range(len(data)))]
    except (KeyError, TypeError) as error:
        raise MetaphraseError(f"a row of the training data lacks `input_ids` or `labels`: {error}") from error
    return tuple(np.array(both, dtype=np.int32).reshape(-1, 2).T)
