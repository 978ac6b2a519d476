"""Tiny models for client processes, and what must be the same wherever such a model is loaded.

Imported by the functions that run in child processes; `metaphrase` itself is imported only where a model is made.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

SENTENCES = ["ein Hund läuft", "two cats sleep on the mat", "a b"]
RESULTS = {
    "name": 'tiny: a "test" model',
    "recipe": "tiny",
    "command": "metaphrase train tiny",
    "data": {"path": "alice/corpus", "source": "de", "target": "en", "train_pairs": 3, "dropped": {}},
    "model": {"parameters": 1000, "preset": "tiny"},
    "training": {"updates": 1, "minutes": 0.1, "final": "checkpoint-1"},
    "validation": {"loss": 2.0, "perplexity": 7.4},
    "test": {"sacrebleu": {"score": 12.5, "signature": "nrefs:1|case:mixed"}, "chrf": {"score": float("nan")}},
    "licence": "cc-by-nc-4.0",
}


def tiny_tokenizer() -> Any:
    from metaphrase.configuration.options import TokenizerOptions
    from metaphrase.training.data.tokenizer import train_tokenizer

    return train_tokenizer(SENTENCES, TokenizerOptions(kind="characters", vocab_size=320))


def tiny_model(vocab_size: int, seed: int = 0, **overrides: Any) -> Any:
    """A model of two small layers whose weights are scaled up, so that outputs of different models truly differ."""
    import torch

    from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
    from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

    sizes = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in TINY_SIZES.items()}
    torch.manual_seed(seed)
    config = MetaphraseConfig(vocab_size=vocab_size, d_model=16, init_std=0.4, **{**sizes, **overrides})
    return MetaphraseForConditionalGeneration(config).eval()


TINY_SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 24}


def save_tiny(folder: str, seed: int = 0, **overrides: Any) -> tuple[Any, Any]:
    """A whole result folder, as a training run leaves it: model, tokenizer, card, results, and a checkpoint folder."""
    from metaphrase.modeling.companions import weights_digest
    from metaphrase.training.card import write_card

    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), seed, **overrides)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    scores = {"sacrebleu": RESULTS["test"]["sacrebleu"]}
    results = {**RESULTS, "weights": weights_digest(folder), "test": scores}
    (Path(folder) / "results.json").write_text(json.dumps(results), encoding="utf-8")
    write_card(Path(folder), results)
    (Path(folder) / "checkpoints").mkdir(exist_ok=True)
    return model, tokenizer


PROBES = [
    "",
    "Zahl 12 345,6",
    "  zwei  Leerzeichen ",
    "x != y",
    "e\u0301 vs \u00e9",
    "👩‍👩‍👧 ☃",
    "</s> <pad>",
    "a\u200bb",
]


def tokenizer_print(tokenizer: Any) -> list[Any]:
    """Ids of texts that trip tokenizers up, what they decode to, special ids, limits and sides."""
    ids = [tokenizer(probe)["input_ids"] for probe in PROBES]
    back = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    assert back == PROBES
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    return [ids, special, tokenizer.model_max_length, tokenizer.padding_side, tokenizer.truncation_side]


def fingerprint(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Logits, beams and attention of three sentences of different lengths, bit for bit."""
    import torch

    model.eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    labels = tokenizer(text_target=SENTENCES[::-1], padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model(**batch, decoder_input_ids=labels, output_attentions=True)
        beams = model.generate(**batch, num_beams=3, num_return_sequences=2, max_new_tokens=12)
    maps = [*output.encoder_attentions, *output.decoder_attentions, *output.cross_attentions]
    assert len(maps) == 6 and all(isinstance(attention, torch.Tensor) for attention in maps)
    return {
        "logits": base64.b64encode(output.logits[:, :2, :8].contiguous().numpy().tobytes()).decode(),
        "all logits": hashlib.sha256(output.logits.numpy().tobytes()).hexdigest(),
        "attention": hashlib.sha256(b"".join(map(bytes, (a.numpy().tobytes() for a in maps)))).hexdigest(),
        "beams": beams.tolist(),
        "tokenizer": tokenizer_print(tokenizer),
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }
