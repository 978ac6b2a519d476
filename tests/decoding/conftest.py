"""Small models that give outputs of realistic length, and a tokenizer that needs no training."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training.data.tokenizer import wrap

VOCABULARY = 40


@lru_cache
@torch.enable_grad()
def make_model(seed: int = 0, **fields) -> MetaphraseForConditionalGeneration:
    """A model taught for a second or two to copy a source with errors: its outputs differ from source to source, end
    at about the source's length, and are unsure enough for beams to compete. Shared between tests: do not change it."""
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 64,
        "init_std": 0.1,
        "dropout": 0.0,
    }
    torch.manual_seed(seed)
    model = MetaphraseForConditionalGeneration(MetaphraseConfig(**{**sizes, **fields}))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(70):
        ids, mask = make_sources(48, seed=1000 * seed + step)
        wrong = (torch.rand(ids.shape) < 0.15) & (ids > 3)
        labels = torch.where(wrong, torch.randint_like(ids, 4, VOCABULARY), ids).masked_fill(mask == 0, -100)
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
    with torch.no_grad():  # biases and norms that no test can mistake for zeros and ones
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "layer_norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def make_sources(count: int, seed: int = 0, longest: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded source ids and their mask, every length from 2 on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator)
    ids = torch.randint(4, VOCABULARY, (count, longest), generator=generator)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    ids[torch.arange(count), lengths - 1] = 2
    keep = int(lengths.max())
    return (ids * mask)[:, :keep], mask[:, :keep]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words `w4` … `w39`: a word is its id."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrap(tokenizer)


@pytest.fixture(scope="session")
def model() -> MetaphraseForConditionalGeneration:
    return make_model()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    ids, mask = make_sources(12, seed=5)
    return [
        " ".join(f"w{i}" for i in row[: length - 1])
        for row, length in zip(ids.tolist(), mask.sum(1).tolist(), strict=True)
    ]
