"""BLEU as sacreBLEU counts it: Papineni et al. 2002 with Post 2018's reference tokenisation, on raw references."""

from __future__ import annotations

import datasets
import evaluate
import sacrebleu

_CITATION = """@inproceedings{post-2018-call, title = "A Call for Clarity in Reporting {BLEU} Scores",
author = "Post, Matt", booktitle = "Proceedings of WMT", year = "2018"}"""

_DESCRIPTION = """Corpus BLEU (0 to 100, higher is better), cased and detokenised: hypotheses and references are plain
text, tokenised by sacreBLEU alone. The signature states all that a score depends on."""

_INPUTS = """
Args:
    predictions (list of str): one hypothesis a line.
    references (list of str, or list of lists of str): one or several references a line; lines may have different
        numbers of them.
    tokenize (str): a tokenizer of sacreBLEU, `13a` if unset.
    lowercase (bool): compare without case.

Returns:
    `score`, `signature`, `precisions` (four), `brevity_penalty`, `hypothesis_length`, `reference_length`.
"""


class SacreBLEU(evaluate.Metric):
    """Corpus BLEU with its signature."""

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

    def _compute(self, predictions, references, tokenize: str | None = None, lowercase: bool = False) -> dict:
        references = [[line] if isinstance(line, str) else list(line) for line in references]
        width = max(map(len, references))
        streams = [[line[i] if i < len(line) else None for line in references] for i in range(width)]
        metric = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase)
        result = metric.corpus_score(list(predictions), streams)
        return {
            "score": result.score,
            "signature": str(metric.get_signature()),
            "precisions": list(result.precisions),
            "brevity_penalty": result.bp,
            "hypothesis_length": result.sys_len,
            "reference_length": result.ref_len,
        }
