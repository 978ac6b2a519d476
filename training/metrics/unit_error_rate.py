"""Edit distance over units that white space separates: phoneme error rate for pronunciations, and for sentences
the word error rate of speech recognition.

    100 · sum of edits / sum of reference units

where an edit is an insertion, a deletion or a substitution (Levenshtein 1966), and each line is held against that
one of its references to which its rate is lowest.
"""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import evaluate

_DESCRIPTION = """Edits per reference unit, per cent (lower is better; above 100 where more is inserted than the
reference holds). Units are what white space separates; of several references the best one counts."""

_INPUTS = """
Args:
    predictions (list of str): one hypothesis a line.
    references (list of str, or list of lists of str): one or several references a line.

Returns:
    `score` (per cent), `signature`, `edits` and `units` (counts).
"""


class UnitErrorRate(evaluate.Metric):
    """Edits per reference unit, against the best reference of each line."""

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
        edits = units = 0
        for prediction, alternatives in zip(predictions, references, strict=True):
            hypothesis = prediction.split()
            candidates = [
                (edit_distance(hypothesis, alternative.split()), len(alternative.split()))
                for alternative in alternatives
            ]
            best = min(candidates, key=lambda pair: (pair[0] / max(1, pair[1]), pair[0]))
            edits, units = edits + best[0], units + best[1]
        return {
            "score": 100 * edits / max(1, units),
            "signature": f"uer|unit:whitespace|refs:{most}|match:best|case:mixed|version:1",
            "edits": edits,
            "units": units,
        }


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Fewest insertions, deletions and substitutions that turn one sequence into the other."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]
