"""examples/finetune.py does what it says, with and without adapters."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from . import work

_spec = importlib.util.spec_from_file_location("finetune", Path(__file__).parents[2] / "examples" / "finetune.py")
finetune = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(finetune)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it


@pytest.fixture
def files(tmp_path) -> list[str]:
    """A model folder, and a task: say the same words again."""
    work.model().save_pretrained(tmp_path / "model")
    work.tokenizer().save_pretrained(tmp_path / "model")
    lines = [" ".join(work.WORDS[i : i + 3]) for i in range(12)]
    for name in ("source", "target"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [str(tmp_path / name) for name in ("model", "source", "target", "output")]


@pytest.mark.parametrize("how", [[], ["--lora"]], ids=["whole", "lora"])
def test_finetunes(files, how, monkeypatch):
    if how:
        pytest.importorskip("peft")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.manual_seed(0)
    settings = [
        "--steps",
        "12",
        "--batch",
        "3",
        "--accumulation",
        "4",
        "--learning-rate",
        "0.02",
        "--label-smoothing",
        "0",
    ]
    finetune.main([*files, *settings, *how])
    folders = files[0], files[3]
    losses = []
    for folder in folders:
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        encoded = tokenizer("w1 w2 w3", text_target="w1 w2 w3", return_tensors="pt")
        assert encoded["labels"].tolist() == [[5, 6, 7, 2]]
        losses.append(model(**encoded).loss.item())
        assert model.config.use_cache and type(model).__name__ == "MetaphraseForConditionalGeneration"
    assert losses[1] < losses[0] - 0.1


def test_files_of_unequal_length_are_refused(files):
    with open(files[2], "a", encoding="utf-8") as target:
        target.write("one more\n")
    with pytest.raises(SystemExit, match=r"12 lines.*13"):
        finetune.main([*files, "--steps", "1"])
