"""Every row of Table 3 of "Attention Is All You Need" by name, and a few small models that train on a CPU.

A row states only what differs from the base model, as the paper's table does.
"""


def _sizes(layers=6, d_model=512, ffn=2048, heads=8, **others) -> dict:
    """One value for both stacks, as in the paper."""
    return {
        "encoder_layers": layers,
        "decoder_layers": layers,
        "d_model": d_model,
        "encoder_ffn_dim": ffn,
        "decoder_ffn_dim": ffn,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        **{"dropout": 0.1, "label_smoothing": 0.1, **others},
    }


TABLE_3 = {
    "base": _sizes(),
    "A-h1": _sizes(heads=1, qk_head_dim=512, v_head_dim=512),
    "A-h4": _sizes(heads=4, qk_head_dim=128, v_head_dim=128),
    "A-h16": _sizes(heads=16, qk_head_dim=32, v_head_dim=32),
    "A-h32": _sizes(heads=32, qk_head_dim=16, v_head_dim=16),
    "B-dk16": _sizes(qk_head_dim=16),
    "B-dk32": _sizes(qk_head_dim=32),
    "C-N2": _sizes(layers=2),
    "C-N4": _sizes(layers=4),
    "C-N8": _sizes(layers=8),
    "C-d256": _sizes(d_model=256, qk_head_dim=32, v_head_dim=32),
    "C-d1024": _sizes(d_model=1024, qk_head_dim=128, v_head_dim=128),
    "C-ff1024": _sizes(ffn=1024),
    "C-ff4096": _sizes(ffn=4096),
    "D-drop0.0": _sizes(dropout=0.0),
    "D-drop0.2": _sizes(dropout=0.2),
    "D-ls0.0": _sizes(label_smoothing=0.0),
    "D-ls0.2": _sizes(label_smoothing=0.2),
    "E-learned": _sizes(position_embedding_type="learned"),
    "big": _sizes(d_model=1024, ffn=4096, heads=16, dropout=0.3),
}

SMALL = {
    "small": _sizes(layers=3, d_model=256, ffn=1024, heads=4),
    "mini": _sizes(layers=3, d_model=192, ffn=512, heads=4),
    "tiny": _sizes(layers=2, d_model=64, ffn=128, heads=4),
}

PRESETS = {**TABLE_3, **SMALL}
