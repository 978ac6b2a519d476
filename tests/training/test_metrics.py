"""The metric modules: counted by hand, through the class and through `evaluate.load` of a local file."""

from pathlib import Path

import evaluate
import pytest
import sacrebleu

import metaphrase.training.metrics as metrics
from metaphrase.training.metrics.chrf import ChrF
from metaphrase.training.metrics.sacrebleu import SacreBLEU
from metaphrase.training.metrics.unit_error_rate import UnitErrorRate, edit_distance
from metaphrase.training.metrics.word_error_rate import WordErrorRate

FOLDER = Path(metrics.__file__).parent
HYPOTHESES = ["Der Hund läuft über die Wiese .", "Ein Mann ißt, was er mag."]
REFERENCES = ["Der Hund läuft über eine Wiese .", "Ein Mann isst, was er mag."]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path / "metrics")


def test_bleu_and_chrf_are_those_of_sacrebleu_with_signature():
    bleu = SacreBLEU(keep_in_memory=True).compute(predictions=HYPOTHESES, references=REFERENCES)
    assert bleu["score"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert bleu["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    chrf = ChrF(keep_in_memory=True).compute(predictions=HYPOTHESES, references=REFERENCES)
    assert chrf["score"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert chrf["signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|")


def test_lines_may_have_different_numbers_of_references():
    references = [[REFERENCES[0], HYPOTHESES[0]], [REFERENCES[1]]]
    bleu = SacreBLEU(keep_in_memory=True).compute(predictions=HYPOTHESES, references=references)
    expected = sacrebleu.BLEU().corpus_score(HYPOTHESES, [REFERENCES, [HYPOTHESES[0], None]]).score
    assert bleu["score"] == expected
    assert bleu["signature"].startswith("nrefs:var|")
    rate = WordErrorRate(keep_in_memory=True).compute(predictions=HYPOTHESES, references=references)
    assert (rate["score"], rate["wrong"], rate["lines"]) == (50.0, 1, 2)


def test_a_word_is_right_if_any_reference_matches():
    rate = WordErrorRate(keep_in_memory=True).compute(
        predictions=["T AH M EY T OW", "K AE T", ""],
        references=[["T AH M AA T OW", "T AH  M EY T OW"], ["K AE T S"], ["AH"]],
    )
    assert rate["wrong"] == 2 and rate["score"] == pytest.approx(200 / 3)


def test_unit_error_rate_counts_edits_against_the_best_reference():
    rate = UnitErrorRate(keep_in_memory=True).compute(
        predictions=["K AE T", "D AO G Z", ""],
        references=[["K AH T S", "K AE P"], ["D AO G"], ["AH B"]],
    )
    assert (rate["edits"], rate["units"]) == (1 + 1 + 2, 3 + 3 + 2)
    assert rate["score"] == 50.0


@pytest.mark.parametrize(
    ("first", "second", "edits"),
    [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_edit_distance(first, second, edits):
    assert edit_distance(first, second) == edit_distance(second, first) == edits


def test_each_loads_as_a_local_evaluate_module(tmp_path, monkeypatch):
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", tmp_path / "modules")
    for name in ("sacrebleu", "chrf", "word_error_rate", "unit_error_rate"):
        metric = evaluate.load(str(FOLDER / f"{name}.py"), keep_in_memory=True)
        result = metric.compute(predictions=HYPOTHESES, references=HYPOTHESES)
        assert result["score"] == pytest.approx(0.0 if name.endswith("rate") else 100.0)
        assert result["signature"]
