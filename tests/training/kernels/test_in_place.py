"""Kernels in a model: the gradient of the model without them, in training passes of one CPU thread alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.options import RunOptions
from metaphrase.modeling.kernels import KERNELS
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import kernels, processor


def make_model(**changes) -> MetaphraseForConditionalGeneration:
    """Weights large enough that a fault shows; heads of 16."""
    torch.manual_seed(1)
    sizes = {
        **{f"{stack}_layers": 2 for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": 64 for stack in ("encoder", "decoder")},
        **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
    }
    config = {"vocab_size": 90, "d_model": 32, "dropout": 0.3, "label_smoothing": 0.1, "init_std": 0.3, **sizes}
    return MetaphraseForConditionalGeneration(MetaphraseConfig(**{**config, **changes})).train()


def make_batch(rows: int = 9) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    source, labels = (torch.randint(4, 90, (rows, length), generator=draw) for length in (11, 8))
    mask = torch.ones_like(source)
    mask[::2, -3:] = 0
    labels[1::3, -2:] = -100
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def worst(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The largest difference of an entry, as a share of its tensor's largest."""
    return max(
        float((found[name].double() - right.double()).abs().max() / right.abs().max().clamp(min=0.1))
        for name, right in exact.items()
    )


@pytest.fixture
def without(compiled, monkeypatch):
    """Takes all kernels away but the one that draws the masks."""
    return lambda: monkeypatch.setattr("metaphrase.modeling.kernels.KERNELS", {"bits": compiled.bits})


def learn(model, **more) -> dict[str, torch.Tensor]:
    """The loss and all gradients, under one seed for dropout's masks."""
    torch.manual_seed(5)
    model.zero_grad()
    loss = model(**make_batch(), num_items_in_batch=50, **more).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


CONFIGS = {
    "as in the paper": {},
    "no dropout": {"dropout": 0.0},
    "norm first": {"normalize_before": True},
    "apart": {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
    "gelu": {"activation_function": "gelu"},
    "dropout everywhere": {"attention_dropout": 0.2, "activation_dropout": 0.2},
    "odd sizes": {"d_model": 24, "encoder_ffn_dim": 36},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_learns_the_same_with_them(counted, without, name):
    found = learn(make_model(**CONFIGS[name]))
    assert name == "odd sizes" or (counted["loss"] and counted["linear"])
    without()
    before = dict(counted)
    exact, twin = learn(make_model(**CONFIGS[name]).double()), learn(make_model(**CONFIGS[name]))
    assert counted == before
    assert worst(found, exact) <= 1e-4 >= worst(twin, exact)


def test_which_operations_they_take(counted):
    learn(make_model())
    # 2 + 2 layers; q, k, v of a self-attention at once, of the source k and v; an output of each; fc1 and fc2
    assert counted == {"loss": 1, "attention": 6, "add_norm": 10, "linear": 4 + 2 * 2 + 6 + 2 * 4, "bits": 12}


def test_dropout_masks_differ_from_pass_to_pass(counted):
    model, batch = make_model(), make_batch()
    first, second = (model(**batch, num_items_in_batch=50).loss for _ in range(2))
    assert counted["add_norm"]
    assert first != second


@pytest.mark.parametrize("case", ["evaluation", "two threads", "bfloat16", "float64", "autocast", "search"])
def test_they_are_for_training_passes_of_one_thread_in_float32(counted, case):
    model, batch = make_model(), make_batch()
    if case == "search":
        model.eval().generate(**{name: batch[name] for name in ("input_ids", "attention_mask")}, max_new_tokens=3)
    elif case == "evaluation":
        model.eval()(**batch, num_items_in_batch=50).loss.backward()
    elif case == "two threads":
        torch.set_num_threads(2)
        learn(model)
    elif case == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            model(**batch, num_items_in_batch=50).loss.backward()
    else:
        learn(model.to(getattr(torch, case)))
    if case in ("bfloat16", "float64"):
        assert counted.pop("bits")  # which have no type of their own
    assert set(counted.values()) == {0}


def test_attention_that_shall_be_seen_is_computed_where_it_can_be_seen(counted):
    output = make_model()(**make_batch(), output_attentions=True, num_items_in_batch=50)
    assert counted["attention"] == 0
    assert output.cross_attentions[0].shape == (9, 2, 8, 11)


def test_layers_with_hooks_and_layers_of_another_kind_are_called_as_they_are(counted):
    model, seen = make_model(), []

    class Adapter(nn.Linear):
        def forward(self, inputs):
            seen.append("adapter")
            return super().forward(inputs)

    model.model.encoder.layers[0].fc1 = Adapter(32, 64).train()
    layer = model.model.encoder.layers[0]
    layer.fc2.register_forward_hook(lambda *given: seen.append("hook"))
    layer.self_attn_layer_norm.register_forward_pre_hook(lambda *given: seen.append("norm"))
    learn(model)
    assert seen == ["norm", "adapter", "hook"]
    assert counted["add_norm"] == 10 - 1
    assert counted["linear"] == 22 - 2


def test_a_checkpointed_model_draws_the_same_masks_twice(counted, without):
    model = make_model()
    model.activation_checkpointing_enable()
    found = learn(model)
    assert counted["add_norm"] > 10
    without()
    exact, twin = learn(make_model().double()), learn(make_model())
    assert worst(found, exact) <= 1e-4 >= worst(twin, exact)


@pytest.mark.usefixtures("library")
def test_the_option_puts_them_in_place_and_takes_them_away():
    processor.settle(1, 1, compiled=RunOptions().kernels)
    assert sorted(KERNELS) == sorted(kernels.NAMES)
    assert kernels.compiler()
    processor.settle(1, 1, compiled=False)
    assert not KERNELS
    assert kernels.compiler() is None


WATCHES = {
    "forward": lambda module, seen: module.register_forward_hook(lambda *given: seen.append(1)),
    "backward": lambda module, seen: module.register_full_backward_pre_hook(lambda *given: seen.append(1)),
    "everywhere": lambda module, seen: nn.modules.module.register_module_forward_hook(
        lambda this, *given: seen.append(1) if this is module else None
    ),
    "in its place": lambda module, seen: setattr(
        module, "forward", lambda *given, before=module.forward: (seen.append(1), before(*given))[1]
    ),
}


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("how", WATCHES)
@pytest.mark.parametrize("name", ["fc1", "final_layer_norm", "activation_fn", "dropout"])
def test_whoever_watches_a_module_sees_it(how, name):
    model, seen = make_model(), []
    watch = WATCHES[how](getattr(model.model.encoder.layers[1], name), seen)
    try:
        learn(model)
    finally:
        if watch is not None:
            watch.remove()
    assert seen


@pytest.mark.usefixtures("counted")
def test_shapes_that_do_not_fit_are_refused():
    model, batch = make_model(), make_batch()
    with pytest.raises(ValueError, match="each position needs a label"):
        model(**batch, decoder_input_ids=torch.ones(9, 7, dtype=torch.long), num_items_in_batch=50)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(encoder_outputs=(torch.randn(9, 11, 64),), labels=batch["labels"], num_items_in_batch=50)


@pytest.mark.usefixtures("counted")
def test_a_source_of_one_row_serves_all_targets():
    model = make_model()
    output = model.model(input_ids=torch.ones(9, 11, dtype=torch.long), decoder_input_ids=torch.ones(1, 8).long())
    assert output.last_hidden_state.shape == (9, 8, 32)
