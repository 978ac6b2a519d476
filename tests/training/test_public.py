"""What is sent to the Hub names no place on a disk and holds no line of the data; what is known stays readable."""

from __future__ import annotations

import json

import pytest
import yaml

from metaphrase.training.public import public_card, public_command, public_log, public_recipe, public_results
from metaphrase.training.public import without_places as cut

PLACES = ["/home/me/corpus", "~/corpus", "~me/corpus", "../x/corpus", "./corpus", "C:\\Users\\me\\corpus", "/corpus"]


@pytest.mark.parametrize("place", [*PLACES, "/home/me/my corpus/corpus/"])
def test_a_place_is_cut_to_its_last_part(place):
    assert cut(place) == "corpus"
    assert cut({"a": [place, 1, None, True]}) == {"a": ["corpus", 1, None, True]}
    if " " not in place and place != "/corpus":
        assert cut(f"read from {place}, then") == "read from corpus, then"


@pytest.mark.parametrize(
    "text",
    [
        *("owner/name", "runs/mine", "https://example.org/a/b", "and/or", "tok:13a|smooth:exp", "3/4 of it", "a.b.c"),
        *("\\S+", "nrefs:1|case:mixed|eff:no", "text with 1/2 and km/h", "..", "{{ x }}", ""),
    ],
)
def test_what_is_no_place_stays(text):
    assert cut(text) in (text, ".") if text == ".." else cut(text) == text


def test_a_command_is_read_as_the_shell_reads_it():
    typed = "metaphrase train /home/me/my.yaml --data '/home/me/my data' --output=/srv/runs/one --model.d_model 64"
    assert public_command(typed) == "metaphrase train my.yaml --data 'my data' --output=one --model.d_model 64"
    assert public_command("metaphrase train 'x --data /home/me/y") == "metaphrase train 'x --data y"
    card = f"# A\n\n```console\n{typed}\n```\n\nmetaphrase train is a command.\n"
    assert "/home" not in public_card(card) and "/srv" not in public_card(card) and "is a command." in public_card(card)


def test_results_hold_nothing_null_and_no_place():
    results = {
        "command": "metaphrase train x --data '/home/me/my data'",
        "data": {"path": "deep/down/corpus", "dropped": {}, "more": [{"path": "some/deep/place", "source": "de"}]},
        "tokenizer": {"path": None},
        "test": {"bleu": {"score": float("nan")}, "chrf": {"score": 1.5}},
        "validation": None,
    }
    public = public_results(json.dumps(results))
    assert json.loads(public) == {
        "command": "metaphrase train x --data 'my data'",
        "data": {"path": "corpus", "dropped": {}, "more": [{"path": "place", "source": "de"}]},
        "tokenizer": {},
        "test": {"bleu": {}, "chrf": {"score": 1.5}},
    }
    assert json.loads(public_results('{"data": {"path": "alice/corpus"}}'))["data"]["path"] == "alice/corpus"


def test_a_recipe_keeps_its_options():
    recipe = {"data": {"path": "/home/me/corpus", "more": [{"path": "../b"}]}, "seed": 1, "licence": None, "x": "\\S+"}
    shown = {"data": {"path": "corpus", "more": [{"path": "b"}]}, "seed": 1, "licence": None, "x": "\\S+"}
    assert yaml.safe_load(public_recipe(yaml.safe_dump(recipe))) == shown


def test_a_log_keeps_its_figures_and_no_lines_of_the_data():
    records = [
        {"kind": "training", "update": 1, "loss": 2.5, "grad_norm": float("nan")},
        {"kind": "evaluation", "update": 1, "sacrebleu": 3.5, "samples": [{"source": "secret"}], "attention": "x"},
    ]
    public = public_log("".join(json.dumps(record) + "\n" for record in records))
    assert [json.loads(line) for line in public.splitlines()] == [
        {"kind": "training", "update": 1, "loss": 2.5},
        {"kind": "evaluation", "update": 1, "sacrebleu": 3.5},
    ]
