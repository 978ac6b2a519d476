"""Writes table3.md: the paper's Table 3 beside our presets, counted by the formulas of training/costs.py.

python docs/make_table3.py
"""

from __future__ import annotations

from pathlib import Path

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.presets import PRESETS, TABLE_3
from metaphrase.training.costs import forward_flops, parameters

PAPER = {  # Table 3 of arXiv:1706.03762: parameters in millions (None where the paper leaves the cell empty), PPL, BLEU
    "base": (65, 4.92, 25.8),
    "A-h1": (None, 5.29, 24.9),
    "A-h4": (None, 5.00, 25.5),
    "A-h16": (None, 4.91, 25.8),
    "A-h32": (None, 5.01, 25.4),
    "B-dk16": (58, 5.16, 25.1),
    "B-dk32": (60, 5.01, 25.4),
    "C-N2": (36, 6.11, 23.7),
    "C-N4": (50, 5.19, 25.3),
    "C-N8": (80, 4.88, 25.5),
    "C-d256": (28, 5.75, 24.5),
    "C-d1024": (168, 4.66, 26.0),
    "C-ff1024": (53, 5.12, 25.4),
    "C-ff4096": (90, 4.75, 26.2),
    "D-drop0.0": (None, 5.77, 24.6),
    "D-drop0.2": (None, 4.95, 25.5),
    "D-ls0.0": (None, 4.67, 25.3),
    "D-ls0.2": (None, 5.47, 25.7),
    "E-learned": (None, 4.92, 25.7),
    "big": (213, 4.33, 26.4),
}
TARGET = Path(__file__).with_name("table3.md")
LENGTH = 32  # tokens of a sentence, for the floating-point operations


def row(name: str) -> str:
    config = MetaphraseConfig.from_preset(name)
    h = config.encoder_attention_heads
    d_k, d_v = config.qk_head_dim or config.d_model // h, config.v_head_dim or config.d_model // h
    paper, ppl, bleu = PAPER.get(name, (None, None, None))
    count = parameters(config) / 1e6
    cells = [
        f"`{name}`", config.encoder_layers, config.d_model, config.encoder_ffn_dim, h, d_k, d_v, config.dropout,
        config.label_smoothing, f"{count:.1f}", paper or "", f"{count - paper:+.1f}" if paper else "",
        f"{forward_flops(config, LENGTH, LENGTH) / LENGTH / 1e6:.0f}", f"{ppl:.2f}" if ppl else "", bleu or "",
    ]  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(names) -> str:
    head = "| preset | N | d_model | d_ff | h | d_k | d_v | P_drop | ε_ls | M parameters | paper's | difference | "
    head += "MFLOP a token | paper's PPL | paper's BLEU |"
    return "\n".join([head, "|" + "---|" * 15, *(row(name) for name in names)])


def implied_vocabulary(name: str) -> float:
    """Entries that the shared matrix would need for the paper's count, in thousands."""
    config = MetaphraseConfig.from_preset(name)
    rest = parameters(config) - config.vocab_size * config.d_model
    return (PAPER[name][0] * 1e6 - rest) / config.d_model / 1e3


def page() -> str:
    ours = parameters(MetaphraseConfig.from_preset("C-N8")) - parameters(MetaphraseConfig.from_preset("C-N2"))
    theirs = PAPER["C-N8"][0] - PAPER["C-N2"][0]
    implied = {name: implied_vocabulary(name) for name, figures in PAPER.items() if figures[0]}
    rows_c = [value for name, value in implied.items() if name == "base" or name.startswith("C-")]
    rows_b = [value for name, value in implied.items() if name.startswith("B-")]
    return f"""# The paper's Table 3, by name

`MetaphraseConfig.from_preset("base")` gives a row; `MetaphraseConfig.from_preset("base", vocab_size=8000)` changes it.
Made by `docs/make_table3.py` from the presets and its formulas; a test checks the formulas against the models and this
page against the script. The paper's perplexity (a word piece) and BLEU are those of newstest2013, English to German.

{table(TABLE_3)}

Parameters are counted with a vocabulary of 37,000, shared by both languages and by the output projection. A token's
floating-point operations are those of a forward pass over a pair of {LENGTH}-token sentences, divided by {LENGTH}; a
training step takes three times as many.

## Why the counts differ

- **The layers agree.** From 2 to 8 layers ours grow by {ours / 1e6:.1f} M, the paper's by {theirs} M.
- **The vocabulary does not.** The paper says "about 37000 tokens". Its base and (C) rows fit a shared matrix of
  {min(rows_c):.0f},000 to {max(rows_c):.0f},000 entries, its big row one of {implied["big"]:.0f},000.
- **(B)** Both rows fit {min(rows_b):.0f},000 to {max(rows_b):.0f},000 entries, as base does, with d_k for queries and
  keys alone, and d_v left at 64.
- **(E)** has {MetaphraseConfig().max_position_embeddings:,} learned positions a stack; the paper names no number.
- Every projection of attention has a bias here, as in most implementations since; the paper's formulas show none. That
  is {12 * 512 * 4 + 6 * 512 * 4:,} parameters in the base model.

## Small models

Not in the paper; for a CPU and small data.

{table([name for name in PRESETS if name not in TABLE_3])}
"""


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
