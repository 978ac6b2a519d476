"""The field's implementations give the same logits, gradients and beams from the same weights."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
)
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from metaphrase.modeling.embeddings import sinusoidal_positions
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration, MetaphrasePreTrainedModel

from .parity import (
    fairseq_positions,
    from_fsmt,
    from_m2m100,
    from_marian,
    from_torch,
    fsmt_config,
    interleaved,
    load,
    m2m100_config,
    marian_config,
)
from .tiny import batch, ids, lengths_mask, scramble, tiny_config, worst

SEEDS = (0, 1, 2, 3, 5, 6)
SCALE = 1.2  # of the weights: outputs then depend on the source, and beams differ
POSITIONS = 48
STACKS = ("encoder", "decoder")
LOGITS, GRADIENTS = 1e-5, 1e-4


def sizes(seed: int, step: int = 8) -> dict:
    """Random, unequal sizes; heads divide d_model."""
    draw = random.Random(seed)
    return {
        "d_model": step * draw.choice([2, 3, 4]),
        "encoder_layers": draw.choice([1, 2, 3]),
        "decoder_layers": draw.choice([1, 2, 3]),
        "encoder_attention_heads": draw.choice([1, 2, 4]),
        "decoder_attention_heads": draw.choice([1, 2, 4]),
        "encoder_ffn_dim": draw.choice([12, 20, 33]),
        "decoder_ffn_dim": draw.choice([12, 20, 33]),
        "activation_function": draw.choice(["relu", "gelu", "swish"]),
        "scale_embedding": draw.random() < 0.5,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    }


def gradients(model: nn.Module, inputs: dict, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the mean cross-entropy at real positions, by parameter name, tied names included."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "embed_positions" not in name:
            module.padding_idx = None  # Marian starts the decoder with its pad token, whose row it then never learns
    model.zero_grad()
    real = inputs["decoder_attention_mask"].bool()
    nn.functional.cross_entropy(model(**inputs, use_cache=False).logits[real], labels[real]).backward()
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def assert_parity(theirs: nn.Module, ours: nn.Module, convert, pad: int, start: int, eos: int, seed: int) -> None:
    """Logits, gradients and beams."""
    inputs = batch([9, 4, 6], [5, 8, 3], seed=seed, pad=pad)
    inputs["decoder_input_ids"][:, 0] = start
    real = inputs["decoder_attention_mask"].bool()
    with torch.no_grad():
        expected, got = theirs(**inputs, use_cache=False).logits, ours(**inputs, use_cache=False).logits
    figures = {"logits": worst(expected[real], got[real])}
    assert expected[real].std() > 0.3
    assert figures["logits"] <= LOGITS
    labels = torch.randint(0, 40, real.shape, generator=torch.Generator().manual_seed(seed))
    expected, got = convert(gradients(theirs, inputs, labels)), gradients(ours, inputs, labels)
    expected = {name: grad for name, grad in expected.items() if name in got}
    missing = set(got) - set(expected)  # tables of positions learn nothing over there; FSMT has no `shared`
    assert missing <= {"model.shared.weight"} | {f"model.{stack}.embed_positions.weight" for stack in STACKS}
    figures["gradients"] = max(worst(expected[name], got[name]) for name in expected)
    assert figures["gradients"] <= GRADIENTS
    assert_same_beams(theirs, ours, pad, start, eos, seed)
    print("worst differences:", figures)


def assert_same_beams(theirs: nn.Module, ours: nn.Module, pad: int, start: int, eos: int, seed: int) -> None:
    lengths = [9, 4, 2]
    settings = GenerationConfig(
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=7,
        pad_token_id=pad,
        bos_token_id=0,
        eos_token_id=eos,
        decoder_start_token_id=start,
        suppress_tokens=[pad],  # fairseq's positions do not count a pad that was generated
        no_repeat_ngram_size=2,  # random weights like to repeat themselves
        return_dict_in_generate=True,
        output_scores=True,
    )
    inputs = {"input_ids": ids(lengths, seed=seed + 9, pad=pad), "attention_mask": lengths_mask(lengths)}
    outputs = []
    for model in (theirs, ours):
        model.generation_config = settings
        outputs.append(model.generate(**inputs, generation_config=settings))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert worst(outputs[0].sequences_scores, outputs[1].sequences_scores) <= GRADIENTS
    beams = outputs[0].sequences.view(3, 4, -1)
    assert all(len({tuple(beam) for beam in row.tolist()}) == 4 for row in beams)  # the four beams differ
    assert len({tuple(row[0].tolist()) for row in beams}) > 1  # and so do the best of different sources
    settings.update(num_beams=1, num_return_sequences=1)
    greedy = theirs.generate(**inputs, generation_config=settings).sequences
    width = min(greedy.shape[1], beams.shape[2])
    assert not torch.equal(greedy[:, :width], beams[:, 0, :width])  # the search was needed


@pytest.mark.parametrize("seed", SEEDS)
def test_marian(seed):
    torch.manual_seed(seed)
    share = tie = seed % 2 == 0
    config = MarianConfig(
        vocab_size=40,
        pad_token_id=2,
        eos_token_id=0,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tie,
        share_encoder_decoder_embeddings=share,
        decoder_vocab_size=40,
        **sizes(seed),
    )
    theirs = scramble(MarianMTModel(config), SCALE).eval()
    ours = MetaphraseForConditionalGeneration(marian_config(config)).eval()

    def convert(tensors):
        return from_marian(tensors, config.d_model)

    load(ours, convert(dict(theirs.named_parameters(remove_duplicate=False))))
    assert_parity(theirs, ours, convert, pad=2, start=2, eos=0, seed=seed)


@pytest.mark.parametrize("d_model", [4, 6, 7, 15])
def test_marian_sinusoids_are_ours_reordered(d_model):
    config = MarianConfig(
        vocab_size=8,
        d_model=d_model,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        max_position_embeddings=POSITIONS,
        pad_token_id=2,
        eos_token_id=0,
        decoder_start_token_id=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
    )
    table = MarianMTModel(config).model.encoder.embed_positions.weight
    ours = sinusoidal_positions(torch.arange(POSITIONS), d_model)
    assert worst(table[:, interleaved(d_model)], ours) <= 4e-6  # theirs in float64, ours in float32


@pytest.mark.parametrize("seed", SEEDS)
def test_m2m100(seed):
    torch.manual_seed(seed)
    tie = seed % 2 == 0
    config = M2M100Config(
        vocab_size=40,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        bos_token_id=0,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tie,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        **sizes(seed + 10),
    )
    theirs = scramble(M2M100ForConditionalGeneration(config), SCALE).eval()
    ours_config = m2m100_config(config, POSITIONS)
    if not tie:  # one flag over there: nothing is shared
        ours_config.share_encoder_decoder_embeddings = False
    ours = MetaphraseForConditionalGeneration(ours_config).eval()
    tensors = dict(theirs.named_parameters(remove_duplicate=False))
    if not tie:
        tensors.pop("model.shared.weight", None)
    for stack in STACKS:
        table = getattr(theirs.model, stack).embed_positions.weights
        tensors[f"model.{stack}.embed_positions.weight"] = fairseq_positions(table, 1)[:POSITIONS]
    load(ours, from_m2m100(tensors))
    assert_parity(theirs, ours, from_m2m100, pad=1, start=2, eos=2, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_fsmt(seed):
    torch.manual_seed(seed)
    tie = seed % 2 == 0
    config = FSMTConfig(
        langs=["a", "b"],
        src_vocab_size=40,
        tgt_vocab_size=40,
        pad_token_id=1,
        eos_token_id=2,
        bos_token_id=0,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tie,
        **sizes(seed + 20),
    )
    theirs = scramble(FSMTForConditionalGeneration(config), SCALE).eval()
    ours = MetaphraseForConditionalGeneration(fsmt_config(config, POSITIONS)).eval()
    named = dict(theirs.named_parameters(remove_duplicate=False))
    tensors = from_fsmt(named)
    if tie:
        tensors["model.shared.weight"] = tensors["model.decoder.embed_tokens.weight"]
    for stack in STACKS:
        table = named[f"model.{stack}.embed_positions.weight"]
        tensors[f"model.{stack}.embed_positions.weight"] = fairseq_positions(table, 1)[:POSITIONS]
    load(ours, tensors)
    assert_parity(theirs, ours, from_fsmt, pad=1, start=2, eos=2, seed=seed)


class TorchSeq2Seq(MetaphrasePreTrainedModel, GenerationMixin):
    """`torch.nn.Transformer` between two embeddings and a projection, as the tutorials have it; no cache."""

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.ModuleDict({stack: nn.Embedding(config.vocab_size, config.d_model) for stack in STACKS})
        common = {"dropout": 0.0, "batch_first": True, "norm_first": config.normalize_before}
        sizes = (config.d_model, config.encoder_attention_heads, config.encoder_ffn_dim)
        layers = [
            kind(*sizes, activation=config.activation_function, **common)
            for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        ]
        # In post-norm order nn.Transformer would add one more norm after a stack that already ends in a norm.
        norms = [nn.LayerNorm(config.d_model) if config.normalize_before else None for _ in STACKS]
        self.transformer = nn.Transformer(
            *sizes[:2],
            custom_encoder=nn.TransformerEncoder(
                layers[0], config.encoder_layers, norms[0], enable_nested_tensor=False
            ),
            custom_decoder=nn.TransformerDecoder(layers[1], config.decoder_layers, norms[1]),
            **common,
        )
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        table = torch.empty(POSITIONS, config.d_model, dtype=torch.float64)
        for position in range(POSITIONS):
            for i in range(config.d_model):
                angle = position / 10000 ** (2 * (i // 2) / config.d_model)
                table[position, i] = math.sin(angle) if i % 2 == 0 else math.cos(angle)
        self.table = table.float()

    def embedded(self, stack, token_ids):
        return self.embed[stack](token_ids) * self.config.d_model**0.5 + self.table[: token_ids.shape[1]]

    def get_encoder(self):
        def encode(input_ids, attention_mask=None, **kwargs):
            states = self.transformer.encoder(
                self.embedded("encoder", input_ids), src_key_padding_mask=attention_mask == 0
            )
            return BaseModelOutput(last_hidden_state=states)

        encode.forward = encode  # generate reads its signature
        return encode

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, encoder_outputs=None, **kwargs):
        inputs = {"attention_mask": attention_mask, "encoder_outputs": encoder_outputs}
        return {"decoder_input_ids": input_ids, **inputs}

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        use_cache=False,
        **kwargs,
    ):
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask)
        width = decoder_input_ids.shape[1]
        padding = None if decoder_attention_mask is None else decoder_attention_mask == 0
        states = self.transformer.decoder(
            self.embedded("decoder", decoder_input_ids),
            encoder_outputs.last_hidden_state,
            tgt_mask=torch.ones(width, width).triu(1).bool(),
            tgt_key_padding_mask=padding,
            memory_key_padding_mask=attention_mask == 0,
        )
        return Seq2SeqLMOutput(logits=self.lm_head(states))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize_before", [False, True])
def test_torch(seed, normalize_before):
    torch.manual_seed(seed)
    sizes_ = sizes(seed + 30)
    sizes_.update(
        decoder_attention_heads=sizes_["encoder_attention_heads"],  # one number of heads, one inner width over there
        decoder_ffn_dim=sizes_["encoder_ffn_dim"],
        activation_function="gelu" if seed % 2 else "relu",
        scale_embedding=True,
    )
    config = tiny_config(
        **sizes_, normalize_before=normalize_before, share_encoder_decoder_embeddings=False, tie_word_embeddings=False
    )
    theirs = scramble(TorchSeq2Seq(config), SCALE).eval()
    ours = MetaphraseForConditionalGeneration(config).eval()

    def convert(tensors):
        layers = {n.removeprefix("transformer."): t for n, t in tensors.items() if n.startswith("transformer.")}
        outside = {f"model.{stack}.embed_tokens.weight": tensors[f"embed.{stack}.weight"] for stack in STACKS}
        return from_torch(layers) | outside | {"lm_head.weight": tensors["lm_head.weight"]}

    load(ours, convert(dict(theirs.named_parameters())))
    assert_parity(theirs, ours, convert, pad=0, start=1, eos=2, seed=seed)
