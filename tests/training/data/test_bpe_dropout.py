"""BPE-dropout: the same text, cut otherwise, and the same again from the same seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions, TokenizerOptions
from metaphrase.training.data.bpe_dropout import BpeDropout, DroppedCorpus
from metaphrase.training.data.corpus import read_corpus
from metaphrase.training.data.encoding import encode_corpus
from metaphrase.training.data.tokenizer import add_tags, prepare_tokenizer, train_tokenizer

from .conftest import made_up_pairs

TEXTS = [text for pair in made_up_pairs(200) for text in pair]
PROBES = [
    *TEXTS[:40],
    "",
    " ",
    "  two  spaces ",
    "ünseen 家族 \U0001f600 x",
    "a </s> <0x41> <b>",
    "123 !!! don't",
    "a\nb\tc",
]


@pytest.fixture(scope="module")
def tokenizer():
    return add_tags(train_tokenizer(TEXTS, TokenizerOptions(vocab_size=350)), ["<2yy>"])


def test_without_dropping_the_ids_are_those_of_the_library(tokenizer):
    dropout = BpeDropout(tokenizer, 0.0)
    for text in [*PROBES, *("<2yy> " + text for text in PROBES)]:
        ids = tokenizer(text).input_ids
        assert dropout(ids, random.Random(1)).tolist() == ids


def test_the_text_stays_and_its_pieces_change(tokenizer):
    dropout = BpeDropout(tokenizer, 0.3)
    changed = 0
    for number, text in enumerate(PROBES):
        ids = tokenizer(text).input_ids
        other = dropout(ids, random.Random(number)).tolist()
        assert tokenizer.decode(other, skip_special_tokens=True) == text
        assert other[-1] == tokenizer.eos_token_id
        changed += other != ids
    assert changed > 30


def test_more_dropping_makes_smaller_pieces(tokenizer):
    lengths = []
    for probability in (0.0, 0.1, 0.5, 0.99):
        dropout, draw = BpeDropout(tokenizer, probability), random.Random(1)
        lengths.append(sum(len(dropout(tokenizer(text).input_ids, draw)) for text in TEXTS))
    assert lengths == sorted(lengths) and lengths[1] < 1.6 * lengths[0] < lengths[3]


def test_a_corpus_is_cut_anew_each_epoch_and_repeatably(folder, tmp_path):
    options = DataOptions(str(folder), source="xx", target="yy")
    corpus = read_corpus(options, tmp_path)
    tokenizer = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=350), tmp_path)
    encoded = encode_corpus(corpus, tokenizer, options, tmp_path)
    dropout = BpeDropout(tokenizer, 0.2)

    def read(epoch, order, longest=256):
        dropped = DroppedCorpus(encoded, dropout, seed=1, epoch=epoch, longest=longest)
        assert len(dropped) == 300 and np.array_equal(dropped.source_lengths, encoded.source_lengths)
        return {index: [ids.tolist() for ids in dropped[[index]][0]] for index in order}

    first = read(0, range(50))
    assert first == read(0, reversed(range(50))) != read(1, range(50))
    for index, (source, target) in first.items():
        assert tokenizer.decode(source, skip_special_tokens=True) == corpus.train[index]["source"]
        assert tokenizer.decode(target, skip_special_tokens=True) == corpus.train[index]["target"]
    short = read(0, range(50), longest=12)
    plain = {index: [ids.tolist() for ids in encoded[[index]][0]] for index in range(50)}
    assert all(len(short[i][s]) <= 12 or short[i][s] == plain[i][s] for i in short for s in (0, 1))


def test_mistakes_are_told(tokenizer):
    with pytest.raises(MetaphraseError, match=r"tokenizer\.dropout is 1\.0"):
        BpeDropout(tokenizer, 1.0)
    units = train_tokenizer(["a b"], TokenizerOptions(kind="units"))
    with pytest.raises(MetaphraseError, match="needs a tokenizer of kind bpe, not WordLevel"):
        BpeDropout(units, 0.1)
    foreign = train_tokenizer(TEXTS, TokenizerOptions(vocab_size=350))
    foreign.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    with pytest.raises(MetaphraseError, match="needs a tokenizer that this package trained"):
        BpeDropout(foreign, 0.1)
