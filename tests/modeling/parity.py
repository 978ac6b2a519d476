"""From the field's implementations to ours: the configuration, and a key map for the weights.

Each `from_*` takes tensors by the other model's names and gives tensors by ours. The maps are linear (renaming,
splitting, reordering), so that they carry gradients over as well as weights.
"""

from __future__ import annotations

import re

import torch
from torch import nn
from transformers import FSMTConfig, M2M100Config, MarianConfig

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig

Tensors = dict[str, torch.Tensor]

SHARED_FIELDS = (
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "activation_function",
    "scale_embedding",
    "tie_word_embeddings",
    "pad_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)
READS_RESIDUAL = re.compile(r"(q_proj|k_proj|v_proj|fc1|embed_tokens|shared|lm_head|embed_positions)\.weight$")
WRITES_RESIDUAL = re.compile(r"((out_proj|fc2)\.(weight|bias)|layer_norm\.(weight|bias))$")


def _config(theirs, **ours) -> MetaphraseConfig:
    common = {name: getattr(theirs, name) for name in SHARED_FIELDS}
    return MetaphraseConfig(**common, vocab_size=theirs.vocab_size, bos_token_id=0, **ours)


# Marian: post-norm; its sinusoids have all sines before all cosines


def marian_config(theirs: MarianConfig) -> MetaphraseConfig:
    return _config(theirs, share_encoder_decoder_embeddings=theirs.share_encoder_decoder_embeddings)


def interleaved(d_model: int) -> torch.Tensor:
    """For each of our dimensions (sine, cosine, sine …) its place among sines then cosines."""
    sines = torch.arange((d_model + 1) // 2)
    return torch.stack((sines, sines + len(sines)), dim=1).flatten()[:d_model]


def from_marian(theirs: Tensors, d_model: int) -> Tensors:
    """The same model with its residual stream reordered, after which our sinusoids are Marian's."""
    order, ours = interleaved(d_model), {}
    for name, tensor in theirs.items():
        if READS_RESIDUAL.search(name):
            tensor = tensor[..., order]
        elif WRITES_RESIDUAL.search(name):
            tensor = tensor[order]
        ours[name] = tensor
    return {
        name: tensor for name, tensor in ours.items() if "embed_positions" not in name and "final_logits" not in name
    }


# M2M100 and FSMT: fairseq's sinusoids count from pad_token_id + 1, and stand in our learned table


def fairseq_positions(theirs: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Their table from the first token's row on."""
    return theirs[pad_token_id + 1 :]


def m2m100_config(theirs: M2M100Config, positions: int) -> MetaphraseConfig:
    return _config(theirs, normalize_before=True, position_embedding_type="learned", max_position_embeddings=positions)


def from_m2m100(theirs: Tensors) -> Tensors:
    return dict(theirs)


def fsmt_config(theirs: FSMTConfig, positions: int) -> MetaphraseConfig:
    return _config(
        theirs,
        share_encoder_decoder_embeddings=theirs.tie_word_embeddings,
        position_embedding_type="learned",
        max_position_embeddings=positions,
    )


def from_fsmt(theirs: Tensors) -> Tensors:
    ours = {name: tensor for name, tensor in theirs.items() if "embed_positions" not in name}
    ours["lm_head.weight"] = ours.pop("model.decoder.output_projection.weight")
    return ours


# torch.nn.Transformer: the three input projections are one matrix


TORCH_NAMES = {
    "linear1": "fc1",
    "linear2": "fc2",
    "multihead_attn": "encoder_attn",
    "encoder.norm.": "encoder.layer_norm.",
    "decoder.norm.": "decoder.layer_norm.",
}
TORCH_NORMS = {
    "encoder": {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"},
    "decoder": {"norm1": "self_attn_layer_norm", "norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"},
}


def from_torch(theirs: Tensors) -> Tensors:
    """`nn.Transformer`'s names, without a prefix, to those of our two stacks' layers."""
    ours = {}
    for name, tensor in theirs.items():
        stack = name.split(".")[0]
        for old, new in (TORCH_NAMES | {f"{k}.": f"{v}." for k, v in TORCH_NORMS[stack].items()}).items():
            name = name.replace(old, new)
        if ".in_proj_" in name:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                ours["model." + name.replace("in_proj_", f"{part}_proj.")] = piece
        else:
            ours["model." + name] = tensor
    return ours


def load(model: nn.Module, tensors: Tensors) -> None:
    """Copies by name; every tensor must find its parameter, and every parameter its tensor (itself, or by a tie)."""
    own = dict(model.named_parameters(remove_duplicate=False))
    unknown = set(tensors) - set(own)
    assert not unknown, unknown
    filled = {own[name].data_ptr() for name in tensors}
    assert not [name for name, parameter in own.items() if parameter.data_ptr() not in filled]
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
