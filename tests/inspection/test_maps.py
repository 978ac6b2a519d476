"""ATT-SHAPE and its kind: every map there, of the chosen output, without padding, and the model as it was before."""

from __future__ import annotations

import pytest
import torch

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.inspection.attend import attend
from metaphrase.inspection.maps import attention_maps, decode_outputs, encode_sources
from metaphrase.inspection.modules import attention_modules

SOURCE = "The animal didn't cross the street because it was too tired ."
TARGET = "Das Tier überquerte die Straße nicht , weil es zu müde war ."


def batch() -> dict[str, torch.Tensor]:
    """Row 2 is padded from 3 tokens to 5."""
    return {
        "input_ids": torch.tensor([[4, 5, 6, 7, 2], [8, 9, 2, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    }


def test_shapes_rows_and_padding(model):
    first, second = attention_maps(model, batch(), [[10, 11, 12, 2], [13, 2]])
    assert first.encoder.shape == (2, 2, 5, 5)
    assert first.decoder.shape == (2, 2, 4, 4)
    assert first.cross.shape == (2, 2, 4, 5)
    assert second.encoder.shape == (2, 2, 3, 3)
    assert second.decoder.shape == (2, 2, 2, 2)
    assert second.cross.shape == (2, 2, 2, 3)
    for maps in (first, second):
        for weights in (maps.encoder, maps.decoder, maps.cross):
            assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5)
        assert maps.decoder.triu(1).abs().max() == 0
        assert len(maps.read_ids) == len(maps.written_ids) == maps.cross.shape[2]
    assert second.source_ids == [8, 9, 2]
    assert second.read_ids == [model.config.decoder_start_token_id, 13]


def test_a_padded_row_equals_the_sentence_alone(model):
    together = attention_maps(model, batch(), [[10, 11, 12, 2], [13, 2]])[1]
    inputs = {name: tensor[1:, :3] for name, tensor in batch().items()}
    alone = attention_maps(model, inputs, [[13, 2]])[0]
    for kind in ("encoder", "decoder", "cross"):
        assert torch.allclose(together.of(kind), alone.of(kind), atol=1e-5)


def test_maps_differ_between_heads_layers_and_outputs(model):
    """Else the other tests would pass with one map repeated."""
    one = attention_maps(model, batch(), [[10, 11, 12, 2], [13, 2]])[0]
    other = attention_maps(model, batch(), [[20, 21, 22, 2], [13, 2]])[0]
    assert (one.encoder[0, 0] - one.encoder[0, 1]).abs().max() > 1e-3
    assert (one.encoder[0, 0] - one.encoder[1, 0]).abs().max() > 1e-3
    assert (one.cross - other.cross)[:, :, 1:].abs().max() > 1e-4
    assert torch.allclose(one.encoder, other.encoder, atol=1e-6)


def test_weights_are_those_the_eager_model_gives(model):
    reference = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict()).eval()
    reference.set_attn_implementation("eager")
    start = model.config.decoder_start_token_id
    with torch.no_grad():
        wanted = reference(
            **batch(), decoder_input_ids=torch.tensor([[start, 10, 11, 12]] * 2), output_attentions=True
        ).cross_attentions
    maps = attention_maps(model, batch(), [[10, 11, 12, 2]] * 2)[0]
    assert torch.allclose(maps.cross, torch.stack(wanted, 1)[0], atol=1e-5)


def test_the_model_is_left_as_it_was(model):
    before = model.config._attn_implementation
    stacks = [model.get_encoder().config, model.get_decoder().config]
    kernels = [config._attn_implementation for config in stacks]
    assert before == "sdpa"
    model.train()
    try:
        attention_maps(model, batch(), [[10, 2], [13, 2]])
        assert model.training and model.get_encoder().training
        assert model.config._attn_implementation == before
        assert [config._attn_implementation for config in stacks] == kernels
        with pytest.raises(MetaphraseError, match="no tokens"):
            attention_maps(model, batch(), [[10, 2], []])
        assert model.config._attn_implementation == before
    finally:
        model.eval()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_maps_belong_to_the_chosen_hypothesis(model, word_tokenizer, num_beams):
    """Rows are the output's tokens, columns the source's, whatever beams were tried; the teacher-forced pass would
    choose the same tokens again where decoding was greedy."""
    attention = attend(model, word_tokenizer, SOURCE, num_beams=num_beams)
    written = attention.maps.written_ids
    inputs = encode_sources(word_tokenizer, [SOURCE], torch.device("cpu"))
    with torch.no_grad():
        generated = model.generate(**inputs, num_beams=num_beams, do_sample=False)[0].tolist()
    assert generated[1 : 1 + len(written)] == written
    assert attention.maps.cross.shape[2:] == (len(written), inputs["input_ids"].shape[1])
    assert (len(attention.written), len(attention.source)) == attention.maps.cross.shape[2:]
    if num_beams == 1:
        with torch.no_grad():
            logits = model(**inputs, decoder_input_ids=torch.tensor([attention.maps.read_ids])).logits[0]
        assert logits.argmax(-1).tolist() == written


def test_any_way_of_decoding_will_do(ours, word_tokenizer):
    def decode(model, inputs):
        return torch.tensor([[1, 7, 8, 2, 0, 0]])

    attention = attend(ours, word_tokenizer, SOURCE, decode=decode)
    assert attention.maps.written_ids == [7, 8, 2]
    assert attention.maps.read_ids == [1, 7, 8]


def test_a_given_target_is_looked_at(ours, word_tokenizer):
    attention = attend(ours, word_tokenizer, SOURCE, target=TARGET)
    assert attention.written.text == TARGET
    assert [piece.text.strip() for piece in attention.written.pieces] == [*TARGET.split(), "</s>"]
    assert attention.read.pieces[0].special and attention.read.text == TARGET


def test_half_precision_rows_sum_to_one(ours, word_tokenizer):
    import copy

    half = copy.deepcopy(ours).to(torch.bfloat16)
    maps = attention_maps(half, batch(), [[10, 11, 2], [13, 2]])[0]
    assert maps.cross.dtype == torch.float32
    assert torch.allclose(maps.cross.sum(-1), torch.ones(2, 2, 3), atol=1e-5)


def test_left_padding(ours):
    right = attention_maps(ours, batch(), [[10, 2], [13, 2]])[1]
    left = {
        "input_ids": torch.tensor([[4, 5, 6, 7, 2], [0, 0, 8, 9, 2]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
    }
    assert torch.allclose(attention_maps(ours, left, [[10, 2], [13, 2]])[1].cross, right.cross, atol=1e-5)


def test_mistakes_are_told(ours, word_tokenizer):
    with pytest.raises(MetaphraseError, match="blank"):
        attend(ours, word_tokenizer, "  ")
    with pytest.raises(MetaphraseError, match="encoder-decoder"):
        attend(torch.nn.Linear(2, 2), word_tokenizer, SOURCE)
    with pytest.raises(MetaphraseError, match="encoder-decoder"):
        attention_modules(torch.nn.Linear(2, 2))


def test_outputs_end_at_the_end_token(model):
    for output in decode_outputs(model, batch(), num_beams=2):
        assert 2 not in output[:-1]
        assert 1 <= len(output) <= 12


def test_without_a_limit_an_output_is_at_most_fifty_longer_than_its_own_source(ours):
    """Section 6.1 of the paper, and whatever else is in the batch."""
    from copy import deepcopy

    endless = deepcopy(ours)
    endless.generation_config.max_new_tokens = None
    lengths = [len(output) for output in decode_outputs(endless, batch(), num_beams=1)]
    assert lengths == [55, 53]
