"""Training speed beside Seq2SeqTrainer + MarianMTModel, in turn, in one run: `make bench`.

Every contender is a process of its own that trains a model of the same size (4 + 4 layers, d_model 128, d_ff 256,
4 heads, joint vocabulary of 10,000, dropout 0.3, label smoothing 0.1) on the same pairs, in float32, loader, clipping,
schedule and logging included. What is measured is target tokens a second from the end of the first updates to the
last; start-up and evaluation are not counted. A batch holds about 4,096 tokens: as a budget of padded tokens for us, as
a mean for Seq2SeqTrainer, which counts sentences.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import bar_chart, gemm_peak, keep, machine, ratios, table, take_turns
from peers import train_eole

TOKENS, VOCABULARY, WARM_UP = 4096, 10_000, 2
SIZES = {"layers": 4, "d_model": 128, "ffn": 256, "heads": 4, "dropout": 0.3}
OURS = "metaphrase train"


def prepare(data: Path | None, folder: Path) -> None:
    """Text files `train`, `validation` below `folder`: the first 20,000 pairs of a corpus, or made-up ones."""
    if data is not None:
        sides = [(data / f"train.{suffix}").read_text(encoding="utf-8").split("\n") for suffix in ("en", "de")]
    else:
        sides = made_up_pairs(20_000)
    for suffix, lines in zip(("en", "de"), sides, strict=True):
        for split, part in (("train", lines[:20_000]), ("validation", lines[:8])):
            (folder / f"{split}.{suffix}").write_text("\n".join(part) + "\n", encoding="utf-8")


def made_up_pairs(count: int) -> tuple[list[str], list[str]]:
    """Sentences with the lengths and the word statistics of image captions, where no corpus is at hand."""
    random.seed(1)
    words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 10))) for _ in range(12_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    sides: tuple[list[str], list[str]] = ([], [])
    for _ in range(count):
        length = max(3, round(random.gauss(12, 4)))
        for side in sides:
            side.append(" ".join(random.choices(words, weights, k=max(2, length + random.randint(-2, 2)))))
    return sides


def options(folder: Path, updates: int):
    """The run that our contender makes, and whose corpus and tokenizer the others share."""
    from metaphrase.configuration.options import RunOptions

    run = RunOptions(output=str(folder / "run"), max_updates=updates, seed=1)
    run.data.path, run.data.source, run.data.target, run.data.test = str(folder), "en", "de", None
    run.tokenizer.vocab_size, run.batches.tokens = VOCABULARY, TOKENS
    run.model = {
        "d_model": SIZES["d_model"],
        "dropout": SIZES["dropout"],
        "label_smoothing": 0.1,
        **{f"{stack}_layers": SIZES["layers"] for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": SIZES["ffn"] for stack in ("encoder", "decoder")},
        **{f"{stack}_attention_heads": SIZES["heads"] for stack in ("encoder", "decoder")},
    }
    run.optimizer.warmup, run.optimizer.learning_rate = 1000, 2e-3
    run.evaluation.every, run.evaluation.sentences, run.evaluation.num_beams = 10**9, 1, 1
    run.log_every = 1
    return run


def train_metaphrase(folder: Path, updates: int) -> float:
    """Our command, whole; the speed is read from its own log."""
    from metaphrase.training.run import train

    result = train(options(folder, updates), recipe_name="benchmark")
    records = [json.loads(line) for line in (result / "train_log.jsonl").read_text().splitlines()]
    records = [record for record in records if record["kind"] == "training"]
    first, last = records[WARM_UP - 1], records[-1]
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])


def encoded_pairs(folder: Path):
    """The same corpus and tokenizer as our command's."""
    from metaphrase.training.material import gather

    material = gather(options(folder, 1))
    return material.encoded, material.tokenizer


def marian(vocabulary: int):
    """A MarianMTModel of the same size."""
    from transformers import MarianConfig, MarianMTModel

    both = {
        **{f"{stack}_layers": SIZES["layers"] for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": SIZES["ffn"] for stack in ("encoder", "decoder")},
        **{f"{stack}_attention_heads": SIZES["heads"] for stack in ("encoder", "decoder")},
    }
    config = MarianConfig(
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        d_model=SIZES["d_model"],
        dropout=SIZES["dropout"],
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        **both,
    )
    return MarianMTModel(config)


def ours(vocabulary: int, folder: Path):
    """Our model of the same size."""
    from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
    from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

    return MetaphraseForConditionalGeneration(MetaphraseConfig(vocab_size=vocabulary, **options(folder, 1).model))


def train_seq2seq_trainer(folder: Path, updates: int, *, grouped: bool = False, by_tokens: bool = False) -> float:
    """Seq2SeqTrainer with its own batches of so many sentences that a batch has 4,096 target tokens on average, and
    Marian; or `by_tokens` with our model and our batches."""
    import torch
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

    import metaphrase

    pairs, tokenizer = encoded_pairs(folder)
    model = ours(len(tokenizer), folder) if by_tokens else marian(len(tokenizer))
    rows = [{"input_ids": list(map(int, s)), "labels": list(map(int, t))} for s, t in pairs[range(len(pairs))]]
    clock = {"tokens": 0, "start": 0.0, "end": 0.0}

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            clock["end"] = time.perf_counter()
            if state.global_step == WARM_UP:
                clock["start"], clock["tokens"] = clock["end"], 0

    collate = metaphrase.PairCollator() if by_tokens else DataCollatorForSeq2Seq(tokenizer, model=model)

    def counting(features):
        clock["tokens"] += sum(len(feature["labels"]) for feature in features)
        return collate(features)

    class TokenTrainer(Seq2SeqTrainer):
        def get_train_dataloader(self):
            return metaphrase.token_dataloader(self, tokens=TOKENS)

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=round(TOKENS / statistics.mean(len(row["labels"]) for row in rows)),
        max_steps=updates,
        learning_rate=2e-3,
        warmup_steps=1000,
        lr_scheduler_type="inverse_sqrt",
        label_smoothing_factor=0.0 if by_tokens else 0.1,  # our model smooths by itself
        adam_beta2=0.98,
        train_sampling_strategy="group_by_length" if grouped else "random",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
    )
    trainer = (TokenTrainer if by_tokens else Seq2SeqTrainer)(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=counting,
        callbacks=[Timer()],
    )
    trainer.train()
    return clock["tokens"] / (clock["end"] - clock["start"])


def train_marian_bare(folder: Path, updates: int) -> float:
    """MarianMTModel in a bare loop over our buckets: forward, backward, clip, step; nothing else."""
    import torch

    from metaphrase.training.data.batching import collate, plan_epoch

    pairs, tokenizer = encoded_pairs(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = marian(len(tokenizer)).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    plan = plan_epoch(pairs.source_lengths, pairs.target_lengths, tokens=TOKENS, seed=1, epoch=0)
    tokens, start = 0, 0.0
    for update in range(updates):
        if update == WARM_UP:
            tokens, start = 0, time.perf_counter()
        batch = {name: tensor.to(device) for name, tensor in collate(pairs[plan[update % len(plan)]]).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(**batch, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["labels"].flatten(), label_smoothing=0.1
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int((batch["labels"] != -100).sum())
    if device.type == "cuda":
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start)


CONTENDERS = {
    OURS: train_metaphrase,
    "Seq2SeqTrainer + Marian": train_seq2seq_trainer,
    "the same, grouped by length": functools.partial(train_seq2seq_trainer, grouped=True),
    "Seq2SeqTrainer + ours, token batches": functools.partial(train_seq2seq_trainer, by_tokens=True),
    "Marian, bare loop, our batches": train_marian_bare,
}


PEERS = {"Eole": train_eole}


def in_child(name: str, folder: Path, updates: int, threads: int) -> float:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--work", str(folder), "--updates", str(updates)]
    setting = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **setting}, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def flops_per_token(vocabulary: int) -> float:
    """Floating-point operations of one target token's training, at one source token a target token: 6 a weight that
    multiplies it (2 forward, 4 backward), attention scores left out."""
    d, ffn, layers = SIZES["d_model"], SIZES["ffn"], SIZES["layers"]
    encoder, decoder = 4 * d * d + 2 * d * ffn, 8 * d * d + 2 * d * ffn
    return 6 * (layers * (encoder + decoder) + d * vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train.en and train.de; made-up pairs without it")
    parser.add_argument("--updates", type=int, default=20, help="updates a measurement (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each contender (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each process (default: 2)")
    parser.add_argument("--peers", action="store_true", help="also Eole, in a virtual environment of its own")
    parser.add_argument("--child", choices=[*CONTENDERS, *PEERS], help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print({**CONTENDERS, **PEERS}[arguments.child](arguments.work, arguments.updates))
        return

    with tempfile.TemporaryDirectory(prefix="metaphrase-bench-") as folder:
        prepare(arguments.data, Path(folder))
        contenders = {}
        for name in [*CONTENDERS, *(PEERS if arguments.peers else ())]:
            place = Path(folder)
            contenders[name] = functools.partial(measure, name, place, arguments.updates, arguments.threads)
        measured = take_turns(contenders, arguments.rounds)
    peak = gemm_peak(arguments.threads)
    facts = machine(arguments.threads)
    share = statistics.median(measured[OURS]) * flops_per_token(VOCABULARY) / peak
    lines = table(measured, OURS, "target tokens/s")
    print("\n".join(["", f"{facts['cpu']}, {arguments.threads} threads, {facts['date']}, {facts['commit']}", *lines]))
    print(f"\nGEMM peak {peak / 1e9:,.0f} GFLOP/s; {OURS} uses {share:.0%} of it.")
    record = {
        "machine": facts,
        "command": " ".join(["python", "benchmarks/training.py", *(Path(word).name for word in sys.argv[1:])]),
        "unit": "target tokens a second",
        "measured": measured,
        "ratios": {name: ratios(measured, OURS, name) for name in measured if name != OURS},
        "gemm_peak": peak,
        "share_of_peak": share,
    }
    path = keep("training", record)
    bar_chart(path.with_suffix(".png"), measured, OURS, "target tokens a second", "Training speed, same model and data")
    print(f"Kept in {path}")


def measure(name: str, folder: Path, updates: int, threads: int) -> float:
    """A measurement in a fresh run folder."""
    with tempfile.TemporaryDirectory(prefix="metaphrase-bench-") as fresh:
        for file in folder.iterdir():
            (Path(fresh) / file.name).symlink_to(file)
        return in_child(name, Path(fresh), updates, threads)


if __name__ == "__main__":
    main()
