"""What must change nothing: padding, neighbours, caches, backends, checkpointing, the way in."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from .tiny import batch, ids, lengths_mask, tiny_model, worst

KINDS = {
    "post-norm": {},
    "pre-norm": {"normalize_before": True},
    "learned": {"position_embedding_type": "learned", "max_position_embeddings": 32},
    "odd": {"d_model": 15, "encoder_attention_heads": 3, "decoder_attention_heads": 5, "encoder_ffn_dim": 7},
    "head sizes": {"qk_head_dim": 5, "v_head_dim": 3, "activation_function": "gelu"},
}
SOURCE, TARGET = [7, 4, 5], [5, 6, 3]
BACKENDS = ["eager", "sdpa"]


@pytest.fixture(params=KINDS)
def model(request):
    return tiny_model(**KINDS[request.param])


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def beams(model, **inputs):
    """Beam-4 outputs as tuples without what follows `</s>`."""
    outputs = model.generate(**inputs, num_beams=4, max_new_tokens=8, no_repeat_ngram_size=2)
    return [tuple(token for token in row if token not in (0, 2)) for row in outputs.tolist()]


# Padding and neighbours


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_and_batch_mates_change_nothing(model, backend):
    """Each sentence alone, in the batch, in wider padding, with junk in the padding, and in another order."""
    model.set_attn_implementation(backend)
    inputs = batch(SOURCE, TARGET)
    together = logits(model, **inputs)
    order = [2, 0, 1]
    reordered = logits(model, **{name: tensor[order] for name, tensor in inputs.items()})
    wide = {name: torch.nn.functional.pad(tensor, (0, 4)) for name, tensor in inputs.items()}
    junk = dict(wide)
    for name, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        noise = ids([wide[name].shape[1]] * 3, seed=77)
        junk[name] = torch.where(wide[mask].bool(), wide[name], noise)
        assert not torch.equal(junk[name], wide[name])
    padded, junked = logits(model, **wide), logits(model, **junk)
    for row, (source, target) in enumerate(zip(SOURCE, TARGET, strict=True)):
        alone = logits(
            model,
            input_ids=inputs["input_ids"][row : row + 1, :source],
            decoder_input_ids=inputs["decoder_input_ids"][row : row + 1, :target],
        )[0]
        for others in (together, padded, junked):
            assert worst(others[row, :target], alone) < 1e-5
        assert worst(reordered[order.index(row), :target], alone) < 1e-5


def test_padding_and_batch_mates_change_no_decoded_id(model):
    sources, lengths = ids([9, 3, 6], seed=3), [9, 3, 6]
    mask = lengths_mask(lengths)
    together = beams(model, input_ids=sources, attention_mask=mask)
    wide = torch.nn.functional.pad(sources, (0, 5), value=11)
    assert beams(model, input_ids=wide, attention_mask=torch.nn.functional.pad(mask, (0, 5))) == together
    for row, length in enumerate(lengths):
        assert beams(model, input_ids=sources[row : row + 1, :length]) == together[row : row + 1]
    assert len(set(together)) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_attention_obeys_its_padding_mask(backend):
    """Other values where the mask is 0 change nothing; where it is 1 they do. Past the encoder, so that only the
    decoder's own mask can be what hides them."""
    model = tiny_model()
    model.set_attn_implementation(backend)
    inputs = batch(SOURCE, TARGET)
    with torch.no_grad():
        states = model.model.encoder(inputs.pop("input_ids"), inputs["attention_mask"]).last_hidden_state
    mask = inputs["attention_mask"].bool()
    before = logits(model, **inputs, encoder_outputs=BaseModelOutput(last_hidden_state=states))
    hidden, seen = states.clone(), states.clone()
    hidden[~mask] += 100.0
    seen[1, 0] += 1.0
    same = logits(model, **inputs, encoder_outputs=BaseModelOutput(last_hidden_state=hidden))
    other = logits(model, **inputs, encoder_outputs=BaseModelOutput(last_hidden_state=seen))
    assert worst(same, before) == 0
    assert worst(other[1], before[1]) > 1e-2
    assert worst(other[[0, 2]], before[[0, 2]]) < 1e-6


def test_the_future_is_hidden(model):
    inputs = batch([5], [6])
    before = logits(model, **inputs)
    inputs["decoder_input_ids"][0, 3] = 39 - inputs["decoder_input_ids"][0, 3]
    after = logits(model, **inputs)
    assert worst(after[:, :3], before[:, :3]) < 1e-6 and worst(after[:, 3:], before[:, 3:]) > 1e-2


# Masks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_MASK_DTYPE(backend, dtype):
    """Rows without a visible key, scores of dozens, masks of every type."""
    model = tiny_model(scale=3.0).to(dtype)
    model.set_attn_implementation(backend)
    inputs = {"input_ids": ids([3, 3]), "decoder_input_ids": torch.tensor([[5, 1, 7], [1, 8, 9]])}
    source_mask = torch.tensor([[0, 0, 0], [1, 1, 0]])
    target_mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    outputs = [
        logits(model, **inputs, attention_mask=source_mask.to(kind), decoder_attention_mask=target_mask.to(kind))
        for kind in (torch.int64, torch.bool, torch.float32, dtype)
    ]
    assert outputs[0].isfinite().all()
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    model.set_attn_implementation("eager" if backend == "sdpa" else "sdpa")
    other = logits(model, **inputs, attention_mask=source_mask, decoder_attention_mask=target_mask)
    exact = tiny_model(scale=3.0)
    truth = logits(exact, **inputs, attention_mask=source_mask, decoder_attention_mask=target_mask)
    if dtype == torch.float32:
        assert worst(outputs[0], other) < 1e-5
    else:  # no further apart than half precision itself is from the truth
        assert worst(outputs[0], other) < 2 * max(worst(outputs[0], truth), worst(other, truth))
        assert worst(outputs[0], truth) < 0.5
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, attention_mask=source_mask, output_attentions=True).cross_attentions
    assert not any(layer[0].any() or layer[1, ..., 2].any() for layer in maps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_may_attend_to_nothing_give_zeros_and_finite_gradients(backend):
    model = tiny_model()
    model.set_attn_implementation(backend)
    inputs = batch(SOURCE, TARGET)
    inputs["attention_mask"][0] = 0
    captured = []
    hook = model.model.decoder.layers[0].encoder_attn.out_proj.register_forward_pre_hook(
        lambda module, args: captured.append(args[0].detach())
    )
    model(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()
    hook.remove()
    assert not captured[0][0].any() and captured[0][1:].any()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_a_mask_of_four_dimensions_is_not_turned_round(kind):
    """Boolean for every backend; whole numbers for the eager one."""
    model = tiny_model()
    inputs = {"input_ids": ids([4]), "decoder_input_ids": ids([3])}
    model.set_attn_implementation("eager")
    expected = logits(model, **inputs)
    causal = torch.ones(1, 1, 3, 3).tril()
    assert worst(logits(model, **inputs, decoder_attention_mask=causal.to(kind)), expected) < 1e-6
    if kind == torch.bool:
        model.set_attn_implementation("sdpa")
        assert worst(logits(model, **inputs, decoder_attention_mask=causal.to(kind)), expected) < 1e-5


# Caches


def dynamic(model):
    return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))


def static(model):
    return EncoderDecoderCache(
        StaticCache(config=model.config, max_cache_len=16), StaticCache(config=model.config, max_cache_len=7)
    )


@pytest.mark.parametrize("make_cache", [dynamic, static])
@pytest.mark.parametrize("pieces", [[6], [1] * 6, [2, 3, 1], [1, 5]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cached_equals_uncached(model, make_cache, pieces, backend):
    """Whole, step by step and in chunks; right-padded source, left-padded prompt."""
    model.set_attn_implementation(backend)
    inputs = batch(SOURCE, [6, 6, 6])
    inputs["decoder_attention_mask"][1, :2] = 0
    whole = logits(model, **inputs)
    cache, start, outputs = make_cache(model), 0, []
    with torch.no_grad():
        encoder_outputs = model.model.encoder(inputs["input_ids"], inputs["attention_mask"])
        for piece in pieces:
            end = start + piece
            output = model(
                encoder_outputs=encoder_outputs,
                attention_mask=inputs["attention_mask"],
                decoder_input_ids=inputs["decoder_input_ids"][:, start:end],
                decoder_attention_mask=inputs["decoder_attention_mask"][:, :end],
                cache=cache,
                use_cache=True,
            )
            assert output.cache is cache
            outputs.append(output.logits)
            start = end
    real = inputs["decoder_attention_mask"].bool()
    assert worst(torch.cat(outputs, dim=1)[real], whole[real]) < 1e-5
    assert cache.get_seq_length() == 6


def test_the_source_is_projected_once_a_generation():
    model = tiny_model()
    calls = []
    model.model.decoder.layers[0].encoder_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))
    model.generate(ids([5]), max_new_tokens=6, min_new_tokens=6)
    assert len(calls) == 1


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=str)
def test_two_generations_in_a_row_with_other_sources(how):
    model, settings = tiny_model(), {"max_new_tokens": 8, "no_repeat_ngram_size": 2}
    first, second = ids([6, 4], seed=1), ids([6, 4], seed=2)
    mask = lengths_mask([6, 4])
    expected = [tiny_model().generate(source, attention_mask=mask, **settings) for source in (first, second)]
    for source, right in zip((first, second, first), (*expected, expected[0]), strict=True):
        assert torch.equal(model.generate(source, attention_mask=mask, **settings, **how), right)
    assert not torch.equal(*expected)


def test_the_old_name_of_the_cache_still_works():
    model = tiny_model()
    cache = dynamic(model)
    with pytest.warns(FutureWarning, match="past_key_values"):
        output = model(input_ids=ids([4]), decoder_input_ids=ids([3]), past_key_values=cache, use_cache=True)
    assert output.cache is cache and cache.get_seq_length() == 3


# Backends


def gradients(model, inputs):
    model.zero_grad()
    model(
        **inputs, labels=inputs["decoder_input_ids"].masked_fill(inputs["decoder_attention_mask"] == 0, -100)
    ).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_eager_equals_sdpa(model):
    inputs = batch(SOURCE, TARGET)
    outputs, grads = [], []
    for backend in BACKENDS:
        model.set_attn_implementation(backend)
        outputs.append(logits(model, **inputs))
        grads.append(gradients(model, inputs))
    assert worst(*outputs) < 1e-5
    assert max(worst(grads[0][name], grads[1][name]) for name in grads[0]) < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(model, reentrant):
    inputs = batch(SOURCE, TARGET)
    model.train()
    expected = gradients(model, inputs)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    model.model.decoder.layers[0].fc1.register_forward_hook(lambda *_: calls.append(1))
    got = gradients(model, inputs)
    assert len(calls) == 2  # it did run twice
    assert max(worst(expected[name], got[name]) for name in expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_is_finite_and_near(model, dtype, backend):
    model.set_attn_implementation(backend)
    inputs = batch(SOURCE, TARGET)
    exact = logits(model, **inputs)
    model.train()
    with torch.autocast("cpu", dtype=dtype):
        loss = model(**inputs, labels=inputs["decoder_input_ids"], num_items_in_batch=14).loss
        rough = logits(model, **inputs)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert worst(rough, exact) < 0.2


# Other ways in


def test_embeddings_in_place_of_ids(model):
    inputs = batch(SOURCE, TARGET)
    expected = logits(model, **inputs)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    inputs["decoder_inputs_embeds"] = model.model.decoder.embed_tokens(inputs.pop("decoder_input_ids"))
    assert torch.equal(logits(model, **inputs), expected)
    settings = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 5}
    generated = model.generate(inputs_embeds=inputs["inputs_embeds"], **settings)
    assert torch.equal(generated, model.generate(batch(SOURCE, TARGET)["input_ids"], **settings))


def test_encoder_outputs_in_place_of_a_source(model):
    inputs = batch(SOURCE, TARGET)
    expected = logits(model, **inputs)
    generated = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], num_beams=3, max_new_tokens=5
    )
    with torch.no_grad():
        encoded = model.get_encoder()(inputs.pop("input_ids"), inputs["attention_mask"])
    for outputs in (encoded, (encoded.last_hidden_state,), encoded.to_tuple()):
        assert torch.equal(logits(model, **inputs, encoder_outputs=outputs), expected)
    again = model.generate(
        encoder_outputs=encoded, attention_mask=inputs["attention_mask"], num_beams=3, max_new_tokens=5
    )
    assert torch.equal(again, generated)


@pytest.mark.parametrize("given", [(), ("input_ids", "inputs_embeds")])
def test_ids_or_embeddings(given):
    model = tiny_model()
    source = {"input_ids": ids([4]), "inputs_embeds": torch.zeros(1, 4, 24)}
    with pytest.raises(ValueError, match="both was given" if given else "neither was given"):
        model(**{name: source[name] for name in given}, decoder_input_ids=ids([3]))


def test_a_source_without_a_target_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"decoder_input_ids.*labels.*collator"):
        tiny_model()(input_ids=ids([4]))


def test_tuples_on_demand():
    model, inputs = tiny_model(), batch()
    as_dict = model(**inputs, output_hidden_states=True)
    as_tuple = model(**inputs, output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], as_dict.logits)
    assert len(as_dict.decoder_hidden_states) == 4 and len(as_dict.encoder_hidden_states) == 3


@pytest.mark.parametrize("sizes", [([1], [1]), ([1, 1], [3, 1]), ([33, 1], [1, 20])], ids=str)
def test_smallest_and_lopsided_batches(model, sizes):
    output = logits(model, **batch(*sizes)) if model.config.position_embedding_type == "sinusoidal" else None
    assert output is None or output.isfinite().all()
