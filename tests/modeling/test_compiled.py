"""torch.compile and torch.export give what the plain model gives."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.generation import CompileConfig

from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

from .tiny import batch, ids, lengths_mask, tiny_model, worst

# torch's own compiler calls what torch itself has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning:torch")

SIZES = [([7, 4], [5, 6]), ([9, 3, 2], [4, 4, 1]), ([2, 2], [3, 2])]
SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}  # a compiler takes a minute for every few layers


@torch.no_grad()
@pytest.mark.parametrize("learned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torch_export(learned):
    """Encoder and decoder as graphs with free batch and lengths; other sizes than the traced ones give the same."""
    kind = {"position_embedding_type": "learned", "max_position_embeddings": 16} if learned else {}
    model = tiny_model(**kind)
    traced = batch([6, 4], [4, 3])
    limits = {"max": 16} if learned else {}
    rows, source, target = (torch.export.Dim(name, min=2, **limits) for name in ("rows", "source", "target"))
    encoder = torch.export.export(
        model.model.encoder,
        (),
        {"input_ids": traced["input_ids"], "attention_mask": traced["attention_mask"]},
        dynamic_shapes={"input_ids": {0: rows, 1: source}, "attention_mask": {0: rows, 1: source}},
    ).module()

    def decoder_inputs(inputs, states):
        return {
            "input_ids": inputs["decoder_input_ids"],
            "attention_mask": inputs["decoder_attention_mask"],
            "encoder_hidden_states": states,
            "encoder_attention_mask": inputs["attention_mask"],
        }

    states = model.model.encoder(traced["input_ids"], traced["attention_mask"]).last_hidden_state
    decoder = torch.export.export(
        model.model.decoder,
        (),
        {**decoder_inputs(traced, states), "use_cache": False},
        dynamic_shapes={
            "input_ids": {0: rows, 1: target},
            "attention_mask": {0: rows, 1: target},
            "encoder_hidden_states": {0: rows, 1: source},
            "encoder_attention_mask": {0: rows, 1: source},
            "use_cache": None,
        },
    ).module()
    for source_lengths, target_lengths in SIZES:
        inputs = batch(source_lengths, target_lengths, seed=5)
        encoded = encoder(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
        decoded = decoder(**decoder_inputs(inputs, encoded), use_cache=False)[0]
        real = inputs["decoder_attention_mask"].bool()
        assert worst(model.lm_head(decoded)[real], model(**inputs).logits[real]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "compiler"), [("eager", "aot_eager"), ("sdpa", "aot_eager"), ("sdpa", "inductor")])
def test_compiled_equals_plain(backend, compiler):
    """Forward and backward in one graph, at several sizes."""
    torch.compiler.reset()
    model = tiny_model(label_smoothing=0.1, **SHALLOW).train()
    model.set_attn_implementation(backend)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for source, target in SIZES[:2]:
        inputs = batch(source, target)
        inputs["labels"] = inputs["decoder_input_ids"].masked_fill(inputs["decoder_attention_mask"] == 0, -100)
        results = []
        for function in (model, compiled):
            model.zero_grad()
            loss = function(**inputs).loss
            loss.backward()
            results.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        assert worst(results[0][0], results[1][0]) < 1e-5
        assert max(worst(results[0][1][name], results[1][1][name]) for name in results[0][1]) < 1e-5


@pytest.mark.slow
def test_compiled_training_with_the_fast_loss():
    torch.compiler.reset()
    model = tiny_model(label_smoothing=0.1, **SHALLOW).train()
    inputs = batch()
    inputs = {"input_ids": inputs["input_ids"], "labels": inputs["decoder_input_ids"]}
    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager"), torch.compile(model)):
        model.zero_grad()
        loss = function(**inputs, num_items_in_batch=torch.tensor(18)).loss
        loss.backward()
        results.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    for result in results[1:]:
        assert worst(results[0][0], result[0]) < 1e-5
        assert max(worst(results[0][1][name], result[1][name]) for name in results[0][1]) < 1e-5


def test_the_fast_loss_of_tensors_without_values():
    """As memory planners run a model; nothing in it may depend on what an entry is."""
    with FakeTensorMode():
        model = tiny_model(label_smoothing=0.1).train()
        inputs = {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 4, dtype=torch.long)}
        model(**inputs, num_items_in_batch=torch.tensor(8)).loss.backward()
    assert model.lm_head.weight.grad.shape == model.lm_head.weight.shape


@pytest.mark.slow
@pytest.mark.parametrize("learned", [False, True])
def test_static_cache_and_full_graph(learned):
    """Compiled generation gives the ids of the plain one."""
    kind = {"position_embedding_type": "learned", "max_position_embeddings": 16} if learned else {}
    torch.compiler.reset()
    model = tiny_model(**kind, **SHALLOW)
    inputs = {"input_ids": ids([6, 4]), "attention_mask": lengths_mask([6, 4])}
    settings = {"max_new_tokens": 8, "no_repeat_ngram_size": 2}
    expected = model.generate(**inputs, **settings)
    counters.clear()
    compiled = model.generate(**inputs, **settings, cache_implementation="static", compile_config=_compile_on_cpu())
    assert torch.equal(compiled, expected)
    assert counters["stats"]["unique_graphs"] >= 1 and not counters["graph_break"]  # it was compiled, in one piece


def _compile_on_cpu() -> CompileConfig:
    config = CompileConfig(fullgraph=True, mode="default", dynamic=False)
    config._compile_all_devices = True  # generate compiles on accelerators only, unless told so
    return config


@pytest.mark.slow
def test_flex_equals_eager():
    """Forward only: torch has no backward pass of flex attention on a CPU."""
    torch.compiler.reset()
    model = tiny_model(encoder_layers=1)
    for source, target in SIZES[:2]:
        inputs = batch(source, target)
        outputs = []
        for backend in ("eager", "flex_attention"):
            model.set_attn_implementation(backend)
            with torch.no_grad():
                outputs.append(model(**inputs).logits)
        real = inputs["decoder_attention_mask"].bool()
        assert worst(outputs[0][real], outputs[1][real]) < 1e-5
    weights = model(**inputs, output_attentions=True).cross_attentions
    assert len(weights) == 3 and worst(weights[0].sum(-1), torch.ones(weights[0].shape[:-1])) < 1e-5
    assert isinstance(model, MetaphraseForConditionalGeneration)
