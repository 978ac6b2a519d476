"""The translation pipeline: every form of input, order, blanks, long texts, prefixes, n-best lists, other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    NllbTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    pipeline,
)
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import TokenizerOptions
from metaphrase.decoding.mbr import minimum_bayes_risk
from metaphrase.decoding.pipeline import TASK, TranslationPipeline
from metaphrase.decoding.translate import translate
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training.data.tokenizer import train_tokenizer

TEXTS = ["ein Hund läuft", "", "two cats sleep on the mat and", "a b", "  ", "\u200b", "sieben Katzen, acht Hunde"]
SPOKEN = [text for text in TEXTS if text.strip("\u200b ")]
BLANK = {"translation_text": "", "score": None}
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "init_std": 0.5,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(TEXTS, TokenizerOptions(kind="characters", vocab_size=320))


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> MetaphraseForConditionalGeneration:
    """Taught for two seconds to copy strings of letters, badly: its outputs differ from text to text."""
    torch.manual_seed(4)
    sizes = {**SIZES, "d_model": 32, "init_std": 0.1}
    model = MetaphraseForConditionalGeneration(MetaphraseConfig(vocab_size=len(tokenizer), dropout=0.0, **sizes))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    letters = sorted({token for text in SPOKEN for token in tokenizer(text)["input_ids"]} - {tokenizer.eos_token_id})
    for _ in range(80):
        ids = torch.tensor(letters)[torch.randint(len(letters), (32, 12))]
        ids[:, -1] = tokenizer.eos_token_id
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def translator(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TranslationPipeline:
    return TranslationPipeline(model=model, tokenizer=tokenizer, device="cpu", num_beams=2, max_new_tokens=12)


@pytest.fixture(scope="module")
def alone(translator: TranslationPipeline) -> list[dict[str, str]]:
    """Each text translated in a call of its own."""
    return [translator(text)[0] for text in TEXTS]


def test_outputs_differ_and_are_those_of_translate(
    translator: TranslationPipeline, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, alone: list[Any]
) -> None:
    texts = [one["translation_text"] for one in alone]
    assert len(set(texts)) == 1 + len(SPOKEN)
    assert texts == translate(model, tokenizer, TEXTS, num_beams=2, max_length=12, engine="generate")


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
def test_lists_columns_and_streams_keep_order(
    translator: TranslationPipeline, alone: list[Any], batch_tokens: int
) -> None:
    column = Dataset.from_dict({"de": TEXTS})["de"]
    for inputs in (TEXTS, tuple(TEXTS), column):
        assert translator(inputs, batch_tokens=batch_tokens) == alone
    stream = translator((text for text in TEXTS), batch_tokens=batch_tokens, read_ahead=2)
    assert next(stream) == alone[0] and list(stream) == alone[1:]
    assert translator([]) == []
    lines = iter([f"{text}\r\n" for text in TEXTS])  # as a file gives them
    assert list(translator(lines, batch_tokens=batch_tokens)) == alone


def test_a_stream_is_read_no_further_than_asked(translator: TranslationPipeline) -> None:
    read: list[str] = []

    def endless() -> Any:
        while True:
            read.append("a b")
            yield "a b"

    stream = translator(endless(), read_ahead=3)
    next(stream)
    assert len(read) == 3


def test_blank_in_blank_out_without_the_model(translator: TranslationPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaphrase.decoding.translate.make_engine", lambda *_: pytest.fail("the model was asked"))
    assert translator(["", " \n", "\u200b"]) == [{"translation_text": ""}] * 3
    assert translator("", num_return_sequences=2) == [BLANK, BLANK]


def test_n_best_lists_have_descending_scores(translator: TranslationPipeline, alone: list[Any]) -> None:
    found = translator(TEXTS, num_beams=4, num_return_sequences=3)
    for text, listed in zip(TEXTS, found, strict=True):
        if text not in SPOKEN:
            assert listed == [BLANK] * 3
            continue
        scores = [one["score"] for one in listed]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    best = translator(TEXTS, num_beams=4)
    assert [listed[0]["translation_text"] for listed in found] == [one["translation_text"] for one in best]
    assert same(translator(TEXTS[0], num_beams=4, num_return_sequences=3), found[0])


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Equal texts, and scores equal but for float error: batch mates change the last bit."""
    return [found["translation_text"] for found in one] == [found["translation_text"] for found in other] and [
        found["score"] for found in one
    ] == pytest.approx([found["score"] for found in other], abs=1e-4)


def test_a_score_is_the_log_probability_over_the_length(
    translator: TranslationPipeline, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Made again from the model's logits on the finished output."""
    batch = translator(SPOKEN, num_beams=3, return_scores=True)
    for text, found in zip(SPOKEN, batch, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        ids = model.generate(**inputs, num_beams=3, max_length=13)
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == found["translation_text"]
        with torch.no_grad():
            logits = model(**inputs, decoder_input_ids=ids[:, :-1]).logits
        steps = logits.log_softmax(-1).gather(2, ids[:, 1:, None])
        assert found["score"] == pytest.approx(steps.mean().item(), abs=1e-4)
    greedy = translator(SPOKEN, num_beams=1, return_scores=True)
    assert [one["score"] for one in greedy] == [None] * len(SPOKEN)


def test_a_long_text_is_split_and_put_together(translator: TranslationPipeline) -> None:
    text = "Hund und Katz. Katz und Hund!\n\nein Hund, zwei Katzen"
    pieces = ["Hund und Katz.", "Katz und Hund!", "ein Hund, zwei Katzen"]
    parts = [one["translation_text"] for one in translator(pieces)]
    whole = translator(text, max_source_tokens=24)[0]["translation_text"]
    assert whole == f"{parts[0]} {parts[1]}\n\n{parts[2]}" != translator(text)[0]["translation_text"]
    listed = translator(text, max_source_tokens=24, num_beams=4, num_return_sequences=4)
    best = [translator(piece, num_beams=4, num_return_sequences=4) for piece in pieces]
    sums = sorted(
        (a["score"] + b["score"] + c["score"] for a in best[0] for b in best[1] for c in best[2]), reverse=True
    )
    assert [one["score"] for one in listed] == pytest.approx(sums[:4])
    long = " ".join(["wort"] * 400)
    assert len(translator(long, max_new_tokens=2)[0]["translation_text"].split(" ")) >= 400 * 5 // 256


def test_a_forced_prefix_begins_the_output(translator: TranslationPipeline, alone: list[Any]) -> None:
    forced = translator(SPOKEN, prefix="Hund ")
    assert all(one["translation_text"].startswith("Hund ") for one in forced)
    assert forced != translator(SPOKEN)
    prefixes = ["ein", "", "zwei H", "a"]
    mixed = translator(SPOKEN, prefix=prefixes)
    for text, prefix, found in zip(SPOKEN, prefixes, mixed, strict=True):
        assert found["translation_text"].startswith(prefix)
        assert found == translator(text, prefix=prefix)[0]
    free = [one["translation_text"] for one in translator(SPOKEN)]
    assert translator(SPOKEN[0], prefix=free[0][:3])[0]["translation_text"].startswith(free[0][:3])


def test_the_progress_bar_counts_pieces(translator: TranslationPipeline, capsys: pytest.CaptureFixture[str]) -> None:
    translator(TEXTS, progress=True)
    assert "4/4" in capsys.readouterr().err
    translator(TEXTS)
    assert capsys.readouterr().err == ""


def test_dropout_is_off_and_the_mode_stays(model: PreTrainedModel, translator: TranslationPipeline) -> None:
    model.train()
    try:
        assert translator(SPOKEN) == translator(SPOKEN)
        assert model.training
    finally:
        model.eval()


def test_the_task_name_works_in_the_library(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, translator: TranslationPipeline, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = pipeline(TASK, model=str(tmp_path), device="cpu", num_beams=2, max_new_tokens=12)
    assert type(loaded) is TranslationPipeline
    assert loaded(TEXTS) == translator(TEXTS)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"num_beam": 3}, "has no option num_beam; did you mean num_beams?"),
        ({"num_beams": 0}, "num_beams is 0; it must be 1 or more"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return is 3, and a search with num_beams 2"),
        ({"prefix": ["a"]}, "there are 1 prefixes for 2 inputs"),
        ({"src_lang": "de"}, "src_lang is 'de', and the model's tokenizer knows no languages"),
        ({"read_ahead": 0}, "read_ahead is 0; it must be a whole number, 1 or more"),
        ({"batch_tokens": "64"}, "batch_tokens is '64'; it must be a whole number, 1 or more"),
        ({"prefix": 3}, "prefix is 3; it must be a text, or a list with a text for each input"),
        ({"prefix": [None, "a"]}, "it must be a text, or a list with a text for each input"),
    ],
)
def test_mistakes_are_told(translator: TranslationPipeline, call: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MetaphraseError, match=sentence.replace("?", r"\?")):
        translator(["a", "b"], **call)


def test_an_input_that_is_no_text_is_told(translator: TranslationPipeline) -> None:
    with pytest.raises(MetaphraseError, match="input 2 is int, not text"):
        translator(["a", 3])
    with pytest.raises(MetaphraseError, match="input 1 is dict, not text"):
        list(translator(iter([{"de": "a"}])))
    with pytest.raises(MetaphraseError, match="input 1 is dict, not text; give one column of the dataset"):
        translator(Dataset.from_dict({"de": ["a"]}))


@pytest.mark.parametrize("thing", [None, 3, b"text", {"de": "a"}, {"a", "b"}])
def test_what_is_no_input_at_all_is_told(translator: TranslationPipeline, thing: Any) -> None:
    """A dictionary's keys would be translated, a set has no order, and bytes are numbers."""
    with pytest.raises(MetaphraseError, match=f"the input is {type(thing).__name__}; give a text, a list or"):
        translator(thing)


def test_a_model_that_is_not_loaded_is_told(model: PreTrainedModel) -> None:
    for arguments in ({"model": "owner/name"}, {"model": model}):
        with pytest.raises(MetaphraseError, match=r'needs a loaded model and its tokenizer; .* model="owner/name"'):
            TranslationPipeline(**arguments)


# Models that were not written here


def sentencepiece_model(folder: Path) -> tuple[Path, dict[str, int]]:
    """A sentencepiece model of the letters in `TEXTS`, and its vocabulary behind the special tokens."""
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("\n".join(SPOKEN * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "spm"), vocab_size=40, model_type="char", minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    names = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(n) for n in range(3, pieces.get_piece_size()))]
    return folder / "spm.model", {name: number for number, name in enumerate(names)}


def make_marian(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    spm, vocabulary = sentencepiece_model(folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = MarianTokenizer(str(spm), str(spm), str(folder / "vocab.json"))
    ids = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2}
    config = MarianConfig(vocab_size=len(vocabulary), max_position_embeddings=128, **SIZES, **ids)
    return MarianMTModel(config), tokenizer


def make_m2m100(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    spm, vocabulary = sentencepiece_model(folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    names = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    tokenizer = M2M100Tokenizer(
        str(folder / "vocab.json"), str(spm), src_lang="en", tgt_lang="en", additional_special_tokens=names
    )
    assert tokenizer.get_lang_id("de") == tokenizer.convert_tokens_to_ids("__de__") >= len(vocabulary)
    config = M2M100Config(vocab_size=len(vocabulary) + 108, max_position_embeddings=128, **SIZES)
    return M2M100ForConditionalGeneration(config), tokenizer


def make_nllb(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "▁")} | {"▁"})
    vocabulary = {name: number for number, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters])}
    tokenizer = NllbTokenizer(vocabulary, [], src_lang="eng_Latn", tgt_lang="eng_Latn")
    config = M2M100Config(vocab_size=len(tokenizer), max_position_embeddings=128, **SIZES)
    return M2M100ForConditionalGeneration(config), tokenizer


OTHERS = {
    "marian": (make_marian, {}),
    "m2m100": (make_m2m100, {"src_lang": "de", "tgt_lang": "fr"}),
    "nllb": (make_nllb, {"src_lang": "deu_Latn", "tgt_lang": "fra_Latn"}),
}


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_are_served(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    make, languages = OTHERS[kind]
    model, tokenizer = make(tmp_path)
    translator = TranslationPipeline(model=model.eval(), tokenizer=tokenizer, device="cpu", **languages)
    found = translator(TEXTS, num_beams=3, max_new_tokens=10, num_return_sequences=2)
    for text, listed in zip(TEXTS, found, strict=True):
        if text not in SPOKEN:
            assert listed == [BLANK] * 2
            continue
        assert same(listed, translator(text, num_beams=3, max_new_tokens=10, num_return_sequences=2))
        assert [one["translation_text"] for one in listed] == by_generate(model, tokenizer, text, languages)
    assert len({str(listed) for listed in found}) == 1 + len(SPOKEN)
    # longer than the model's 128 positions: in pieces, as many as the text needs
    assert translator(" ".join(SPOKEN * 10), num_beams=1)[0]["translation_text"]
    forced = translator(SPOKEN, prefix=["Hund", "a", "", "zwei"], num_beams=2, max_new_tokens=10)
    assert [one["translation_text"].startswith(p) for one, p in zip(forced, ["Hund", "a", "", "zwei"], strict=True)]
    if languages:
        with pytest.raises(MetaphraseError, match="knows no language 'xx'"):
            translator(SPOKEN, tgt_lang="xx")


def by_generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, languages: dict[str, str]
) -> list[str]:
    """The two best of the library's own call, written as its documentation shows it."""
    options: dict[str, Any] = {}
    if languages:
        tokenizer.src_lang = languages["src_lang"]
        code = languages["tgt_lang"]
        is_m2m100 = isinstance(tokenizer, M2M100Tokenizer)
        options["forced_bos_token_id"] = (
            tokenizer.get_lang_id(code) if is_m2m100 else tokenizer.convert_tokens_to_ids(code)
        )
    inputs = tokenizer(text, return_tensors="pt")
    ids = model.generate(**inputs, num_beams=3, num_return_sequences=2, max_length=11, **options)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_minimum_bayes_risk_and_ensembles(translator: TranslationPipeline, model: PreTrainedModel) -> None:
    settings = {"sample": True, "num_beams": 1, "num_return_sequences": 6, "temperature": 1.5, "seed": 1}
    samples = [one["translation_text"] for one in translator(SPOKEN[0], **settings)]
    assert len(set(samples)) > 1
    chosen = minimum_bayes_risk(samples)
    assert [one["translation_text"] for one in translator(SPOKEN[0], mbr=True, **settings)] == [chosen]
    assert [one["translation_text"] for one in translator(["", SPOKEN[0]], mbr=True, **settings)] == ["", chosen]
    with pytest.raises(MetaphraseError, match="num_return_sequences is 1; ask for 16"):
        translator(SPOKEN[0], mbr=True)
    assert translator(SPOKEN, ensemble=[model, model]) == translator(SPOKEN)


def test_engines(translator: TranslationPipeline, model: PreTrainedModel) -> None:
    pytest.importorskip("ctranslate2")
    ours = translator(SPOKEN, num_beams=1)
    assert ours == translator(SPOKEN, num_beams=1, engine="generate")
    assert ours == translator(SPOKEN, num_beams=1, engine="ctranslate2")
    assert translator(SPOKEN, engine="ctranslate2") == translator(SPOKEN, early_stopping=True)
    with pytest.raises(MetaphraseError, match="engine 'ctranslate2' does not know coverage_penalty 0"):
        translator(SPOKEN, engine="ctranslate2", coverage_penalty=0.5)
    with pytest.raises(MetaphraseError, match="engine is 'marian'; it must be one of fast, generate, ctranslate2"):
        translator(SPOKEN, engine="marian")
