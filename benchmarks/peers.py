"""Peers from the package index, in a virtual environment of their own: `make bench PEERS=1`.

Eole trains on the same pairs in the same tokens, with the model and the batch size of `training.py`; its speed is read
from its own log. fairseq is not here: its last release cannot be imported by Python 3.11, which transformers needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

BENCHMARKS = Path(__file__).parent
ENVIRONMENT = BENCHMARKS / ".venv-peers"
PACKAGES = ("torch==2.13.0", "eole==0.6.4", "aiohttp")  # Eole imports aiohttp without asking for it
WINDOW = 2
"""Updates between two lines of the log; the first line is warm-up."""

LOG_LINE = re.compile(r"Step\s+(\d+)/.*bsz:\s*\d+/\s*(\d+)/\s*\d+;\s*\d+/\s*(\d+) tok/s")


def interpreter() -> Path:
    """The Python of the peers' environment, which is made if it is not there. METAPHRASE_PEERS names another folder."""
    place = Path(os.environ.get("METAPHRASE_PEERS", ENVIRONMENT))
    python = place / "bin" / "python"
    if not python.exists():
        print(f"Installing {', '.join(PACKAGES)} into {place.name} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def write_tokens(folder: Path, pairs, tokenizer) -> None:
    """`tokens.source`, `tokens.target`, a pair a line, tokens parted by spaces; and `vocabulary`, a token a line."""
    specials = set(tokenizer.all_special_tokens)
    words = [word for word in tokenizer.convert_ids_to_tokens(range(len(tokenizer))) if word not in specials]
    (folder / "vocabulary").write_text("".join(f"{word}\t1\n" for word in words), encoding="utf-8")
    for side, name in enumerate(("source", "target")):
        lines = (tokenizer.convert_ids_to_tokens(pair[side][:-1].tolist()) for pair in pairs[range(len(pairs))])
        text = "".join(" ".join(tokens) + "\n" for tokens in lines)
        (folder / f"tokens.{name}").write_text(text, encoding="utf-8")


def eole_options(folder: Path, updates: int, tokens: int, sizes: dict) -> dict:
    """Eole's recipe for the model of `training.py`."""
    stack = {"layers": sizes["layers"], "hidden_size": sizes["d_model"]}
    return {
        "seed": 1,
        "share_vocab": True,
        "src_vocab": str(folder / "vocabulary"),
        "tgt_vocab": str(folder / "vocabulary"),
        "src_vocab_size": 10_000,
        "tgt_vocab_size": 10_000,
        "vocab_size_multiple": 1,
        "report_every": WINDOW,
        "data": {
            "corpus": {
                "path_src": str(folder / "tokens.source"),
                "path_tgt": str(folder / "tokens.target"),
                "transforms": [],
            }
        },
        "model": {
            "architecture": "transformer",
            "heads": sizes["heads"],
            "transformer_ff": sizes["ffn"],
            "share_embeddings": True,
            "share_decoder_embeddings": True,
            "embeddings": {
                "word_vec_size": sizes["d_model"],
                "position_encoding_type": "SinusoidalInterleaved",
            },
            "encoder": {"encoder_type": "transformer", **stack},
            "decoder": {"decoder_type": "transformer", **stack},
            **stack,
        },
        "training": {
            "world_size": 1,
            "gpu_ranks": [],
            "compute_dtype": "fp32",
            "batch_type": "tokens",
            "batch_size": tokens,
            "bucket_size": 20_000,
            "normalization": "tokens",
            "num_workers": 0,
            "optim": "adam",
            "adam_beta2": 0.98,
            "learning_rate": 2.0,
            "decay_method": "noam",
            "warmup_steps": 1000,
            "dropout": [sizes["dropout"]],
            "attention_dropout": [0.0],
            "label_smoothing": 0.1,
            "max_grad_norm": 1.0,
            "train_steps": updates,
            "save_checkpoint_steps": 10**6,
            "model_path": str(folder / "eole-model"),
        },
    }


def train_eole(folder: Path, updates: int) -> float:
    """Target tokens a second by Eole's own log, the first lines left out."""
    from training import SIZES, TOKENS, encoded_pairs

    write_tokens(folder, *encoded_pairs(folder))
    recipe = folder / "eole.yaml"
    recipe.write_text(yaml.safe_dump(eole_options(folder, updates, TOKENS, SIZES)), encoding="utf-8")
    command = [interpreter().with_name("eole"), "train", "-config", recipe]
    setting = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=setting, check=False, timeout=1800)
    windows = [(int(tokens), float(speed)) for _, tokens, speed in LOG_LINE.findall(done.stdout + done.stderr)][1:]
    if done.returncode or not windows:
        raise SystemExit(f"Eole failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return sum(tokens for tokens, _ in windows) / sum(tokens / speed for tokens, speed in windows)
