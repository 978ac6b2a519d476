"""Two epochs of a stock Seq2SeqTrainer over batches of so many tokens, and again from a checkpoint in the second epoch.

python -m torch.distributed.run --nproc_per_node 2 token_work.py OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from metaphrase.training.data.token_batches import PairCollator, token_dataloader

sys.path.insert(0, str(Path(__file__).parent))
import work

TOKENS = 60


def rows(count: int = 41) -> list[dict]:
    """Pairs of 2 to 15 tokens a side; the first source token is never the same."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for number in range(count):
        source, target = torch.randint(2, 16, (2,), generator=generator).tolist()
        draw = lambda n: [*torch.randint(4, 20, (n - 1,), generator=generator).tolist(), 2]  # noqa: E731
        data.append({"input_ids": draw(source), "labels": draw(target), "number": number})
    return data


class Recording(PairCollator):
    """Notes which pairs come together."""

    seen: list[list[int]] = []

    def __call__(self, batch):
        self.seen.append([row["number"] for row in batch])
        return super().__call__(batch)


def train(output: Path, *, accumulation: int = 1, resume: int | None = None) -> tuple[dict, list[list[int]]]:
    """Parameters after two epochs, and the pairs of each batch in order; from the checkpoint of an update, if given."""
    net = work.model(attention_dropout=0.3)
    arguments = Seq2SeqTrainingArguments(
        str(output),
        num_train_epochs=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    Recording.seen = []

    class TokenTrainer(Seq2SeqTrainer):
        def get_train_dataloader(self):
            return token_dataloader(self, tokens=TOKENS)

    job = TokenTrainer(net, arguments, train_dataset=rows(), data_collator=Recording())
    job.train(resume_from_checkpoint=str(output / f"checkpoint-{resume}") if resume else None)
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}, Recording.seen


def main() -> None:
    output, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    whole, seen = train(output)
    middle = len(seen) // 2 + 2
    again, seen_again = train(output, resume=middle)
    same = all(torch.equal(whole[name], again[name]) for name in whole)
    record = {"seen": seen, "again": seen_again, "middle": middle, "same": same}
    (output / f"{rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
