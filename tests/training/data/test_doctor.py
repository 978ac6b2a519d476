"""The doctor: every planted fault is found where it is, nothing else is, and a cleaned copy is clean."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.configuration.options import CorpusOptions, DataOptions
from metaphrase.training.data.cleaning import clean
from metaphrase.training.data.corpus import read_corpus
from metaphrase.training.data.doctor import CHECKS, examine
from metaphrase.training.data.languages import contradiction
from metaphrase.training.data.line_checks import faults, mend

from .conftest import write_pairs

ENGLISH, GERMAN = (
    words.split()
    for words in (
        "the man walks dog of house and is red that boy sees with girl in this big tree on street",
        "der Mann geht Hund von Haus und ist rot dass Junge sieht mit Mädchen in diesem großen Baum auf Straße",
    )
)


def sentences(lines: int, seed: int) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    chosen = [draw.choices(range(len(ENGLISH)), k=draw.randint(7, 12)) for _ in range(lines)]
    return [(" ".join(ENGLISH[i] for i in line), " ".join(GERMAN[i] for i in line)) for line in chosen]


def options(folder: Path, **more) -> DataOptions:
    return DataOptions(**{"path": str(folder), "source": "xx", "target": "yy", "max_length": 60, **more})


@pytest.fixture
def good(tmp_path: Path) -> Path:
    for seed, (split, lines) in enumerate((("train", 400), ("validation", 30), ("test", 30))):
        write_pairs(tmp_path / "good", split, sentences(lines, seed))
    return tmp_path / "good"


FAULTS: dict[str, tuple[str, str]] = {
    "blank": ("the man sees a dog in this house", "\u200b"),
    "swapped": ("der Mann geht mit Hund von Haus und ist rot", "the man walks with dog of house and is red"),
    "copied": ("the dog walks in this big house", "the dog walks in this big house"),
    "length_ratio": ("the man sees this big red dog in this house with that boy on that big street", "der Hund"),
    "over_long": (" ".join(ENGLISH * 4), " ".join(GERMAN * 4)),
    "control": ("the man\x07 sees that big dog in", "der Mann sieht\u2028dass großen Hund in"),
    "unseen": ("the man sees that boy on street", "der Mann sieht dass Jun\u200bge auf Straße"),
    "misread": ("the girl sees this big street", "der MÃ¤dchen sieht diesem groÃŸen StraÃŸe"),
    "lost": ("that girl sees this big street", "dass M\ufffddchen sieht diesem großen Straße"),
    "not_nfc": ("this girl sees that big street", "diesem Ma\u0308dchen sieht dass großen Straße"),
    "markup": ("this boy &amp; that girl <b>walks</b> on street", "diesem Junge und dass Mädchen geht auf Straße"),
}


def planted(good: Path, check: str, pair: tuple[str, str], line: int = 201) -> None:
    pairs = sentences(400, 0)
    pairs[line - 1] = pair
    write_pairs(good, "train", pairs)


def found_in(diagnosis, split: str = "train") -> dict[str, list[int]]:
    return {f.check: [e["line"] for e in f.examples] for f in diagnosis.findings if f.split == split}


def test_good_data_has_nothing(good):
    diagnosis = examine(options(good))
    assert diagnosis.findings == [] and diagnosis.exit_code == 0
    assert diagnosis.pairs == {"train": 400, "validation": 30, "test": 30}
    assert "Nothing found" in diagnosis.table()


@pytest.mark.parametrize("check", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(good, check):
    planted(good, check, FAULTS[check])
    diagnosis = examine(options(good))
    assert found_in(diagnosis) == {check: [201]}
    assert check in diagnosis.table() and "train.xx, line 201" in diagnosis.table()
    assert json.loads(diagnosis.to_json())["findings"][0]["count"] == 1


@pytest.mark.parametrize(
    ("check", "pair", "line"),
    [
        ("duplicate", sentences(400, 0)[10], 201),
        ("ambiguous", (sentences(400, 0)[10][0], "der Hund sieht dass Mann und ist rot"), 201),
        ("leaked_test", sentences(30, 2)[4], 201),
        ("leaked_validation", (sentences(30, 1)[4][0].upper(), "der Hund sieht dass Mann und ist rot"), 201),
    ],
)
def test_pairs_that_stand_elsewhere_too(good, check, pair, line):
    planted(good, check, pair, line)
    assert found_in(examine(options(good))) == {check: [line]}


def test_lines_that_cannot_be_read(good):
    lines = (good / "train.xx").read_bytes().split(b"\n")
    lines[6] = b"the \xff man"
    (good / "train.xx").write_bytes(b"\n".join(lines))
    diagnosis = examine(options(good))
    assert found_in(diagnosis) == {"undecodable": [7]}
    assert diagnosis.exit_code == 1
    (good / "test.yy").write_bytes((good / "test.yy").read_bytes().replace(b"Hund", b"H\xffnd", 1))
    diagnosis = examine(options(good))
    assert list(found_in(diagnosis, "test")) == ["undecodable"] and diagnosis.exit_code == 3


def test_exchanged_files(good):
    pairs = sentences(30, 2)
    write_pairs(good, "test", [(target, source) for source, target in pairs])
    diagnosis = examine(options(good))
    assert [finding.check for finding in diagnosis.findings] == ["sides_exchanged", "swapped"]
    assert diagnosis.exit_code == 3
    for split in ("train", "validation"):
        for side, language in (("xx", "de"), ("yy", "en")):
            (good / f"{split}.{side}").rename(good / f"{split}.{language}")
    found = examine(options(good, source="de", target="en", test=None)).findings
    assert [(f.check, f.split) for f in found] == [
        ("wrong_language", split) for split in ("validation",) * 2 + ("train",) * 2
    ]


def test_the_language_that_a_suffix_names():
    german = ["der Mann und die Frau sind nicht in dem Haus mit den Kindern"] * 10
    assert contradiction("de", german) is None
    assert contradiction("en", german) == "de"
    assert contradiction("ru_RU", german) == "the Latin script"
    assert contradiction("de", ["Это дом и он стоит здесь"] * 20) == "the Cyrillic script"
    assert contradiction("ru", ["Это дом и он стоит здесь"] * 20) is None
    assert contradiction("zh", ["家里没有人"] * 20) is None
    assert contradiction("source", german) is None
    assert contradiction("en", ["x y z"]) is None


def test_unknown_characters_of_scored_splits(good):
    pairs = sentences(30, 2)
    write_pairs(good, "test", [(pairs[0][0] + " ж", pairs[0][1] + " ☃"), *pairs[1:]])
    findings = examine(options(good)).findings
    assert [(f.check, f.split, f.count) for f in findings] == [("unknown_character", "test", 2)]
    assert "ж" in findings[0].meaning and "☃" in findings[0].meaning


def test_severity_grows_with_the_share(good):
    pairs = sentences(400, 0)
    for few, code in ((1, 0), (30, 1), (250, 3)):
        write_pairs(good, "train", (pairs[: 400 - few] * 3)[:400])
        assert examine(options(good)).exit_code == code


def test_leakage_from_a_further_corpus(good):
    write_pairs(good, "more", [*sentences(50, 8), sentences(30, 2)[3]])
    diagnosis = examine(options(good, more=[CorpusOptions(train="more")]))
    assert diagnosis.pairs["train"] == 451
    assert found_in(diagnosis) == {"leaked_test": [51]}
    assert diagnosis.findings[0].examples[0]["file"].endswith("more.xx")


def test_a_cleaned_copy(good, tmp_path):
    pairs = sentences(400, 0)
    for number, pair in enumerate(FAULTS.values()):
        pairs[20 * number + 20] = pair
    pairs[300] = pairs[299]
    pairs[301] = sentences(30, 2)[0]
    write_pairs(good, "train", pairs)
    write_pairs(good, "more", [*sentences(10, 8), sentences(30, 2)[3]])
    data = options(good, more=[CorpusOptions(train="more")])
    cleaned = clean(data, tmp_path / "clean")
    removed = {"blank", "swapped", "copied", "length_ratio", "over_long", "lost", "duplicate", "leaked_test"}
    assert dict(cleaned.removed) == dict.fromkeys(removed, 1) | {"leaked_test": 2}
    assert dict(cleaned.repaired) == dict.fromkeys(["control", "unseen", "misread", "not_nfc"], 1)
    listed = [json.loads(line) for line in (tmp_path / "clean" / "removed.jsonl").read_text().splitlines()]
    assert len(listed) == 9 and {entry["reason"] for entry in listed} == removed
    assert listed[0]["line"] == 21 and listed[0]["file"].endswith("train.xx")
    after = examine(options(tmp_path / "clean", more=[CorpusOptions(train="train-1")]))
    assert set(found_in(after)) == {"markup"}
    assert after.pairs == {"train": 400 - 8 + 10, "validation": 30, "test": 30}
    assert cleaned.kept == after.pairs and "removed: 1 blank" in cleaned.summary()
    texts = read_corpus(options(tmp_path / "clean")).train["target"]
    for mended in ("der Mann sieht dass großen Hund in", "der Mädchen sieht diesem großen Straße"):
        assert mended in texts
    for split in ("validation", "test"):
        for side in ("xx", "yy"):
            name = f"{split}.{side}"
            assert (tmp_path / "clean" / name).read_bytes() == (good / name).read_bytes()
    with pytest.raises(MetaphraseError, match="exists already"):
        clean(data, tmp_path / "clean")


def test_what_is_no_fault():
    for text in (
        "Ça coûte 3 €, très cher.",
        "ÄÖÜ äöü ß",
        "«É»",
        "Ñandú",
        "1 < 2 & 3 > 2",
        "AT&T",
        "a\tb",
        "न\u200dम",
        "",
    ):
        assert faults(text) == [] and mend(text) == text
    assert mend("cafÃ© â€“ Ã¼ber â€žWortâ€œ") == "café – über „Wort“"


def test_data_that_is_not_there(tmp_path):
    with pytest.raises(MetaphraseError, match="there is no folder"):
        examine(options(tmp_path / "nowhere" / "at" / "all"))
    write_pairs(tmp_path / "empty", "train", [])
    with pytest.raises(MetaphraseError, match="there is no pair"):
        examine(options(tmp_path / "empty"))


def test_every_check_says_what_it_means():
    assert all(check.meaning and check.warning <= check.error for check in CHECKS.values())
