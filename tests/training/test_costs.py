"""Formulas of cost against real models: operations to the last one, memory within a fifth."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.decoding.step import decode_step, encode, start
from metaphrase.decoding.weights import read_weights
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import costs

SIZES = {"vocab_size": 90, "d_model": 24, "encoder_attention_heads": 3, "decoder_attention_heads": 6}
SHAPES = {**SIZES, "encoder_ffn_dim": 20, "decoder_ffn_dim": 28, "encoder_layers": 2, "decoder_layers": 3}


def model_and_batch(config: MetaphraseConfig, rows: int, source: int, target: int):
    torch.manual_seed(0)
    ids = torch.randint(4, config.vocab_size, (rows, source))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    labels = torch.randint(4, config.vocab_size, (rows, target))
    return MetaphraseForConditionalGeneration(config).train(), {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
    }


def product_added(_, a: tuple[int, int], b: tuple[int, int], **__) -> int:
    """torch counts `addmm` and not its twin that works in place."""
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize("others", [{}, {"qk_head_dim": 5, "v_head_dim": 9}], ids=str)
def test_a_training_step_takes_three_forward_passes(others):
    config = MetaphraseConfig(**SHAPES, **others)
    model, batch = model_and_batch(config, 4, 11, 7)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product_added}) as counter:
        model(**batch, num_items_in_batch=28).loss.backward()
    assert counter.get_total_flops() == costs.TRAINING * 4 * costs.forward_flops(config, 11, 7)


@pytest.mark.parametrize("beams", [1, 3])
def test_operations_of_a_search(beams):
    config = MetaphraseConfig(**SHAPES)
    model, batch = model_and_batch(config, 2, 8, 5)
    weights = read_weights(model.eval())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoded = encode(weights.encoder, batch["input_ids"], batch["attention_mask"])
        state = start(weights, encoded, batch["attention_mask"], beams)
        for _ in range(5):
            decode_step(weights.decoder, state, torch.full((2, beams), 5)) @ weights.vocabulary
    counted = counter.get_flop_counts()["Global"]
    attended = sum(number for name, number in counted.items() if "attention" in str(name) or "bmm" in str(name))
    width = config.decoder_attention_heads * sum(config.head_dims(6))
    looks = beams * config.decoder_layers * 2 * width * (5 * 6 // 2 + 5 * 8)
    looks += config.encoder_layers * 2 * 3 * 8 * 8 * sum(config.head_dims(3))
    products = costs.decoding_flops(config, 8, 5, beams) - looks  # whether attention counts, depends on its kernel
    assert counter.get_total_flops() - attended == 2 * products


def test_the_first_word_costs_a_forward_pass():
    config = MetaphraseConfig(**SHAPES)
    assert costs.decoding_flops(config, 9, 1) == costs.forward_flops(config, 9, 1)


def saved_bytes(model, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that autograd keeps, each piece of memory once, weights not counted."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch, num_items_in_batch=1)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"preset": "mini", "vocab_size": 4000}, (16, 20, 30)),
        ({"preset": "small", "vocab_size": 1000}, (2, 200, 100)),
        ({"preset": "tiny", "vocab_size": 500, "encoder_layers": 4}, (40, 12, 12)),
    ],
    ids=str,
)
def test_activations(sizes, shape):
    config = MetaphraseConfig.from_preset(sizes.pop("preset"), **sizes)
    kept = saved_bytes(*model_and_batch(config, *shape))
    assert costs.activation_bytes(config, *shape) == pytest.approx(kept, rel=0.2)


def test_memory_adds_up():
    config = MetaphraseConfig(**SHAPES)
    model, _ = model_and_batch(config, 2, 3, 3)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    memory = costs.training_memory(config, 2, 3, 3, running_mean=True)
    assert (memory.weights, memory.gradients, memory.optimizer, memory.running_mean) == (
        weights,
        weights,
        2 * weights,
        weights,
    )
    assert memory.peak == 4 * weights + max(weights, memory.activations + memory.loss)
    assert costs.training_memory(config, 2, 3, 3, shards=8).weights == weights // 8
    assert costs.checkpoint_bytes(config, running_mean=True) == 4 * weights == 4 * costs.gradient_bytes(config)


def test_all_reduce():
    assert costs.all_reduce_seconds(10**9, 1, 10**9) == 0
    assert costs.all_reduce_seconds(10**9, 2, 10**9) == pytest.approx(1)
    assert costs.all_reduce_seconds(10**9, 512, 10**9) == pytest.approx(2, rel=0.01)
