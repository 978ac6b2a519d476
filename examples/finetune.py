"""Fine-tunes a metaphrase model on your own sentence pairs with the ecosystem's own Trainer.

    python examples/finetune.py MODEL SOURCE TARGET OUTPUT [--steps 1000] [--lora]

MODEL is a folder or a name on the Hub, SOURCE and TARGET are text files with one sentence a line, and OUTPUT becomes a
model folder like MODEL. On a laptop CPU a small model takes about a second for a step of 8 x 4 sentences.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import metaphrase  # noqa: F401  (makes the Auto classes know the model)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "source", "target", "output"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=1000, help="updates")
    parser.add_argument("--batch", type=int, default=8, help="sentences at a time")
    parser.add_argument("--accumulation", type=int, default=4, help="batches an update; changes memory, not the result")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--lora", action="store_true", help="train small adapters (needs peft) and merge them in")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model)
    # The model's own smoothing: it is left out of evaluation, and a loss per token under any accumulation.
    model.config.label_smoothing = options.label_smoothing
    if options.lora:
        from peft import LoraConfig, TaskType, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
        model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=16, target_modules=targets))

    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            options.output,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            learning_rate=options.learning_rate,
            warmup_steps=options.steps // 10,
            dataloader_pin_memory=torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=pairs(options.source, options.target, tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
    trainer.train()
    result = model.merge_and_unload() if options.lora else model
    result.config.use_cache = True  # the Trainer turns it off
    result.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


def pairs(source: str, target: str, tokenizer):
    """Token ids of the two files' lines, side by side."""
    lines = [load_dataset("text", data_files=path, split="train") for path in (source, target)]
    if len(lines[0]) != len(lines[1]):
        raise SystemExit(f"{source} has {len(lines[0])} lines, and {target} {len(lines[1])}")

    def encode(batch, index):
        return tokenizer(batch["text"], text_target=[lines[1][i]["text"] for i in index])

    return lines[0].map(encode, with_indices=True, batched=True, remove_columns="text")


if __name__ == "__main__":
    main()
