"""Tiny models of five families that decode any source differently, and a tokenizer of whole words for all of them."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
SOURCE = "The animal didn't cross the street because it was too tired ."
TARGET = "Das Tier überquerte die Straße nicht , weil es zu müde war ."
WORDS = [*SOURCE.split(), *TARGET.split()]
LAYERS, HEADS, SIZE = 2, 2, 16


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast(tokenizer)


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: a character outside ASCII takes several tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*SPECIAL, *letters])}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer)


def build(family: str) -> torch.nn.Module:
    """A model that writes at most twelve tokens: few random models ever write their end token."""
    model = untrained(family)
    model.generation_config.max_new_tokens = 12
    return model


def untrained(family: str) -> torch.nn.Module:
    size = {
        "vocab_size": 40,
        "d_model": SIZE,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    torch.manual_seed(5)
    if family == "metaphrase":
        return MetaphraseForConditionalGeneration(MetaphraseConfig(**size, init_std=0.3)).eval()
    if family == "marian":
        start = {**ids, "decoder_start_token_id": 0}  # Marian starts with padding
        return MarianMTModel(MarianConfig(**size, **start, init_std=0.3, forced_eos_token_id=None)).eval()
    if family == "bart":
        return BartForConditionalGeneration(BartConfig(**size, **ids, init_std=0.5, forced_eos_token_id=None)).eval()
    if family == "m2m100":
        start = {**ids, "decoder_start_token_id": 2}  # M2M100 starts with its end token
        return M2M100ForConditionalGeneration(M2M100Config(**size, **start, init_std=0.3)).eval()
    config = T5Config(
        vocab_size=40,
        d_model=SIZE,
        d_kv=8,
        d_ff=32,
        num_layers=LAYERS,
        num_heads=HEADS,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        initializer_factor=2.0,
    )
    return T5ForConditionalGeneration(config).eval()


FAMILIES = ["metaphrase", "marian", "bart", "m2m100", "t5"]


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return build(request.param)


@pytest.fixture(scope="session")
def ours() -> torch.nn.Module:
    return build("metaphrase")
