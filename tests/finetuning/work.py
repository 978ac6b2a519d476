"""Three updates with the stock Seq2SeqTrainer; under `torch.distributed.run` this file trains the same on several
processes and writes each variant's parameters.

    python -m torch.distributed.run --nproc_per_node 2 work.py OUTPUT
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

WORDS = [f"w{i}" for i in range(16)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
UPDATES, RATE, ROWS = 3, 0.5, 8
# name: (model's own smoothing, Trainer's label_smoothing_factor)
SMOOTHINGS = {"none": (0.0, 0.0), "model": (0.1, 0.0), "trainer": (0.0, 0.1)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words parted by spaces; `</s>` at the end."""
    from tokenizers.processors import TemplateProcessing

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def model(label_smoothing: float = 0.0, **others) -> MetaphraseForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(SPECIAL + WORDS),
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "dropout": 0.0,
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = MetaphraseConfig(**sizes, **heads, init_std=0.3, label_smoothing=label_smoothing, **others)
    return MetaphraseForConditionalGeneration(config)


def rows(lengths=(1, 9, 2, 3, 14, 1, 5, 7)) -> list[dict]:
    """Targets of very unequal length, so that a mean of means is far from the mean."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: [*torch.randint(4, 20, (n - 1,), generator=generator).tolist(), 2]  # noqa: E731
    return [
        {"input_ids": draw(4 + i % 3), "attention_mask": [1] * (4 + i % 3), "labels": draw(n)}
        for i, n in enumerate(lengths)
    ]


def trainer(output: Path, net, data, factor: float = 0.0, *, batch: int = ROWS, accumulation: int = 1, **others):
    arguments = Seq2SeqTrainingArguments(
        str(output),
        max_steps=UPDATES,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        per_device_eval_batch_size=2,
        label_smoothing_factor=factor,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **{name: others.pop(name) for name in ("predict_with_generate",) if name in others},
    )
    collator = DataCollatorForSeq2Seq(tokenizer(), model=net)
    return Seq2SeqTrainer(net, arguments, train_dataset=data, data_collator=collator, **others)


def trained(output: Path, smoothing: str, processes: int = 1, *, accumulation: int) -> tuple[dict, list[float]]:
    """Parameters and logged losses after three updates of all rows."""
    own, factor = SMOOTHINGS[smoothing]
    net = model(own)
    job = trainer(output, net, rows(), factor, batch=ROWS // processes // accumulation, accumulation=accumulation)
    job.train()
    losses = [entry["loss"] for entry in job.state.log_history if "loss" in entry]
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}, losses


def two_processes(script: str, output: Path, seconds: float = 300) -> None:
    """Runs a file on two processes; a launcher that takes too long is asked to end, and its workers with it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", script, str(output)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = launcher.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        launcher.terminate()
        said, _ = launcher.communicate(timeout=60)
        raise AssertionError(f"not done after {seconds} s: {said[-3000:]}") from None
    assert launcher.returncode == 0, said[-3000:]


def main() -> None:
    output = Path(sys.argv[1])
    for smoothing in SMOOTHINGS:
        for accumulation in (1, 4):
            parameters, losses = trained(output, smoothing, 2, accumulation=accumulation)
            rank = torch.distributed.get_rank()
            parameters["losses"] = torch.tensor(losses)
            save_file(parameters, output / f"{smoothing}-{accumulation}-{rank}.safetensors")


if __name__ == "__main__":
    main()
