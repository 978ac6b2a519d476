"""Scores: every line once, without smoothing, weighted by tokens, the same however the work is shared."""

from __future__ import annotations

import math
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.errors import MetaphraseError
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import evaluate, states
from metaphrase.training.data.corpus import EvaluationSet
from metaphrase.training.material import gather
from metaphrase.training.run import train


@pytest.fixture(scope="module")
def model() -> MetaphraseForConditionalGeneration:
    torch.manual_seed(0)
    config = MetaphraseConfig.from_preset(
        "base", vocab_size=330, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.3, init_std=0.3,
        label_smoothing=0.1,
    )  # fmt: skip
    return MetaphraseForConditionalGeneration(config).eval()


@pytest.fixture
def material(tiny_options):
    return gather(tiny_options())


def test_validation_loss_is_the_plain_mean_over_tokens(model, material):
    texts, tokenizer = material.validation, material.tokenizer
    batches = evaluate.loss_batches(texts, tokenizer, tokens=100)
    assert sorted(chain.from_iterable(batches.batches)) == list(range(len(texts)))
    widths = [len(b) * max(max(map(len, batches.pairs[i])) for i in b) for b in batches.batches]
    assert max(widths) <= 100 and len(batches.batches) > 2
    result = evaluate.validation_loss(model, batches, Accelerator(cpu=True))
    total = count = 0
    with torch.no_grad():
        for source, (target, *_) in zip(texts.sources, texts.references, strict=True):  # one line at a time
            labels = tokenizer(target, return_tensors="pt").input_ids
            logits = model(input_ids=tokenizer(source, return_tensors="pt").input_ids, labels=labels).logits
            total += torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
            count += labels.numel()
    assert result["tokens"] == count and result["loss"] == pytest.approx(total / count, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_the_loss_does_not_depend_on_the_number_of_processes(model, material, monkeypatch, processes):
    batches = evaluate.loss_batches(material.validation, material.tokenizer, tokens=100)
    accelerator = Accelerator(cpu=True)
    alone = evaluate.validation_loss(model, batches, accelerator)
    parts: list[torch.Tensor] = []

    def share(rank: int):
        def reduce(tensor):
            parts.append(tensor)
            return sum(parts) if len(parts) == processes else tensor

        return SimpleNamespace(
            process_index=rank, num_processes=processes, device=accelerator.device, autocast=accelerator.autocast,
            reduce=reduce,
        )  # fmt: skip

    results = [evaluate.validation_loss(model, batches, share(rank)) for rank in range(processes)]
    assert results[-1] == alone  # not merely close: the same batches, added in the same order


def test_a_line_longer_than_learned_positions_is_cut_and_counted(material):
    texts = EvaluationSet(["a b c", "abc " * 50], [["x"], ["y"]])
    batches = evaluate.loss_batches(texts, material.tokenizer, tokens=100, longest=12)
    assert batches.cut == 1 and max(len(side) for pair in batches.pairs for side in pair) == 12
    assert all(side[-1] == material.tokenizer.eos_token_id for pair in batches.pairs for side in pair)


def test_scores_hold_every_line_with_a_signature():
    scores = evaluate.score_texts(["a b c d e", ""], [["a b c d e"], ["x"]], ["sacrebleu", "chrf", "word_error_rate"])
    assert set(scores) == {"sacrebleu", "chrf", "word_error_rate"} and scores["word_error_rate"]["wrong"] == 1
    assert all(result["signature"] for result in scores.values())


@pytest.mark.parametrize(
    ("hypotheses", "references", "metrics", "message"),
    [
        (["a"], [["a"], ["b"]], ["chrf"], "1 hypotheses but 2 lines"),
        ([], [], ["chrf"], "nothing to score"),
        (["a"], [["a"]], ["bleurt"], "Unknown metric 'bleurt'; known are sacrebleu"),
    ],
)
def test_what_cannot_be_scored_is_told(hypotheses, references, metrics, message):
    with pytest.raises(MetaphraseError, match=message):
        evaluate.score_texts(hypotheses, references, metrics)


def test_average_is_the_mean_of_each_tensor(tmp_path):
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.safetensors")
        states.save_tensors(files[-1], {"w": torch.full((2,), float(number)), "b": torch.tensor([0.1 * number])})
    mean = evaluate.average(files)
    assert torch.equal(mean["w"], torch.ones(2)) and mean["b"].item() == pytest.approx(0.1)
    assert mean["w"].dtype == torch.float32


def test_a_saved_model_is_scored(tiny_options, corpus_folder):
    folder = train(tiny_options(max_updates=2), recipe_name="tiny")
    sources = (corpus_folder / "test.a").read_text().splitlines()
    references = [[line] for line in (corpus_folder / "test.b").read_text().splitlines()]
    result = evaluate.score(folder, sources, references, num_beams=2, metrics=["chrf"])
    assert result["lines"] == 11 and result["chrf"]["signature"]
    with pytest.raises(MetaphraseError, match="11 source lines but 10"):
        evaluate.score(folder, sources, references[:-1])
