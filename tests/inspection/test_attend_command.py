"""`metaphrase attend`: a page, heat maps, a summary, alignments, and one sentence for each mistake."""

from __future__ import annotations

import re

import pytest

from metaphrase.cli import main

SOURCE = "The animal didn't cross the street because it was too tired ."
TARGET = "Das Tier überquerte die Straße nicht , weil es zu müde war ."


@pytest.fixture(scope="module")
def folder(tmp_path_factory, ours, word_tokenizer):
    path = tmp_path_factory.mktemp("model")
    ours.save_pretrained(path)
    word_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["attend", *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_a_page(run, folder, tmp_path):
    assert run(folder, SOURCE, "--target", TARGET) == (0, "attention.html\n", "")
    page = (tmp_path / "attention.html").read_text()
    assert "überquerte" in page and '"explanation":null' in page
    assert '"start":{"kind":"cross","layer":1,"head":-1}' in page


def test_explain_and_heat_maps(run, folder, tmp_path):
    code, out, _ = run(folder, SOURCE, "-o", "out/it.html", "--explain", "it", "--png", "--head", "2")
    assert code == 0
    assert out.split() == ["out/it.html", "out/it.png", "out/it-heads.png"]
    assert '"reads":"it"' in (tmp_path / "out" / "it.html").read_text()
    assert (tmp_path / "out" / "it-heads.png").stat().st_size > 1000


def test_summary_with_what_each_head_is_worth(run, folder, tmp_path):
    (tmp_path / "in.txt").write_text("The animal was tired .\n")
    (tmp_path / "out.txt").write_text("Das Tier war müde .\n")
    code, out, _ = run(folder, "--summary", "--input", "in.txt", "--reference", "out.txt")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 14
    assert lines[0].startswith("BLEU of the whole model") and "BLEU without it" in lines[1]
    code, out, _ = run(folder, "The animal was tired .", "--summary")
    assert code == 0 and "BLEU" not in out


def test_alignments(run, folder, tmp_path):
    (tmp_path / "in.txt").write_text("The animal was tired .\n\nit was\n")
    (tmp_path / "out.txt").write_text("Das Tier war müde .\n\nes war\n")
    (tmp_path / "gold.txt").write_text("0-0 1-1 2-2 3-3 4-4\n\n0-0 1-1\n")
    words = ("--align", "--input", "in.txt", "--reference", "out.txt")
    code, out, error = run(folder, *words)
    assert code == 0 and error == ""
    lines = out.split("\n")[:-1]
    assert [len(line.split()) for line in lines] == [5, 0, 2]
    assert all(re.fullmatch(r"(\d+-\d+ ?)*", line) for line in lines)
    code, _, error = run(folder, *words, "--gold", "gold.txt")
    assert re.fullmatch(r"Alignment error rate 0\.\d{3}, by .* of layer \d when (reading|writing) a word\n", error)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "which model?"),
        (["MODEL"], "which sentence?"),
        (["MODEL", "--summary"], "--input FILE"),
        (["MODEL", "it", "--layer", "9"], "no layer 9: the cross attention has 2"),
        (["MODEL", "it", "--explain", "zebra"], "No asking token reads 'zebra'"),
        (["MODEL", " "], "blank"),
        (["nowhere", "it"], "no model folder"),
        (["MODEL", "it", "--summary", "--align"], "not both"),
        (["MODEL", "it", "--attention", "sideways"], "attention"),
        (["MODEL", "--align", "--input", "missing.txt"], "missing.txt"),
    ],
)
def test_mistakes_are_told_in_one_sentence(run, folder, words, told):
    code, _, error = run(*[folder if word == "MODEL" else word for word in words])
    assert code == 2
    assert told in error and error.count("\n") == 1
