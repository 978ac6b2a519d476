"""Length and coverage penalties, prefixes, samples, ensembles, n-best lists, minimum Bayes risk."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.custom import fast_search
from metaphrase.decoding.mbr import expected_utilities, minimum_bayes_risk
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.sampling import uniform_streams
from metaphrase.decoding.scoring import coverage_penalty, length_divisor
from metaphrase.decoding.translate import translate, translate_n_best

from .conftest import make_model, make_sources


def log_probability(model, source: list[int], target: list[int]) -> tuple[float, torch.Tensor]:
    """The model's own log P(target | source), and the last layer's attention over the source, [T, S]."""
    inputs = torch.tensor([[1, *target[:-1]]])
    model.set_attn_implementation("eager")
    out = model(input_ids=torch.tensor([source]), decoder_input_ids=inputs, output_attentions=True)
    model.set_attn_implementation("sdpa")
    steps = out.logits[0].log_softmax(-1)[torch.arange(len(target)), torch.tensor(target)]
    return float(steps.sum()), out.cross_attentions[-1][0].mean(0)


def ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()] + [2]


def test_length_divisors():
    gnmt = SearchOptions(length_norm="gnmt", length_penalty=0.6)
    assert length_divisor(7, gnmt) == pytest.approx((5 + 7) ** 0.6 / (5 + 1) ** 0.6)
    assert length_divisor(1, gnmt) == 1.0
    assert length_divisor(7, SearchOptions(length_penalty=0.6)) == pytest.approx(7**0.6)


def test_coverage_by_hand():
    attention = torch.tensor([[[0.5, 1.7, 0.25]]])
    mask = torch.tensor([[1, 1, 0]])
    assert coverage_penalty(attention, mask, 0.2).item() == pytest.approx(0.2 * math.log(0.5))


@pytest.mark.parametrize(
    "options", [{}, {"length_norm": "gnmt", "length_penalty": 0.8}, {"coverage_penalty": 0.4}], ids=str
)
@torch.no_grad()
def test_scores_are_equation_14_of_the_models_own_forward(tokenizer, texts, options):
    model = make_model(0)
    search = SearchOptions(num_beams=4, num_return=3, **options)
    for text, found in zip(texts[:4], translate_n_best(model, tokenizer, texts[:4], options=search), strict=True):
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        assert len({one.text for one in found}) == 3
        for one in found:
            target = ids_of(one.text)[: len(ids_of(text)) + 50]  # without </s> where it came to the limit
            log_p, attention = log_probability(model, ids_of(text), target)
            covered = attention.sum(0).clamp(max=1.0).log().sum() * search.coverage_penalty
            assert one.score == pytest.approx(log_p / length_divisor(len(target), search) + float(covered), abs=1e-4)


def test_penalties_change_what_is_found(model, tokenizer, texts):
    plain = translate(model, tokenizer, texts)
    assert translate(model, tokenizer, texts, coverage_penalty=50.0) != plain
    assert translate(model, tokenizer, texts, length_norm="gnmt", length_penalty=-8.0) != plain


def test_generate_takes_the_same_options(model):
    ids, mask = make_sources(8)
    settings = {"input_ids": ids, "attention_mask": mask, "num_beams": 4, "custom_generate": fast_search}
    plain = model.generate(**settings)
    assert not torch.equal(plain, model.generate(**settings, coverage_penalty=50.0))
    alike = model.generate(**settings, ensemble=[model, model])
    assert torch.equal(plain, alike)


def test_prefixes(model, tokenizer, texts):
    prefixes = ["w9 w8", "", "w7", *[""] * (len(texts) - 3)]
    for num_beams in (1, 3):
        free = translate(model, tokenizer, texts, num_beams=num_beams)
        found = translate(model, tokenizer, texts, num_beams=num_beams, prefixes=prefixes)
        assert found[0].startswith("w9 w8") and found[2].startswith("w7")
        assert [found[1], *found[3:]] == [free[1], *free[3:]]
        slow = translate(model, tokenizer, texts, num_beams=num_beams, prefixes=prefixes, engine="generate")
        assert found == slow
    with pytest.raises(MetaphraseError, match="12 texts and 1 prefixes"):
        translate(model, tokenizer, texts, prefixes=["w9"])


@pytest.mark.parametrize(
    "options", [{}, {"no_repeat_ngram_size": 1}, {"min_length": 8}, {"early_stopping": True}], ids=str
)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_engines_agree(model, tokenizer, texts, num_beams, options):
    settings = {"num_beams": num_beams, **options}
    assert translate(model, tokenizer, texts, **settings) == translate(
        model, tokenizer, texts, engine="generate", **settings
    )


def test_settings_of_the_models_own_generation_config_count(model, tokenizer, texts):
    plain = translate(model, tokenizer, texts, num_beams=2)
    model.generation_config.forced_bos_token_id = 9
    try:
        found = translate(model, tokenizer, texts, num_beams=2)
    finally:
        model.generation_config.forced_bos_token_id = None
    assert all(text.startswith("w9") for text in found) and found != plain


def test_min_length_counts_each_outputs_own_tokens(model, tokenizer, texts):
    found = translate(model, tokenizer, texts, num_beams=1, min_length=9, prefixes=["w9", *[""] * (len(texts) - 1)])
    assert min(len(text.split()) for text in found) >= 9 and len(found[0].split()) >= 10


def test_samples_depend_on_seed_and_source_alone(model, tokenizer, texts):
    options = SearchOptions(num_beams=1, sample=True, num_return=3, seed=5, temperature=1.5)
    together = translate_n_best(model, tokenizer, texts, options=options)
    for batch_tokens in (1, 30):
        assert translate_n_best(model, tokenizer, texts, options=options, batch_tokens=batch_tokens) == together
    assert translate_n_best(model, tokenizer, texts[3:4], options=options)[0] == together[3]
    assert len({one.text for found in together for one in found}) > len(texts)
    other = SearchOptions(num_beams=1, sample=True, num_return=3, seed=6, temperature=1.5)
    assert translate_n_best(model, tokenizer, texts, options=other) != together


def test_without_a_seed_torch_gives_one(model, tokenizer, texts):
    settings = {"num_beams": 1, "sample": True, "temperature": 2.0}
    torch.manual_seed(1)
    first = [translate(model, tokenizer, texts, **settings) for _ in range(2)]
    torch.manual_seed(1)
    assert [translate(model, tokenizer, texts, **settings) for _ in range(2)] == first
    assert first[0] != first[1]


def test_samples_follow_the_models_distribution(model):
    """600 first tokens of one source against the softmax: no probability is off by five standard deviations."""
    ids, mask = make_sources(1, seed=3)
    settings = {"do_sample": True, "temperature": 2.0, "top_k": 0, "max_new_tokens": 1, "num_return_sequences": 600}
    drawn = model.generate(input_ids=ids, attention_mask=mask, custom_generate=fast_search, seed=1, **settings)[:, 1]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=torch.tensor([[1]])).logits[0, 0]
    wanted = (logits / 2.0).softmax(-1)
    shares = torch.bincount(drawn, minlength=len(wanted)) / 600
    assert ((shares - wanted).abs() < 5 * (wanted * (1 - wanted) / 600).sqrt() + 2 / 600).all()
    assert (shares > 0).sum() > 5


def test_top_k_and_top_p_narrow_the_choice(model, tokenizer, texts):
    greedy = translate(model, tokenizer, texts, num_beams=1)
    settings = {"num_beams": 1, "sample": True, "temperature": 3.0, "seed": 0}
    assert translate(model, tokenizer, texts, top_k=1, **settings) == greedy
    assert translate(model, tokenizer, texts, top_p=1e-6, **settings) == greedy
    assert translate(model, tokenizer, texts, **settings) != greedy


def test_streams_are_uniform_and_each_its_own():
    streams = uniform_streams([[4, 2], [5, 2]], samples=2, length=500, seed=1)
    assert streams.shape == (4, 500) and len({tuple(row) for row in streams.tolist()}) == 4
    assert ((streams >= 0) & (streams < 1)).all() and abs(float(streams.mean()) - 0.5) < 0.03
    assert torch.equal(streams[2:], uniform_streams([[5, 2]], samples=2, length=500, seed=1))


@torch.no_grad()
def test_an_ensemble_averages_probabilities(tokenizer, texts):
    first, second = (
        make_model(0),
        make_model(0, normalize_before=True, activation_function="gelu", decoder_attention_heads=2),
    )
    found = translate_n_best([first, second], tokenizer, texts[:4], options=SearchOptions(num_beams=3))
    for text, outputs in zip(texts[:4], found, strict=True):
        source, target = torch.tensor([ids_of(text)]), ids_of(outputs[0].text)
        inputs = torch.tensor([[1, *target[:-1]]])
        probabilities = sum(
            member(input_ids=source, decoder_input_ids=inputs).logits[0].softmax(-1) for member in (first, second)
        )
        log_p = (probabilities / 2).log()[torch.arange(len(target)), torch.tensor(target)].sum()
        assert outputs[0].score == pytest.approx(float(log_p) / len(target), abs=1e-4)
    assert translate([first, second], tokenizer, texts) != translate(first, tokenizer, texts)


def test_an_ensemble_must_share_its_vocabulary(tokenizer, texts):
    from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
    from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

    other = MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset("tiny", vocab_size=60)).eval()
    with pytest.raises(MetaphraseError, match=r"\[40, 60\]"):
        translate([make_model(0), other], tokenizer, texts)


def test_minimum_bayes_risk_prefers_what_others_resemble():
    samples = ["the cat sat", "the cat sits", "a dog", "the cat sat down"]
    utilities = expected_utilities(samples)
    assert minimum_bayes_risk(samples) == max(utilities, key=utilities.get) != "a dog"
    assert utilities["a dog"] == min(utilities.values())
    assert minimum_bayes_risk(["b", "a", "a"], lambda h, r: float(h == r)) == "a"


def test_mbr_inside_generate(tokenizer):
    """Of the samples that the same call without it gives, the one of least risk: by text, so `</s>` makes no other."""
    model, (ids, mask) = make_model(3), make_sources(4)
    settings = {
        "input_ids": ids, "attention_mask": mask, "do_sample": True, "num_beams": 1, "num_return_sequences": 12,
        "custom_generate": fast_search, "seed": 5,
    }  # fmt: skip
    samples = model.generate(**settings)
    chosen = model.generate(**settings, mbr=tokenizer)
    assert samples.shape[0] == 48 and chosen.shape[0] == 4
    for row, of_row in zip(chosen, samples.split(12), strict=True):
        texts = tokenizer.batch_decode(of_row, skip_special_tokens=True)
        assert len(set(texts)) > 3
        assert tokenizer.decode(row, skip_special_tokens=True) == minimum_bayes_risk(texts)
    given = model.generate(**settings, mbr=tokenizer, return_dict_in_generate=True)
    assert torch.equal(given.sequences, chosen)
    with pytest.raises(MetaphraseError, match="mbr is True; inside generate it must be the tokenizer"):
        model.generate(**settings, mbr=True)
    with pytest.raises(MetaphraseError, match="num_return_sequences is 1; ask for 16 samples"):
        model.generate(**{**settings, "num_return_sequences": 1}, mbr=tokenizer)


def test_mbr_in_translate(model, tokenizer, texts):
    settings = {"num_beams": 1, "sample": True, "num_return": 6, "seed": 1}
    found = translate(model, tokenizer, ["", *texts[:3]], mbr=True, **settings)
    samples = translate_n_best(model, tokenizer, texts[:3], options=SearchOptions(**settings))
    assert found == ["", *(minimum_bayes_risk([one.text for one in one_text]) for one_text in samples)]
    with pytest.raises(MetaphraseError, match="num_return is 1"):
        translate(model, tokenizer, texts, mbr=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beam": 3}, "did you mean 'num_beams'"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_beams": 2, "num_return": 3}, "num_return is 3"),
        ({"sample": True}, "num_beams is 5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"engine": "warp"}, "engine is 'warp'"),
        ({"max_length": 3, "min_length": 4}, "min_length 4"),
        ({"engine": "generate", "coverage_penalty": 1.0}, "coverage_penalty"),
        ({"length_norm": "marian"}, "length_norm is 'marian'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(model, tokenizer, texts, options, words):
    with pytest.raises(MetaphraseError, match=words):
        translate(model, tokenizer, texts, **options)


def test_learned_positions_bound_texts_and_outputs(tokenizer):
    learned = {"position_embedding_type": "learned", "max_position_embeddings": 64}
    shape = {
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "qk_head_dim": 8,
        "v_head_dim": 12,
    }
    model = make_model(0, **learned, **shape, scale_embedding=False)
    with pytest.raises(MetaphraseError, match=r"text 2 is 71 tokens long.*end at 64"):
        translate(model, tokenizer, ["w5", "w6 " * 70])
    with pytest.raises(MetaphraseError, match="max_length is 65"):
        translate(model, tokenizer, ["w5"], max_length=65)


def test_a_model_of_another_kind(tokenizer):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    marian = MarianMTModel(MarianConfig(vocab_size=40, max_position_embeddings=99, **sizes, **heads, **special)).eval()
    with pytest.raises(MetaphraseError, match="marian"):
        translate(marian, tokenizer, ["w5"])
    assert len(translate(marian, tokenizer, ["w5 w6", ""], engine="generate", max_length=5)) == 2
