"""Writes the golden repositories of this version: `python tests/golden/write_golden.py`, once a release.

Each is a whole small model as `save_pretrained` leaves it, its code among it, with what it answered when
written. Later versions
must load it, with the package and by the repository's own code, and give the same answers. A golden repository is never
written again: a change that breaks it breaks the models that people have shared.

| folder  | is                                                                                     |
|---------|----------------------------------------------------------------------------------------|
| paper   | the paper's layout: post-norm, sinusoids, one embedding matrix                         |
| learned | pre-norm, learned positions, four matrices of its own, own head sizes                  |
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SENTENCES = ["a b c", "e d c b a b", "d a d"]
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 20,
    "init_std": 0.2,
    "dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "paper": {},
    "learned": {
        "normalize_before": True,
        "position_embedding_type": "learned",
        "max_position_embeddings": 20,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "qk_head_dim": 6,
        "v_head_dim": 5,
        "activation_function": "gelu",
    },
}


def answers(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What must stay the same: ids, logits of a fixed target, greedy and beam outputs, cross-attention."""
    import torch

    model.eval().set_attn_implementation("eager")
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    target = tokenizer(text_target=SENTENCES[::-1], padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model(**batch, decoder_input_ids=target, output_attentions=True)
    limits = {"max_new_tokens": 8}
    return {
        "input_ids": batch["input_ids"].tolist(),
        "logits": rounded(output.logits[:, :3]),
        "cross_attention": rounded(output.cross_attentions[-1][:, :, 0]),
        "greedy": model.generate(**batch, num_beams=1, **limits).tolist(),
        "beams": model.generate(**batch, num_beams=3, num_return_sequences=2, **limits).tolist(),
    }


def rounded(tensor: Any) -> Any:
    """Nested lists with six decimals: enough to compare by, and short."""
    return json.loads(json.dumps(tensor.tolist()), parse_float=lambda digits: round(float(digits), 6))


def teach_to_copy(model: Any) -> None:
    """A little training, so that outputs differ, end, and leave beams something to compete for."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        ids = torch.randint(4, model.config.vocab_size, (32, 6))
        ids[:, -1] = model.config.eos_token_id
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def write(folder: Path, fields: dict[str, Any]) -> None:
    import torch

    from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
    from metaphrase.configuration.options import TokenizerOptions
    from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
    from metaphrase.training.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(SENTENCES, TokenizerOptions(kind="units", vocab_size=9))
    torch.manual_seed(11)
    model = MetaphraseForConditionalGeneration(MetaphraseConfig(vocab_size=len(tokenizer), **SIZES, **fields))
    teach_to_copy(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "expected.json").write_text(json.dumps(answers(model, tokenizer)) + "\n", encoding="utf-8")


def main() -> None:
    import metaphrase

    version = HERE / metaphrase.__version__
    if version.exists():
        sys.exit(f"{version} is written already; a golden repository stays as it is")
    for kind, fields in KINDS.items():
        write(version / kind, fields)
    size = sum(file.stat().st_size for file in version.rglob("*") if file.is_file())
    print(f"{version}: {size:,} bytes")


if __name__ == "__main__":
    main()
