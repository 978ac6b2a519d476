"""Tokenizers: nothing is lost, nothing in a text is special, and the folder loads anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import DataOptions, TokenizerOptions
from metaphrase.training.data.corpus import read_corpus
from metaphrase.training.data.tokenizer import (
    SPECIAL,
    add_tags,
    load_tokenizer,
    prepare_tokenizer,
    train_tokenizer,
)

from .conftest import made_up_pairs

TEXTS = [text for pair in made_up_pairs(400) for text in pair] + ["a </s> <s> <pad> <0x41> <0xE9> </s></s>"] * 30
PROBES = [
    "x != y", "hello !", "a , b", "two  spaces", " lead", "trail ", "  ", "", "\t", "tab\tinside", "a\nb", "a\rb",
    "e\u0301 vs \u00e9", "a\u200db", "\u05d0\u05d1 123", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U00013000",
    "</s>", "a </s> b", "<pad>", "x<unk>y", "<s><s>", "<0x41>", "<0xE9>", "<", "<<s>", "\x00\x01", "d\u2028e\u0085",
    "\u00a0", "\u3000x", "don't", "3.14", "Ǆ ﬁ Å", "\ufeff", "\ufffd", "the dog", "▁", "a▁b ▁",
]  # fmt: skip
LOSSLESS = ("bpe", "unigram", "characters")
PHONEMES = r"[A-Z]+[0-9]?|\S"


@pytest.fixture(scope="module")
def trained():
    """One tokenizer of each kind."""
    made = {kind: train_tokenizer(TEXTS, TokenizerOptions(kind=kind, vocab_size=400)) for kind in LOSSLESS}
    return made | {"units": train_tokenizer(TEXTS, TokenizerOptions(kind="units", vocab_size=400))}


def normal(kind: str, text: str) -> str:
    """The documented normal form."""
    if kind == "units":
        return " ".join(text.split())
    return text if kind == "characters" else text.replace("▁", " ")


def decoded(tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", PROBES)
@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_text_comes_back(trained, kind, text):  # TOK-SPACE
    ids = trained[kind](text).input_ids
    assert [number for number in ids if number < len(SPECIAL)] == [2] == ids[-1:]
    back = decoded(trained[kind], text)
    assert back == normal(kind, text)
    assert decoded(trained[kind], back) == back
    assert trained[kind]([text, "a b c d e f g h"], padding=True).input_ids[0][: len(ids)] == ids


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40), kind=st.sampled_from(LOSSLESS))
def test_any_text_comes_back(trained, kind, text):
    assert decoded(trained[kind], text) == normal(kind, text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL, "<0x41>", "<", ">", " ", "a", "/s>"]), max_size=8).map("".join))
def test_no_text_is_special(trained, text):
    for kind in LOSSLESS:
        ids = trained[kind](text).input_ids
        assert [number for number in ids if number < len(SPECIAL)] == [2]
        assert decoded(trained[kind], text) == text


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=8))
def test_a_tokenizer_of_any_texts_gives_them_back(texts):
    for kind in ("bpe", "characters"):
        tokenizer = train_tokenizer(texts, TokenizerOptions(kind=kind, vocab_size=300))
        assert len(tokenizer) <= 300
        assert [decoded(tokenizer, text) for text in texts] == [normal(kind, text) for text in texts]


def test_ids_and_settings(trained):
    for tokenizer in trained.values():
        assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2, 3]
        ids = [getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "unk")]
        assert ids == [0, 1, 2, 3]
        assert tokenizer.padding_side == "right"
        assert tokenizer.model_max_length == 1024
        batch = tokenizer(["the dog", "a"], padding=True)
        assert batch["attention_mask"][1][-1] == 0 and set(batch) == {"input_ids", "attention_mask"}
        assert tokenizer(text_target="the dog").input_ids == tokenizer("the dog").input_ids
    assert all(len(tokenizer) <= 400 for tokenizer in trained.values())
    words = [f"{first}{second}{first}" for first in "abcdefghijkl" for second in "abcdefghijkl"] * 2
    assert len(train_tokenizer(words, TokenizerOptions(vocab_size=400))) == 400


def test_a_long_text_is_not_cut(trained):
    assert len(trained["characters"]("x" * 3000, verbose=False).input_ids) == 3001


def test_frequent_words_become_one_token(trained):
    assert trained["bpe"].tokenize("the house") == ["▁the", "▁house"]
    assert trained["bpe"].tokenize("1 0 10") == ["▁1", "▁", "0", "▁1", "0"]  # a number is its digits
    assert len(trained["unigram"].tokenize("the house")) < len("the house")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters", "units"])
def test_training_twice_gives_the_same(trained, kind):
    again = train_tokenizer(iter([TEXTS[:500], TEXTS[500:]]), TokenizerOptions(kind=kind, vocab_size=400))
    assert again.backend_tokenizer.to_str() == trained[kind].backend_tokenizer.to_str()


LOAD = """
import json, sys
sys.modules["metaphrase"] = None  # cannot be imported
from transformers import AutoTokenizer
found = []
for folder in sys.argv[2:]:
    probes, tokenizer = json.load(open(sys.argv[1])), AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(probe).input_ids for probe in probes]
    found.append([
        ids, tokenizer(probes).input_ids, tokenizer.batch_decode(ids, skip_special_tokens=True), tokenizer.pad_token_id,
        tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.model_max_length, tokenizer.padding_side])
print(json.dumps(found))
"""


def test_the_folders_load_without_the_package(trained, tmp_path):  # AUTO-TOK
    for kind, tokenizer in trained.items():
        tokenizer.save_pretrained(tmp_path / kind)
    # beside a model whose type the library does not know
    (tmp_path / "bpe" / "config.json").write_text(json.dumps({"model_type": "metaphrase"}))
    (tmp_path / "probes").write_text(json.dumps(PROBES))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "probes"), *(str(tmp_path / kind) for kind in trained)],
        capture_output=True, text=True, timeout=120, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for tokenizer, (ids, together, back, *settings_found) in zip(trained.values(), found, strict=True):
        assert ids == together == [tokenizer(probe).input_ids for probe in PROBES]
        assert back == [decoded(tokenizer, probe) for probe in PROBES]
        assert settings_found == [0, 2, 3, 1024, "right"]


def test_loading_keeps_literal_tokens_apart(trained, tmp_path):
    trained["bpe"].save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for probe in PROBES:
        assert loaded(probe).input_ids == trained["bpe"](probe).input_ids
    with pytest.raises(MetaphraseError, match=r"no tokenizer loads from .*nothing"):
        load_tokenizer(tmp_path / "nothing")


def test_units_by_pattern():
    texts = ["cat", "K AE T", "dog", "D AO1 G"]
    tokenizer = train_tokenizer(texts, TokenizerOptions(kind="units", unit_pattern=PHONEMES))
    assert tokenizer.tokenize("cat") == ["c", "a", "t"]
    assert tokenizer.tokenize("K AE T") == ["K", "AE", "T"]
    assert decoded(tokenizer, "K  AE T ") == "K AE T"
    assert tokenizer.tokenize("AO1") == ["AO1"]
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("z")) == [3]


def test_units_spelled_like_special_tokens_stay_text():
    tokenizer = train_tokenizer(["a </s> b <laugh> <pad>"] * 3, TokenizerOptions(kind="units"))
    assert tokenizer.tokenize("a </s> <laugh>") == ["a", "<", "/s>", "<laugh>"]
    assert [number for number in tokenizer("</s> <pad> <unk> <s>").input_ids if number < 3] == [2]


def test_mistakes_are_told():
    with pytest.raises(MetaphraseError, match=r"vocab_size 100 is too small for kind bpe.*need 260"):
        train_tokenizer(["a"], TokenizerOptions(vocab_size=100))
    with pytest.raises(MetaphraseError, match=r"unit_pattern '\(' is no regular expression"):
        train_tokenizer(["a"], TokenizerOptions(kind="units", unit_pattern="("))
    with pytest.raises(MetaphraseError, match="matches nothing"):
        train_tokenizer(["a"], TokenizerOptions(kind="units", unit_pattern="[0-9]+"))
    for texts in ([""], ["".join(map(chr, range(0x4E00, 0x5000)))]):
        with pytest.raises(MetaphraseError, match="no unigram tokenizer of 40 pieces"):
            train_tokenizer(texts, TokenizerOptions(kind="unigram", vocab_size=300))
    for kind in ("bpe", "unigram", "characters", "units"):
        with pytest.raises(MetaphraseError, match="no text"):
            train_tokenizer([], TokenizerOptions(kind=kind))


def test_a_tag_is_one_token_and_counts_into_the_vocabulary(folder, tmp_path):
    corpus = read_corpus(DataOptions(str(folder), source="xx", target="yy", tags=["<2yy>"]), tmp_path)
    for cache in (tmp_path, tmp_path, None):
        tokenizer = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=350), cache)
        assert len(tokenizer) == 350
        tag = tokenizer.convert_tokens_to_ids("<2yy>")
        assert tag == 349
        assert tokenizer("<2yy> the dog").input_ids == [tag, *tokenizer("the dog").input_ids]
        assert tokenizer("<2xx> the dog").input_ids[0] != tag
    tokenizer.save_pretrained(tmp_path / "saved")
    other = prepare_tokenizer(corpus, TokenizerOptions(path=str(tmp_path / "saved")), None)
    assert other("<2yy> </s>").input_ids == tokenizer("<2yy> </s>").input_ids
    assert len(add_tags(other, ["<2yy>", "<new>"])) == 351


def test_the_trained_tokenizer_comes_from_the_cache(folder, tmp_path, monkeypatch):
    corpus = read_corpus(DataOptions(str(folder), source="xx", target="yy"), tmp_path)
    first = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=350), tmp_path)
    monkeypatch.setattr("metaphrase.training.data.tokenizer.train_tokenizer", None)
    again = prepare_tokenizer(corpus, TokenizerOptions(vocab_size=350), tmp_path)
    assert [again(text).input_ids for text in PROBES] == [first(text).input_ids for text in PROBES]
