"""Reading a corpus: every form, every fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import CorpusOptions, DataOptions
from metaphrase.training.data.corpus import read_corpus, read_evaluation
from metaphrase.training.data.locate import is_there

from .conftest import made_up_pairs, write_pairs


def options(path: Path | str | None, **more) -> DataOptions:
    return DataOptions(**{"path": str(path) if path else None, "source": "xx", "target": "yy", **more})


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("any")


def pairs_of(corpus) -> list[tuple[str, str]]:
    return list(zip(corpus.train["source"], corpus.train["target"], strict=True))


def texts(folder: Path, source: bytes, target: bytes, split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.xx").write_bytes(source)
    (folder / f"{split}.yy").write_bytes(target)
    return folder


def test_text_files(folder, tmp_path):
    corpus = read_corpus(options(folder), tmp_path / "cache")
    assert pairs_of(corpus) == made_up_pairs(300, 0)
    assert corpus.validation.sources == [pair[0] for pair in made_up_pairs(20, 1)]
    assert corpus.validation.references == [[pair[1]] for pair in made_up_pairs(20, 1)]
    assert corpus.read_test().sources == [pair[0] for pair in made_up_pairs(20, 2)]
    assert (corpus.report.read, corpus.report.kept, corpus.report.dropped) == (300, 300, {})


def test_lines_stay_together(tmp_path):  # DATA-LINES
    source = "a\nb\u2028c\u0085d\x0ce\nf\rg\r\nh\n".encode()
    folder = texts(tmp_path / "a", source, b"1\n2\n3\n4\n")
    pairs = pairs_of(read_corpus(options(folder, validation_size=0)))
    assert pairs == [("a", "1"), ("b\u2028c\u0085d\x0ce", "2"), ("f\rg", "3"), ("h", "4")]
    folder = texts(tmp_path / "b", b"a\nb\nc\nd\n", b"1\n2\n3\n")
    with pytest.raises(MetaphraseError, match=r"train\.xx has 4 lines but .*train\.yy has 3"):
        read_corpus(options(folder, validation_size=0))
    folder = texts(tmp_path / "c", b"\xef\xbb\xbfa\r\nb\r\n", b"\xef\xbb\xbf1\r\n2\r\n")
    assert pairs_of(read_corpus(options(folder, validation_size=0))) == [("a", "1"), ("b", "2")]


def test_blank_lines_take_their_partner_along(tmp_path):  # DATA-EMPTY
    folder = texts(tmp_path / "a", b"s1\n\ns3\ns4\ns5\n", "t1\nt2\nt3\n \u200b\nt5\n".encode())
    corpus = read_corpus(options(folder, validation_size=0))
    assert pairs_of(corpus) == [("s1", "t1"), ("s3", "t3"), ("s5", "t5")]
    assert corpus.report.dropped == {"blank": 2}
    assert [(drop["line"], drop["reason"]) for drop in corpus.report.drops()] == [(2, "blank"), (4, "blank")]
    assert corpus.report.summary() == "5 lines read, 3 pairs kept; left out: 2 blank"


def test_undecodable_lines_are_listed_and_refused_where_they_are_scored(tmp_path):
    folder = texts(tmp_path / "a", b"s1\ns\xff2\ns3\n", b"t1\nt2\nt\xfe3\n")
    corpus = read_corpus(options(folder, validation_size=0))
    assert pairs_of(corpus) == [("s1", "t1")]
    assert [(Path(d["file"]).name, d["line"], d["reason"]) for d in corpus.report.drops()] == [
        ("train.xx", 2, "undecodable"),
        ("train.yy", 3, "undecodable"),
    ]
    texts(folder, b"s1\ns\xff2\n", b"t1\nt2\n", "test")
    with pytest.raises(MetaphraseError, match=r"test\.xx, line 2: undecodable"):
        corpus.read_test()


def test_blank_lines_are_scored(tmp_path):
    folder = texts(tmp_path / "a", b"a\n\nc\n", b"1\n2\n\n", "test")
    scored = read_evaluation(options(folder), "test")
    assert scored.sources == ["a", "", "c"]
    assert scored.references == [["1"], ["2"], [""]]
    assert len(scored.head(2)) == 2


def test_two_files_by_name(folder):
    data = options(folder, train=["train.yy", "train.xx"], validation=["test.xx", "test.yy"])
    corpus = read_corpus(data)
    assert pairs_of(corpus) == [(target, source) for source, target in made_up_pairs(300, 0)]
    full = options(None, train=[str(folder / "train.xx"), str(folder / "train.yy")], validation_size=10)
    assert len(read_corpus(full).train) == 290
    with pytest.raises(MetaphraseError, match="lists 1 files, not two"):
        read_corpus(options(folder, train=["train.xx"]))
    with pytest.raises(MetaphraseError, match=r"data\.train: there is no file .*trian\.xx"):
        read_corpus(options(folder, train=["trian.xx", "train.yy"]))


def test_tsv_with_and_without_header(tmp_path):
    (tmp_path / "train.tsv").write_text("id\tyy\txx\n1\tt1\ts1\n2\tt2\n3\tt3\t\n4\tt4\ts4\textra\n")
    corpus = read_corpus(options(tmp_path, validation_size=0))
    assert pairs_of(corpus) == [("s1", "t1"), ("s4", "t4")]
    assert corpus.report.dropped == {"malformed": 1, "blank": 1}
    assert [(drop["line"], drop["reason"]) for drop in corpus.report.drops()] == [(3, "malformed"), (4, "blank")]
    (tmp_path / "train.tsv").write_text('s1\tt1\n"s2\tt"2\n')
    assert pairs_of(read_corpus(options(tmp_path, validation_size=0))) == [("s1", "t1"), ('"s2', 't"2')]
    (tmp_path / "other.tsv").write_text("s1\tt1\n")
    assert len(read_corpus(options(tmp_path, train="other.tsv", validation_size=0)).train) == 1
    assert len(read_corpus(options(None, train=str(tmp_path / "other.tsv"), validation_size=0)).train) == 1
    (tmp_path / "train.tsv").write_text("one column\n")
    with pytest.raises(MetaphraseError, match=r"train\.tsv, line 1, has no tab"):
        read_corpus(options(tmp_path))


def test_jsonl_with_several_targets(tmp_path):
    rows = [{"xx": "s1", "yy": ["t1", "u1"]}, {"xx": "s2", "yy": "t2"}, {"xx": "s3", "yy": None}, {"xx": 4, "yy": "t"}]
    content = "".join(json.dumps(row) + "\n" for row in rows) + "{broken\n\n[1]\n"
    (tmp_path / "train.jsonl").write_text(content)
    corpus = read_corpus(options(tmp_path, validation_size=0))
    assert pairs_of(corpus) == [("s1", "t1"), ("s1", "u1"), ("s2", "t2")]
    assert corpus.report.dropped == {"missing": 2, "malformed": 3}
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1]) + "\n")
    assert corpus.read_test().references == [["t1", "u1"], ["t2"]]
    (tmp_path / "test.jsonl").write_text("{broken\n")
    with pytest.raises(MetaphraseError, match=r"test\.jsonl, line 1: malformed"):
        corpus.read_test()


def test_a_wrong_column_lists_the_right_ones(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"english": "a", "german": "b"}) + "\n")
    with pytest.raises(MetaphraseError, match=r"no column germna, only english, german; did you mean german?"):
        read_corpus(options(tmp_path, source="english", target="germna"))
    datasets.Dataset.from_dict({"english": ["a"], "german": ["b"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(MetaphraseError, match=r"no column germna, only english, german; did you mean german?"):
        read_corpus(options(tmp_path / "saved", source="english", target="germna"))


def test_nested_translation(tmp_path):
    rows = [{"translation": {"xx": "s1", "yy": "t1"}}, {"translation": {"xx": "s2", "yy": "t2"}}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = [("s1", "t1"), ("s2", "t2")]
    assert pairs_of(read_corpus(options(tmp_path, validation_size=0))) == wanted
    features = datasets.Features({"translation": datasets.Translation(["xx", "yy"])})
    typed = datasets.Dataset.from_list(rows, features=features)
    typed.save_to_disk(tmp_path / "saved")
    assert pairs_of(read_corpus(options(tmp_path / "saved", validation_size=0))) == wanted
    with pytest.raises(MetaphraseError, match="no column zz, only translation, xx, yy"):
        read_corpus(options(tmp_path / "saved", target="zz"))


def test_a_saved_dataset(tmp_path):
    rows = {"xx": ["a", None, "c"], "yy": ["1", "2", "3"], "other": [1, 2, 3]}
    whole = datasets.DatasetDict(
        train=datasets.Dataset.from_dict(rows), dev=datasets.Dataset.from_dict({"xx": ["d"], "yy": [["4", "5"]]})
    )
    whole.save_to_disk(tmp_path / "saved")
    corpus = read_corpus(options(tmp_path / "saved"), tmp_path / "cache")
    assert pairs_of(corpus) == [("a", "1"), ("c", "3")]
    assert corpus.report.dropped == {"missing": 1}
    assert corpus.validation.references == [["4", "5"]]
    assert corpus.read_test() is None
    with pytest.raises(MetaphraseError, match=r"no split trian, only train, dev; did you mean train?"):
        read_corpus(options(tmp_path / "saved", train="trian"))


def test_a_number_is_no_text(tmp_path):
    datasets.Dataset.from_dict({"xx": ["a", "b"], "yy": [1, 2]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(MetaphraseError, match=r"no pair to learn from .* 2 malformed"):
        read_corpus(options(tmp_path / "saved", validation_size=0))


def test_a_dataset_id_loads_only_the_split_that_is_asked_for(monkeypatch):
    asked = []

    def load(path, config, *, split, streaming):
        assert not streaming
        asked.append((path, config, split))
        return datasets.Dataset.from_dict({"xx": ["a", "b"], "yy": ["1", "2"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, config: ["train", "dev", "test"])
    corpus = read_corpus(options("some/corpus", config_name="xx-yy"))
    assert asked == [("some/corpus", "xx-yy", "dev"), ("some/corpus", "xx-yy", "train")]
    corpus.read_test()
    assert asked[2] == ("some/corpus", "xx-yy", "test")
    with pytest.raises(MetaphraseError, match="some/corpus has no split trains, only train, dev, test"):
        read_corpus(options("some/corpus", train="trains", validation=None))


def test_a_dataset_that_does_not_load_is_one_sentence(monkeypatch):
    def load(path, config):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "get_dataset_split_names", load)
    with pytest.raises(MetaphraseError, match="no folder some/corpus, and it does not load as a dataset: no network"):
        read_corpus(options("some/corpus"))


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(MetaphraseError, match=r"has none of trian\.xx with trian\.yy; trian\.tsv; trian\.jsonl"):
        read_corpus(options(folder, train="trian"))
    with pytest.raises(MetaphraseError, match=r"none of vaild\.xx .*it holds test\.xx, test\.yy"):
        read_corpus(options(folder, validation="vaild"))
    with pytest.raises(MetaphraseError, match="there is no folder /nowhere/at/all"):
        read_corpus(options("/nowhere/at/all"))
    with pytest.raises(MetaphraseError, match=r"data\.path is not set"):
        read_corpus(options(None))
    with pytest.raises(MetaphraseError, match="is a file; give its folder"):
        read_corpus(options(folder / "train.xx"))
    (folder / "train.yy").unlink()
    with pytest.raises(MetaphraseError, match=r"there is .*train\.xx but no train\.yy beside it"):
        read_corpus(options(folder))
    empty = texts(tmp_path / "empty", b"", b"")
    with pytest.raises(MetaphraseError, match="no pair to learn from"):
        read_corpus(options(empty))
    texts(tmp_path / "empty", b"", b"", "test")
    with pytest.raises(MetaphraseError, match=r"the test split .* is empty"):
        read_evaluation(options(empty), "test")


def test_without_a_validation_split_pairs_are_held_out(tmp_path):
    write_pairs(tmp_path, "train", made_up_pairs(300))
    corpora = [read_corpus(options(tmp_path, validation_size=30), seed=seed) for seed in (1, 1, 2)]
    first, again, other = corpora
    held = list(zip(first.validation.sources, (r[0] for r in first.validation.references), strict=True))
    assert len(held) == 30
    assert sorted(held + pairs_of(first)) == sorted(made_up_pairs(300))
    assert first.validation.sources == again.validation.sources != other.validation.sources
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert "30 training pairs were held out (seed 1)" in first.report.notes[0]
    assert first.report.kept == 270
    with pytest.raises(MetaphraseError, match="validation_size is 300 but there are only 300"):
        read_corpus(options(tmp_path, validation_size=300))


def test_max_pairs_takes_the_first(folder):
    corpus = read_corpus(options(folder, max_pairs=7))
    assert pairs_of(corpus) == made_up_pairs(300)[:7]
    assert "only the first 7 pairs" in corpus.report.notes[0]


def test_the_cache_is_used_and_a_changed_file_is_read_anew(folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    before = read_corpus(options(folder), cache)
    with monkeypatch.context() as patch:
        patch.setattr("metaphrase.training.data.corpus._write_pairs", None)
        again = read_corpus(options(folder), cache)
    assert pairs_of(again) == pairs_of(before)
    assert again.fingerprint == before.fingerprint
    write_pairs(folder, "train", made_up_pairs(50, 9))
    changed = read_corpus(options(folder), cache)
    assert pairs_of(changed) == made_up_pairs(50, 9)
    assert changed.fingerprint != before.fingerprint
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


@settings(max_examples=40, deadline=None)
@given(lines=st.lists(st.tuples(*[st.binary(max_size=6).map(lambda raw: raw.replace(b"\n", b" "))] * 2), min_size=1))
def test_any_bytes_are_pairs_line_for_line_or_listed(scratch, lines):
    if any(side[:2] in (b"\xff\xfe", b"\xfe\xff") for side in lines[0]):
        return
    lines = [*lines, (b"last", b"letzte")]
    texts(scratch, *(b"".join(pair[side] + b"\n" for pair in lines) for side in (0, 1)))
    corpus = read_corpus(options(scratch, validation_size=0))
    kept = dict(zip(corpus.train["line"], pairs_of(corpus), strict=True))
    listed = {drop["line"] for drop in corpus.report.drops()}
    assert kept.keys() | listed == set(range(1, len(lines) + 1)) and not kept.keys() & listed
    for line, pair in kept.items():
        for raw, text in zip(lines[line - 1], pair, strict=True):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
            assert text.encode() == raw.removesuffix(b"\r")


def test_test_data_is_read_by_nothing_before_it_is_asked_for(folder):
    (folder / "test.xx").write_bytes(b"\xff\n")
    read_corpus(options(folder))


def test_several_corpora(folder, tmp_path):
    write_pairs(tmp_path / "more", "extra", made_up_pairs(40, 7))
    more = CorpusOptions(path=str(tmp_path / "more"), train="extra", weight=2, tags=["<bt>", "<2yy>"])
    reversed_side = CorpusOptions(source="yy", target="xx", tags=["<2xx>"])
    corpus = read_corpus(options(folder, tags=["<2yy>"], more=[more, reversed_side]))
    assert [(len(part.pairs), part.weight) for part in corpus.parts] == [(300, 1), (40, 2), (300, 1)]
    assert len(corpus.train) == corpus.report.kept == 640
    assert corpus.tags == ["<2yy>", "<bt>", "<2xx>"]
    assert pairs_of(corpus)[300:340] == made_up_pairs(40, 7)
    assert corpus.validation.sources[0] == "<2yy> " + made_up_pairs(20, 1)[0][0]
    assert not any("<" in text for batch in corpus.texts() for text in batch)
    for tag in ("2yy", "<s>", "<a b>", "<0x41>", "<>"):
        with pytest.raises(MetaphraseError, match="the tag"):
            read_corpus(options(folder, tags=[tag]))


def test_a_split_of_the_hub_is_looked_for_and_not_loaded(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("was loaded"))
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, config: ["train", "dev"])
    data = DataOptions(path="owner/name")
    assert is_there(data, "validation") and not is_there(data, "test")
    with pytest.raises(MetaphraseError, match="owner/name has no split tset, only train, dev"):
        is_there(replace(data, test="tset"), "test")
