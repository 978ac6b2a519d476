"""Small models whose weights are large enough that wrong wiring shows, and batches with padding."""

from __future__ import annotations

import torch

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

VOCAB = 40
TYINGS = {  # (share_encoder_decoder_embeddings, tie_word_embeddings)
    "all": (True, True),
    "encoder-decoder": (True, False),
    "decoder-head": (False, True),
    "none": (False, False),
}


def tiny_config(**overrides) -> MetaphraseConfig:
    """Unequal sizes everywhere, so that no two can be mistaken for each other."""
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 24,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 36,
        "decoder_ffn_dim": 28,
        "dropout": 0.0,
    }
    return MetaphraseConfig(**{**sizes, **overrides})


def tiny_model(seed: int = 0, scale: float = 1.0, **overrides) -> MetaphraseForConditionalGeneration:
    """In evaluation mode; matrices drawn so that scores spread, biases and norms away from their first values."""
    torch.manual_seed(seed)
    return scramble(MetaphraseForConditionalGeneration(tiny_config(**overrides)), scale).eval()


def scramble(model: torch.nn.Module, scale: float = 1.0) -> torch.nn.Module:
    """Random weights with fan-in scaling (so that layers neither die nor explode), for any model of the family."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # a table of sinusoids
                continue
            noise = torch.randn_like(parameter)
            if parameter.dim() == 2:
                parameter.copy_(noise * scale * parameter.shape[1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.1 * noise)
    return model


def ids(lengths: list[int], *, first: int = 3, vocab: int = VOCAB, pad: int = 0, seed: int = 0) -> torch.Tensor:
    """Random ids from `first` on, one row a length, right-padded."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((len(lengths), max(lengths)), pad)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.randint(first, vocab, (length,), generator=generator)
    return rows


def lengths_mask(lengths: list[int]) -> torch.Tensor:
    """1 for the first `length` of a row, then 0."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()


def batch(source: list[int] = (7, 4, 5), target: list[int] = (5, 6, 3), seed: int = 0, **sizes) -> dict:
    """A right-padded batch: source, target that begins with 1, and both masks."""
    decoder_input_ids = ids(list(target), seed=seed + 1, **sizes)
    decoder_input_ids[:, 0] = 1
    return {
        "input_ids": ids(list(source), seed=seed, **sizes),
        "attention_mask": lengths_mask(list(source)),
        "decoder_input_ids": decoder_input_ids,
        "decoder_attention_mask": lengths_mask(list(target)),
    }


def worst(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest absolute difference."""
    assert first.shape == second.shape, (first.shape, second.shape)
    return (first.double() - second.double()).abs().max().item()
