"""Benchmarks that nobody runs break unseen: each is rehearsed here with tiny sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def rehearse(script: str, *words: str) -> str:
    """Standard output of a benchmark; it must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *words], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_gpu():
    text = rehearse("gpu.py", "--device", "cpu", "--quick")
    for words in ("float32 with TF32", "loss from whole logits", "MFU", "our search, bf16", "generate, bf16"):
        assert words in text
    assert "flash_attention" in text or "attention_math" in text


def test_gpu_says_when_there_is_none():
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0 and "no GPU here" in done.stdout


def test_scale():
    before = {file: file.stat().st_mtime for file in (FOLDER / "results").glob("*-scale*")}
    text = rehearse("scale.py", "--quick", "--axes", "vocabulary", "beams", "--repeats", "1")
    assert "| vocabulary 500 to 1,000 | training |" in text and "| beams 1 to 2 | decoding |" in text
    assert {file: file.stat().st_mtime for file in (FOLDER / "results").glob("*-scale*")} == before
