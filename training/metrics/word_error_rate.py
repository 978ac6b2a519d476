"""Share of lines that are wrong, where a line is one word: pronunciation, spelling, transliteration.

This is the word error rate of grapheme-to-phoneme work: a word is right if the hypothesis equals ANY of its
references, unit for unit. (It is not the edit distance of speech recognition: that is `unit_error_rate`.)
"""

from __future__ import annotations

import datasets
import evaluate

_DESCRIPTION = """Lines that equal none of their references, per cent (lower is better). White space between units
counts as one separator."""

_INPUTS = """
Args:
    predictions (list of str): one hypothesis a line.
    references (list of str, or list of lists of str): one or several references a line.

Returns:
    `score` (per cent), `signature`, `wrong` and `lines` (counts).
"""


class WordErrorRate(evaluate.Metric):
    """Share of lines that equal none of their references."""

    def _info(self) -> evaluate.MetricInfo:
        string = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": string, "references": datasets.Sequence(string)}),
                datasets.Features({"predictions": string, "references": string}),
            ],
        )

    def _compute(self, predictions, references) -> dict:
        references = [[line] if isinstance(line, str) else list(line) for line in references]
        most = max(map(len, references))
        wrong = sum(
            prediction.split() not in [reference.split() for reference in alternatives]
            for prediction, alternatives in zip(predictions, references, strict=True)
        )
        return {
            "score": 100 * wrong / len(references),
            "signature": f"wer|unit:line|refs:{most}|match:any|case:mixed|version:1",
            "wrong": wrong,
            "lines": len(references),
        }
