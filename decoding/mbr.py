"""Minimum Bayes risk: of many samples, the one that agrees best with all of them (Eikema and Aziz, 2020).

    y* = argmax over h of  1/N · sum over samples y of u(h, y)         u = sentence-level chrF of sacreBLEU

The samples stand for the model's distribution, so a translation that many others resemble wins over a likely oddity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

Utility = Callable[[str, str], float]
"""(hypothesis, sample taken as the truth) -> how good it would be"""


def sentence_chrf() -> Utility:
    """chrF2 of one sentence, from 0 to 100."""
    from sacrebleu.metrics import CHRF

    metric = CHRF()
    return lambda hypothesis, reference: metric.sentence_score(hypothesis, [reference]).score


def expected_utilities(samples: Sequence[str], utility: Utility | None = None) -> dict[str, float]:
    """Each distinct sample's mean utility over all samples, in the order of first appearance."""
    utility = utility or sentence_chrf()
    counts = Counter(samples)
    total = sum(counts.values())
    return {
        hypothesis: sum(utility(hypothesis, sample) * count for sample, count in counts.items()) / total
        for hypothesis in counts
    }


def least_risk(samples: Sequence[str]) -> int:
    """Index of the first sample with the text that `minimum_bayes_risk` chooses."""
    return list(samples).index(minimum_bayes_risk(samples))


def minimum_bayes_risk(samples: Sequence[str], utility: Utility | None = None) -> str:
    """The sample of the highest expected utility; of equals, the first."""
    utilities = expected_utilities(samples, utility)
    return max(utilities, key=utilities.get)
