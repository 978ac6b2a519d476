"""Attention against worked examples, against loops over single numbers, and its masks as literal matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.attention import SelfAttention, eager_attention, scaled_dot_product_attention

from .tiny import tiny_config, tiny_model, worst

BACKENDS = ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)]


def loop_attention(query, key, value, mask):
    """Equation 1, one number at a time, in float64; differentiable. [H, T, D] x 3 -> [H, T, D]"""
    heads = []
    for q, k, v, allowed in zip(query, key, value, mask, strict=True):
        rows = []
        for t in range(len(q)):
            scores = {}
            for s in range(len(k)):
                if allowed[t, s]:
                    scores[s] = sum(q[t, d] * k[s, d] for d in range(q.shape[1])) / math.sqrt(q.shape[1])
            total = sum(score.exp() for score in scores.values())
            row = []
            for d in range(v.shape[1]):
                row.append(
                    sum((score.exp() / total * v[s, d] for s, score in scores.items()), torch.zeros(()).double())
                )
            rows.append(torch.stack(row))
        heads.append(torch.stack(rows))
    return torch.stack(heads)


def one_head(q, k, v, d_model=2):
    """Self-attention with these matrices, as the paper writes them: queries are x W^Q."""
    config = MetaphraseConfig(
        vocab_size=8, d_model=d_model, encoder_attention_heads=1, decoder_attention_heads=1, encoder_ffn_dim=4
    )
    attention = SelfAttention(config, 1, 0, is_causal=False)
    with torch.no_grad():
        for name, matrix in (("q", q), ("k", k), ("v", v), ("out", torch.eye(d_model))):
            projection = getattr(attention, f"{name}_proj")
            projection.weight.copy_(torch.as_tensor(matrix).float().T)
            projection.bias.zero_()
    return attention


def test_worked_example():
    attention = one_head(q=[[1, 1], [0, 1]], k=[[0, 1], [1, -1]], v=[[1, 0], [0, 1]])
    attention.config._attn_implementation = "eager"
    a = torch.tensor([[[1.0, 1.0], [1.0, 0.0]]])
    assert attention.q_proj(a).tolist() == [[[1, 2], [1, 1]]]
    assert attention.k_proj(a).tolist() == [[[1, 0], [0, 1]]]
    scores = attention.q_proj(a) @ attention.k_proj(a).transpose(1, 2) * attention.scaling
    assert [[round(x, 2) for x in row] for row in scores[0].tolist()] == [[0.71, 1.41], [0.71, 0.71]]
    context, weights = attention(a)
    first = math.exp(2**-0.5) / (math.exp(2**-0.5) + math.exp(2**0.5))
    assert weights[0, 0].tolist() == [pytest.approx([first, 1 - first]), pytest.approx([0.5, 0.5])]
    assert first == pytest.approx(0.3302, abs=1e-4)
    assert context[0].tolist() == [pytest.approx([1, first]), pytest.approx([1, 0.5])]


def test_heads_are_joined_in_order_and_projected():
    """Two heads, of which the first sees dimensions 1 and 2, the second 3 and 4; W^O swaps the halves."""
    config = MetaphraseConfig(vocab_size=8, d_model=4, encoder_attention_heads=2, decoder_attention_heads=2)
    config._attn_implementation = "eager"
    attention = SelfAttention(config, 2, 0, is_causal=False)
    swap = torch.eye(4)[[2, 3, 0, 1]]
    with torch.no_grad():
        for name in "qkv":
            getattr(attention, f"{name}_proj").weight.copy_(torch.eye(4))
            getattr(attention, f"{name}_proj").bias.zero_()
        attention.out_proj.weight.copy_(swap)
        attention.out_proj.bias.zero_()
    x = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    halves = x[0].double().view(3, 2, 2).transpose(0, 1)
    by_hand = loop_attention(halves, halves, halves, torch.ones(2, 3, 3))
    assert worst(attention(x)[0][0], torch.cat((by_hand[1], by_hand[0]), dim=-1)) < 1e-6


def test_the_papers_sizes():
    """Section 3.2.2: h = 8, d_k = d_v = d_model / h = 64, so that scores are divided by 8."""
    config = MetaphraseConfig()
    attention = SelfAttention(config, config.encoder_attention_heads, 0, is_causal=False)
    assert (config.d_model, attention.num_heads, config.head_dims(8)) == (512, 8, (64, 64))
    assert 1 / attention.scaling == 8
    assert attention.split_heads(torch.zeros(2, 5, 512)).shape == (2, 8, 5, 64)
    assert {p.shape for n, p in attention.named_parameters() if n.endswith("weight")} == {(512, 512)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, for flex attention
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_kind", ["none", "padding", "causal", "both", "empty row"])
@pytest.mark.parametrize("sizes", [(3, 3, 4, 4), (2, 5, 2, 6)], ids=["square", "oblong"])
def test_every_backend_equals_the_loops(backend, mask_kind, sizes):
    """Outputs and gradients, d_k and d_v apart."""
    T, S, d_k, d_v = sizes
    generator = torch.Generator().manual_seed(T)
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_()
        for shape in ((2, 2, T, d_k), (2, 2, S, d_k), (2, 2, S, d_v))
    )
    allowed = torch.ones(2, 1, T, S, dtype=torch.bool)
    if mask_kind in ("padding", "both"):
        allowed[1, ..., S - 1 :] = False
    if mask_kind in ("causal", "both"):
        allowed &= torch.ones(T, S).tril(S - T).bool()
    if mask_kind == "empty row":
        allowed[0, :, 0] = False
    module = torch.nn.Module()
    module.is_causal = module.training = False
    function = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention)
    mask = None if mask_kind == "none" else allowed
    if backend == "flex_attention" and mask is not None:
        mask = create_block_mask(lambda b, h, q, k: allowed[b, 0, q, k], 2, None, T, S, device="cpu")
    learns = backend != "flex_attention"  # of which torch has no backward pass on a CPU
    with torch.set_grad_enabled(learns):
        inputs = (query, key, value) if learns else (query.detach(), key.detach(), value.detach())
        context = function(module, *inputs, mask, dropout=0.0, scaling=d_k**-0.5)[0].transpose(1, 2)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    expected = torch.stack(
        [
            loop_attention(q, k, v, allowed[row].expand(2, -1, -1))
            for row, (q, k, v) in enumerate(zip(*exact, strict=True))
        ]
    )
    assert context.isfinite().all()
    assert worst(context, expected) < 2e-6
    if not learns:
        return
    weights = torch.randn(expected.shape, generator=generator)
    (context * weights).sum().backward()
    (expected * weights).sum().backward()
    for ours, theirs in zip((query, key, value), exact, strict=True):
        assert worst(ours.grad, theirs.grad) < 5e-6


def test_weights_come_before_dropout_and_rows_sum_to_one():
    query = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    dropped, weights = scaled_dot_product_attention(query, query, query, dropout=0.5)
    kept, same = scaled_dot_product_attention(query, query, query)
    assert torch.equal(weights, same) and not torch.equal(dropped, kept)
    assert worst(weights.sum(-1), torch.ones(1, 1, 4)) < 1e-6


# The three masks


SOURCE = [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
TARGET = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
CROSS = [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
INPUTS = {
    "input_ids": torch.tensor([[5, 6, 2, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0]]),
    "decoder_input_ids": torch.tensor([[1, 7, 8]]),
}


def test_three_masks_as_matrices_of_weights():
    model = tiny_model()
    model.set_attn_implementation("eager")
    outputs = model(**INPUTS, output_attentions=True)
    for maps, expected in (
        (outputs.encoder_attentions, SOURCE),
        (outputs.decoder_attentions, TARGET),
        (outputs.cross_attentions, CROSS),
    ):
        for layer in maps:
            for head in layer[0]:
                assert (head > 0).int().tolist() == expected


def test_three_masks_as_a_backend_gets_them():
    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append((type(module).__name__, module.is_causal, attention_mask))
        return eager_attention(module, query, key, value, attention_mask, kwargs.pop("scaling"), **kwargs)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    model = tiny_model(encoder_layers=1, decoder_layers=1)
    model.set_attn_implementation("spy")
    padded_target = {**INPUTS, "decoder_attention_mask": torch.tensor([[0, 1, 1]])}
    model(**padded_target)
    matrices = [(name, causal, mask[0, 0].int().tolist()) for name, causal, mask in seen]
    assert matrices == [
        ("SelfAttention", False, SOURCE),
        ("SelfAttention", True, [[0, 0, 0], [0, 1, 0], [0, 1, 1]]),
        ("CrossAttention", False, CROSS),
    ]


def test_an_unpadded_encoder_is_not_causal():
    """Without a mask, a backend looks at `is_causal` alone."""
    model = tiny_model()
    first, second = (torch.tensor([[5, 6, 7, last]]) for last in (8, 9))
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        with torch.no_grad():
            outputs = [model.model.encoder(input_ids=ids).last_hidden_state for ids in (first, second)]
        assert worst(outputs[0][:, 0], outputs[1][:, 0]) > 1e-2


@pytest.mark.parametrize(("heads", "d_k", "d_v"), [(1, None, None), (3, 5, 2), (2, 1, 7), (5, 3, 3)])
def test_head_sizes_apart_from_d_model(heads, d_k, d_v):
    config = tiny_config(
        d_model=25 if heads == 5 else 24,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        qk_head_dim=d_k,
        v_head_dim=d_v,
    )
    attention = SelfAttention(config, heads, 0, is_causal=False)
    expected_k, expected_v = d_k or 24 // heads, d_v or 24 // heads
    assert attention.q_proj.weight.shape == attention.k_proj.weight.shape == (heads * expected_k, config.d_model)
    assert attention.v_proj.weight.shape == (heads * expected_v, config.d_model)
    assert attention.out_proj.weight.shape == (config.d_model, heads * expected_v)
    assert attention.scaling == expected_k**-0.5
    x = torch.randn(2, 4, config.d_model)
    outputs = []
    for backend in ("eager", "sdpa"):
        config._attn_implementation = backend
        outputs.append(attention(x)[0])
    assert worst(*outputs) < 1e-6
