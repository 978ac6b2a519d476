"""What a run learns from and is scored on: a corpus on disk or a streamed one, and the tokenizer that goes with it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import RunOptions
from metaphrase.training.data.bpe_dropout import BpeDropout, DroppedCorpus
from metaphrase.training.data.cache import cache_folder
from metaphrase.training.data.corpus import Corpus, EvaluationSet, read_corpus, read_evaluation
from metaphrase.training.data.encoding import EncodedCorpus, encode_corpus, tokenizer_identity
from metaphrase.training.data.locate import is_there
from metaphrase.training.data.report import CorpusReport
from metaphrase.training.data.stream_mixture import StreamedMixture, open_stream
from metaphrase.training.data.streaming import StreamedCorpus
from metaphrase.training.data.tokenizer import prepare_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass
class Material:
    """`windows(epoch, number)` gives the pairs of an epoch, piece by piece; None after the last piece.

    A corpus on disk is one window. A window has `source_lengths`, `target_lengths` and `window[indices]`.
    """

    tokenizer: PreTrainedTokenizerFast
    windows: Callable[[int, int], Any]
    pairs: int | None
    """Training pairs; None where they are only known once they were read."""
    validation: EvaluationSet | None
    options: RunOptions
    source: Corpus | StreamedCorpus | StreamedMixture
    encoded: EncodedCorpus | None = None
    has_test: bool = True
    """False where the data hold no split under the test split's default name, so that nothing is scored at the end."""

    def __post_init__(self) -> None:
        """`identity` changes when a run could not go on exactly: `tokenizer` with its ids, `pairs` with the lengths of
        the training pairs, from which batches are made; those of a streamed corpus are not known. Taken at once,
        for using a tokenizer changes its settings."""
        self.identity = {"tokenizer": tokenizer_identity(self.tokenizer)}
        if self.encoded is not None:
            digest = hashlib.blake2b(digest_size=16)
            for lengths in (self.encoded.source_lengths, self.encoded.target_lengths):
                digest.update(lengths)
            self.identity["pairs"] = digest.hexdigest()

    def draw(self, *, seed: int, epoch: int) -> Any:
        """The pairs of an epoch where corpora have weights; None: each once."""
        return self.encoded.draw(seed=seed, epoch=epoch) if self.encoded is not None else None

    def read_test(self) -> EvaluationSet | None:
        """The test split, read now and not before. None where there is none."""
        return read_evaluation(self.options.data, "test")

    @property
    def report(self) -> CorpusReport:
        """What was read and left out so far."""
        return self.encoded.report if self.encoded is not None else self.source.report


def gather(options: RunOptions, accelerator: Accelerator | None = None) -> Material:
    """Read, tokenize and encode; the main process first, so that the others find its work in the cache.

    Raises:
        MetaphraseError: anything wrong with the data, in one sentence.
    """
    accelerator = accelerator or Accelerator()
    with accelerator.main_process_first():
        has_test = options.data.test is None or is_there(options.data, "test")
        if options.data.streaming:
            return _stream(options, has_test)
        corpus = read_corpus(options.data, cache_folder(), seed=options.seed)
        tokenizer = prepare_tokenizer(corpus, options.tokenizer, cache_folder())
        encoded = encode_corpus(corpus, tokenizer, options.data, cache_folder())

        dropped = _dropout(tokenizer, options)

        def windows(epoch: int, number: int) -> Any:
            return dropped(encoded, epoch) if number == 0 else None

        return Material(tokenizer, windows, len(encoded), corpus.validation, options, corpus, encoded, has_test)


def _stream(options: RunOptions, has_test: bool) -> Material:
    corpus = open_stream(options.data)
    validation = read_evaluation(options.data, "validation")
    if validation is None:
        raise MetaphraseError("data.streaming needs a validation split: pairs cannot be held out of a stream.")
    tokenizer = prepare_tokenizer(corpus, options.tokenizer, cache_folder())

    dropped = _dropout(tokenizer, options)

    def windows(epoch: int, number: int) -> Any:
        window = corpus.window(epoch, number, tokenizer)
        return dropped(window, window.key) if window is not None else None

    return Material(tokenizer, windows, None, validation, options, corpus, has_test=has_test)


def _dropout(tokenizer: PreTrainedTokenizerFast, options: RunOptions) -> Callable[[Any, int], Any]:
    """Gives a window of pairs, by its key, as it is learned from: cut anew where the options ask for BPE-dropout.

    Raises:
        MetaphraseError: the tokenizer's words cannot be cut anew.
    """
    if not options.tokenizer.dropout:
        return lambda window, key: window
    dropout = BpeDropout(tokenizer, options.tokenizer.dropout)
    return lambda window, key: DroppedCorpus(
        window, dropout, seed=options.seed, epoch=key, longest=options.data.max_length
    )
