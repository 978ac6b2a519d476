"""Health figures on maps whose figures are known, and a silenced head that is truly silent."""

from __future__ import annotations

import math

import pytest
import torch

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.inspection.attend import Attention
from metaphrase.inspection.health import divergence, entropy, measure, pruning_costs, summarize, table, without_head
from metaphrase.inspection.maps import AttentionMaps
from metaphrase.inspection.modules import attention_modules, projections
from metaphrase.inspection.words import Piece, Pieces

SOURCE = "The animal didn't cross the street because it was too tired ."


def known() -> Attention:
    """One layer with three encoder heads: the own place, everything alike, the end token."""
    source = Pieces((*(Piece(9, f" w{i}", False, i) for i in range(3)), Piece(2, "</s>", True, None)), "w0 w1 w2")
    encoder = torch.stack([torch.eye(4), torch.full((4, 4), 0.25), torch.eye(4)[[3, 3, 3, 3]]])[None]
    decoder = torch.full((4, 4), 1.0).tril()
    decoder = (decoder / decoder.sum(-1, keepdim=True))[None, None]
    maps = AttentionMaps(source.ids, source.ids, source.ids, encoder, decoder, encoder)
    return Attention("known", source, source, source, maps)


def test_known_figures():
    spread, diagonal, rest, agreement = (measure(known(), "encoder") / 4)[:, 0]
    assert spread.tolist() == pytest.approx([0, 1, 0], abs=1e-9)
    assert diagonal[0] == 1
    assert diagonal[2] == pytest.approx(1 - (1 + 2 / 3 + 1 / 3 + 0) / 4)
    assert rest.tolist() == pytest.approx([0.25, 0.25, 1])
    assert agreement[0] < 1 and agreement[0] == pytest.approx(agreement[2])


def test_a_causal_row_is_measured_against_what_it_may_see():
    """All alike over the visible is entropy 1; the first row sees one position only and has no spread."""
    assert measure(known(), "decoder")[0, 0, 0] == pytest.approx(3)


def test_divergence_ends():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert divergence(one, one) == 0
    assert divergence(one, other) == pytest.approx(math.log(2))
    assert entropy(torch.tensor([0.5, 0.5])) == pytest.approx(math.log(2))


def test_summary_of_a_model(model, word_tokenizer):
    heads = summarize(model, word_tokenizer, [SOURCE, "", "The animal was tired ."], batch_size=2)
    assert [(one.kind, one.layer, one.head) for one in heads] == [
        (kind, layer, head) for kind in ("encoder", "decoder", "cross") for layer in (0, 1) for head in (0, 1)
    ]
    for one in heads:
        for figure in (one.entropy, one.diagonality, one.rest, one.agreement, one.contribution):
            assert -1e-6 <= figure <= 1 + 1e-6
    for kind in ("encoder", "decoder", "cross"):
        for layer in (0, 1):
            assert sum(h.contribution for h in heads if (h.kind, h.layer) == (kind, layer)) == pytest.approx(1)
    lines = table(heads).splitlines()
    assert len(lines) == 13 and lines[1].split()[:3] == ["encoder", "1", "1"]


def test_batches_change_no_figure(ours, word_tokenizer):
    texts = [SOURCE, "The animal was tired .", "it was"]
    one, all_ = (summarize(ours, word_tokenizer, texts, batch_size=size) for size in (1, 3))
    for a, b in zip(one, all_, strict=True):
        assert a.contribution == pytest.approx(b.contribution, abs=1e-4)
        assert a.entropy == pytest.approx(b.entropy, abs=1e-4)


def test_a_dead_head_is_found(word_tokenizer, ours):
    import copy

    model = copy.deepcopy(ours)
    with torch.no_grad():
        projections(attention_modules(model)["cross"][1]).out.weight[:, 8:] *= 1e-3
    dead = [(h.kind, h.layer, h.head) for h in summarize(model, word_tokenizer, [SOURCE]) if h.dead]
    assert dead == [("cross", 1, 1)]
    assert "dead" in table(summarize(model, word_tokenizer, [SOURCE]))


def test_a_silenced_head_equals_zero_weights(model):
    import copy

    inputs = {
        "input_ids": torch.tensor([[4, 5, 6, 2]]),
        "attention_mask": torch.ones(1, 4, dtype=torch.long),
        "decoder_input_ids": torch.tensor([[1, 10, 11]]),
    }
    cut = copy.deepcopy(model)
    linear = projections(attention_modules(cut)["cross"][0]).out
    with torch.no_grad():
        linear.weight[:, : linear.in_features // 2] = 0
        wanted, before = cut(**inputs).logits, model(**inputs).logits
        with without_head(model, "cross", 0, 0):
            found = model(**inputs).logits
        after = model(**inputs).logits
    assert torch.allclose(found, wanted, atol=1e-5)
    assert (found - before).abs().max() > 1e-3
    assert torch.equal(before, after)


@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_what_a_pruned_head_costs(ours, word_tokenizer, engine):
    """The model's own outputs as references: the whole model scores 100, and no head can gain."""
    from metaphrase.decoding.translate import translate

    texts = [SOURCE, "The animal was tired ."]

    def run():
        return translate(ours, word_tokenizer, texts, num_beams=1, engine=engine)

    references = run()
    heads = [head for head in summarize(ours, word_tokenizer, texts) if head.kind == "cross"]
    seen = []
    whole, costed = pruning_costs(ours, run, references, heads, progress=seen.append)
    assert whole == pytest.approx(100)
    assert all(head.bleu_loss >= 0 for head in costed) and max(head.bleu_loss for head in costed) > 1
    assert seen == costed
    assert "BLEU" in table(costed)


def test_nothing_to_measure(ours, word_tokenizer):
    with pytest.raises(MetaphraseError, match="no sentence"):
        summarize(ours, word_tokenizer, ["", " "])
