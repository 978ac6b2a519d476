"""What a search is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from metaphrase.configuration.errors import MetaphraseError


@dataclass(frozen=True)
class SearchOptions:
    """How translations are looked for; the defaults are beam 5 and the library's length penalty.

    Raises:
        MetaphraseError: a value cannot be, or two of them do not go together.
    """

    num_beams: int = 5
    """Width of the beam search; 1 is greedy."""
    num_return: int = 1
    """Hypotheses a source: the n best of a beam search, or so many samples."""
    length_penalty: float = 1.0
    """Alpha: what a hypothesis' log-probability is divided by grows with its length to this power."""
    length_norm: Literal["length", "gnmt"] = "length"
    """Divide by |Y|^alpha, as the library does, or by ((5 + |Y|) / 6)^alpha, as Wu et al. (2016), equation 14."""
    coverage_penalty: float = 0.0
    """Beta of Wu et al. (2016), equation 14: how much a source token without attention costs."""
    early_stopping: bool | Literal["never"] = False
    """When a source is done. True: as soon as `num_beams` hypotheses are complete. False: when its best open beam, at
    its length, is no better than the worst of them. "never": when it could not become better at any length."""
    max_length: int | None = None
    """Longest output in tokens, `</s>` counted. None: the source's length + 50 (section 6.1)."""
    min_length: int = 0
    """Shortest output in tokens, `</s>` not counted."""
    no_repeat_ngram_size: int = 0
    """No run of so many tokens comes twice in an output; 0: any may."""
    sample: bool = False
    """Draw tokens at random in place of looking for the best."""
    temperature: float = 1.0
    """Scores are divided by it before a token is drawn."""
    top_k: int = 0
    """Draw from the k best tokens only; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities sum to p or more."""
    seed: int | None = None
    """Seed of the draws. The same seed and source give the same samples, whatever else is in the batch. None: taken
    from torch's generator."""

    def __post_init__(self) -> None:
        for name, least in (("num_beams", 1), ("num_return", 1), ("min_length", 0), ("no_repeat_ngram_size", 0)):
            self._check(name, getattr(self, name) >= least, f"{least} or more")
        self._check("max_length", self.max_length is None or self.max_length >= 1, "1 or more, or None")
        self._check("coverage_penalty", self.coverage_penalty >= 0, "0 or more")
        self._check("length_norm", self.length_norm in ("length", "gnmt"), "'length' or 'gnmt'")
        self._check("early_stopping", self.early_stopping in (True, False, "never"), "True, False or 'never'")
        self._check("temperature", self.temperature > 0, "above 0")
        self._check("top_k", self.top_k >= 0, "0 or more")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        if self.sample and self.num_beams > 1:
            raise MetaphraseError(
                f"num_beams is {self.num_beams} and sample is True; samples are drawn with num_beams 1"
            )
        if not self.sample and self.num_return > self.num_beams:
            raise MetaphraseError(
                f"num_return is {self.num_return}, and a search with num_beams {self.num_beams} finds no more than that"
            )
        if self.max_length is not None and self.min_length > self.max_length:
            raise MetaphraseError(f"min_length {self.min_length} is more than max_length {self.max_length}")

    def _check(self, name: str, right: bool, wanted: str) -> None:
        if not right:
            raise MetaphraseError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

    @property
    def rows_per_source(self) -> int:
        """Rows that a source takes in a batch."""
        return self.num_return if self.sample else self.num_beams
