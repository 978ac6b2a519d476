"""chrF, the character n-gram F-score of Popović 2015, as sacreBLEU counts it, on raw references."""

from __future__ import annotations

import datasets
import evaluate
import sacrebleu

_CITATION = """@inproceedings{popovic-2015-chrf, title = "chr{F}: character n-gram {F}-score for automatic {MT}
evaluation", author = "Popović, Maja", booktitle = "Proceedings of WMT", year = "2015"}"""

_DESCRIPTION = """Corpus chrF2 (0 to 100, higher is better) over character n-grams up to 6; `word_order=2` is chrF++."""

_INPUTS = """
Args:
    predictions (list of str): one hypothesis a line.
    references (list of str, or list of lists of str): one or several references a line.
    word_order (int): longest word n-gram, 0 if unset.

Returns:
    `score`, `signature`.
"""


class ChrF(evaluate.Metric):
    """Corpus chrF with its signature."""

    def _info(self) -> evaluate.MetricInfo:
        string = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": string, "references": datasets.Sequence(string)}),
                datasets.Features({"predictions": string, "references": string}),
            ],
            reference_urls=["https://github.com/mjpost/sacrebleu"],
        )

    def _compute(self, predictions, references, word_order: int = 0) -> dict:
        references = [[line] if isinstance(line, str) else list(line) for line in references]
        width = max(map(len, references))
        streams = [[line[i] if i < len(line) else None for line in references] for i in range(width)]
        metric = sacrebleu.CHRF(word_order=word_order)
        result = metric.corpus_score(list(predictions), streams)
        return {"score": result.score, "signature": str(metric.get_signature())}
