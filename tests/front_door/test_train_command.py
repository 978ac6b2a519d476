"""`metaphrase train` from raw text to a folder, and everything that a user can get wrong on the way."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from metaphrase.cli import main

from .conftest import write_corpus

LOADS = """
import sys, metaphrase
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(type(model).__name__, len(metaphrase.translate(model, tokenizer, ["one two", "", "three"])))
"""


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A result folder, made by one command."""
    folder = tmp_path_factory.mktemp("runs") / "toy"
    assert main(["train", str(recipe), "--output", str(folder), "--evaluation.every", "10"]) == 0
    return folder


def test_the_result_folder(trained, recipe):
    names = {path.name for path in trained.iterdir()}
    whole = {
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "README.md",
        "results.json",
    }
    assert whole | {"train_log.jsonl", "recipe.yaml", "curves.png", "checkpoints"} <= names
    results = json.loads((trained / "results.json").read_text(encoding="utf-8"))
    assert results["recipe"] == "toy" and results["training"]["updates"] == 20
    assert results["command"].startswith(f"metaphrase train {recipe} --output")
    assert results["data"]["train_pairs"] == 300 and results["data"]["test_pairs"] == 12
    assert results["test"]["word_error_rate"]["signature"] and results["test"]["sacrebleu"]["signature"]
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert f"{results['test']['sacrebleu']['score']:.2f}" in card and results["command"] in card
    again = yaml.safe_load((trained / "recipe.yaml").read_text(encoding="utf-8"))
    assert again["model"]["d_model"] == 16 and again["evaluation"]["every"] == 10


def test_the_recipe_as_run_is_a_recipe(trained):
    from metaphrase import read_recipe

    options = read_recipe(trained / "recipe.yaml")
    assert options.model["d_model"] == 16 and options.max_updates == 20 and options.optimizer.betas == (0.9, 0.98)


def test_it_loads_in_a_new_process_and_translates(trained):
    ran = subprocess.run([sys.executable, "-c", LOADS, str(trained)], text=True, capture_output=True, timeout=180)
    assert ran.stdout == "MetaphraseForConditionalGeneration 3\n", ran.stderr


def test_translate_and_score_what_was_trained(trained, corpus, run):
    code, text, error = run("translate", trained, stdin=b"one two\n\nthree\n")
    assert code == 0 and not error and text.count("\n") == 3 and text.split("\n")[1] == ""
    code, text, _ = run(
        "score", trained, "--source", corpus / "test.words", "--reference", corpus / "test.digits",
        "--metrics", "word_error_rate,sacrebleu", "--num_beams", 2,
    )  # fmt: skip
    results = json.loads((trained / "results.json").read_text(encoding="utf-8"))
    scores = json.loads(text)
    assert code == 0 and scores["lines"] == 12
    for metric in ("word_error_rate", "sacrebleu"):
        assert scores[metric]["score"] == pytest.approx(results["test"][metric]["score"])
        assert scores[metric]["signature"] == results["test"][metric]["signature"]


def test_a_folder_in_use_is_refused_and_resume_goes_on(trained, recipe, run):
    code, _, error = run("train", recipe, "--output", trained)
    assert code == 2 and str(trained) in error and "--resume" in error
    code, text, _ = run("train", recipe, "--output", trained, "--resume", "--max_updates", 25)
    assert code == 0 and text.strip() == str(trained)
    assert json.loads((trained / "results.json").read_text(encoding="utf-8"))["training"]["updates"] == 25


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (["{recipe}"], False),
        (["{recipe}", "--resume"], True),
        (["{recipe}", "--resume", "--seed", "2"], True),
        (["--resume", "{recipe}"], True),
        (["{recipe}", "--resume", "runs/toy/checkpoints/checkpoint-4"], "runs/toy/checkpoints/checkpoint-4"),
        (["--resume=there/checkpoint-4", "{recipe}"], "there/checkpoint-4"),
    ],
)
def test_resume_takes_a_checkpoint_or_none(words, resume, recipe, run, monkeypatch):
    asked = []
    monkeypatch.setattr("metaphrase.training.run.train", lambda options, **given: asked.append(given) or Path("runs"))
    code, _, error = run("train", *(word.format(recipe=recipe) for word in words))
    assert code == 0, error
    assert asked[0]["resume"] == resume and asked[0]["recipe_name"] == "toy"


MISTAKES = [
    ([], "which recipe"),
    (["mult30k_en_de"], 'no recipe "mult30k_en_de" (did you mean "multi30k_en_de"?)'),
    (["g2p"], 'did you mean "g2p_cmudict"?'),
    (["nowhere.yaml"], "no recipe file nowhere.yaml"),
    (["{recipe}", "more"], '"more" is one word too many'),
    (["{recipe}", "--batches.token", "3"], 'no option --batches.token (did you mean "--batches.tokens"?)'),
    (["{recipe}", "--batches.tokens", "many"], 'batches.tokens is "many"; it must be a whole number'),
    (["{recipe}", "--batches.tokens", "0"], "batches.tokens is 0; it must be 1 or more"),
    (["{recipe}", "--minutes", "-1"], "minutes is -1.0; it must be above 0"),
    (["{recipe}", "--tokenizer.kind", "bp"], "tokenizer.kind is"),
    (["{recipe}", "--evaluation.metrics", "bleu"], "sacrebleu, chrf"),
    (["{recipe}", "--optimizer.betas", "0.9"], "a list of 2, each a number"),
    (["{recipe}", "--data"], "needs a value"),
    (["{recipe}", "--data.more", "[{{pth: x}}]"], 'data.more: there is no option "pth" (did you mean "path"?)'),
    (["{recipe}", "--tokenizer.dropout", "1"], "tokenizer.dropout is 1.0; it must be a number from 0"),
    (["{recipe}", "--model.preset", "bigg"], 'no preset "bigg" (did you mean "big"?)'),
    (["{recipe}", "--model.d_modl", "8"], "did you mean 'd_model'?"),
    (["{recipe}", "--model.d_model", "15"], "d_model 15 is not divisible by encoder_attention_heads 2"),
    (["{recipe}", "--model.dropout", "lots"], "dropout is 'lots'"),
    (["{recipe}", "--data", "/no/such/folder"], "/no/such/folder"),
    (["{recipe}", "--data.source", "word"], "digits"),
    (["{recipe}", "--data.train", "trian"], "trian"),
    (["{recipe}", "--output", "{taken}"], "taken"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES, ids=[" ".join(words) or "nothing" for words, _ in MISTAKES])
def test_mistakes(words, told, recipe, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    code, text, error = run("train", *(word.format(recipe=recipe, taken=tmp_path / "taken") for word in words))
    assert code == 2 and text == "" and told in error
    assert error.startswith("metaphrase: ") and error.count("\n") == 1 and "Traceback" not in error


def test_mistakes_in_the_corpus(recipe, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty = write_corpus(tmp_path / "empty", train=0)
    for file in empty.iterdir():
        file.write_bytes(b"")
    code, _, error = run("train", recipe, "--data", empty, "--output", "empty_run")
    assert code == 2 and error.count("\n") == 1 and "no pair to learn from" in error
    uneven = write_corpus(tmp_path / "uneven", train=4)
    (uneven / "train.digits").write_text("1\n2\n3\n", encoding="utf-8")
    code, _, error = run("train", recipe, "--data", uneven, "--output", "uneven_run")
    assert code == 2 and error.count("\n") == 1 and "4" in error and "3" in error
    assert "train.words" in error and "train.digits" in error


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data:\n  pth: x\n", 'line 2: there is no option "data.pth" (did you mean "data.path"?)'),
        ("dta:\n  path: x\n", 'line 1: there is no option "dta" (did you mean "data"?)'),
        ("data:\n  path: x\n  path: y\n", 'line 3: "data.path" is there twice, first in line 2'),
        ("seed: 1\nbatches:\n  tokens: few\n", 'line 3: batches.tokens is "few"; it must be a whole number'),
        ("data: here\n", "line 1: data must hold `key: value` lines"),
        ("- seed\n", "line 1: a recipe must hold"),
        ("seed: [1\n", "not valid YAML"),
        ("data:\n  source: no\n", 'write "no"'),
        ("model:\n  preset: tiny\n  heads: 3\n", "no field 'heads'"),
        (
            "data:\n  more:\n  - {path: x}\n  - {pth: x}\n",
            'line 4: there is no option "data.more[1].pth" (did you mean',
        ),
        ("data:\n  more:\n  - path: x\n    weight: y\n", 'line 2: data.more: weight is "y"; it must be a number'),
        ("data:\n  more:\n  - x\n", "line 3: data.more[0] must hold `key: value` lines"),
        ("data:\n  more: x\n", "line 2: data.more: it must be a list of mappings with any of the keys path, "),
        ("", "set max_updates, epochs or minutes"),
        ("max_updates: 1\n", "data.path is not set"),
    ],
)
def test_mistakes_in_a_recipe(text, told, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    code, _, error = run("train", path)
    assert code == 2 and told in error and error.count("\n") == 1


def test_a_recipe_that_is_no_text(run, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes("seed: 1 # ä\n".encode("latin-1"))
    assert "is not UTF-8 text" in run("train", path)[2]


def test_the_command_line_goes_over_the_recipe(recipe):
    from metaphrase import MetaphraseError, read_recipe

    options = read_recipe(recipe, {"model.d_model": 32, "batches.tokens": 64, "data.path": "elsewhere"})
    assert options.model["d_model"] == 32 and options.model["encoder_layers"] == 1
    assert options.batches.tokens == 64 and options.data.path == "elsewhere" and options.optimizer.warmup == 10
    with pytest.raises(MetaphraseError, match=r"no option \"batches.token\""):
        read_recipe(recipe, {"batches.token": 3})
    with pytest.raises(MetaphraseError, match="whole number"):
        read_recipe(recipe, {"batches.tokens": "many"})


def test_further_corpora_are_options_that_go_there_and_back(recipe, tmp_path):
    from metaphrase import MetaphraseError, read_recipe
    from metaphrase.configuration.options import CorpusOptions
    from metaphrase.training.folder import plain_options

    path = tmp_path / "mine.yaml"
    more = "data:\n  more:\n  - {path: news, weight: 2}\n  - {path: web, tags: [<bt>], train: [a, b]}\n"
    path.write_text(more, encoding="utf-8")
    options = read_recipe(path)
    assert options.data.more == [
        CorpusOptions(path="news", weight=2.0), CorpusOptions(path="web", tags=["<bt>"], train=["a", "b"])
    ]  # fmt: skip
    path.write_text(yaml.safe_dump(plain_options(options)), encoding="utf-8")
    assert read_recipe(path) == options
    for item in ({"path": "x"}, CorpusOptions(path="x")):
        assert read_recipe(recipe, {"data.more": [item]}).data.more == [CorpusOptions(path="x")]
    with pytest.raises(MetaphraseError, match=r'no option "pth" \(did you mean "path"'):
        read_recipe(recipe, {"data.more": [{"pth": "x"}]})


def free_port() -> int:
    with socket.socket() as open_socket:
        open_socket.bind(("127.0.0.1", 0))
        return open_socket.getsockname()[1]


def test_two_processes(recipe, tmp_path):
    """`accelerate launch -m metaphrase train …`: one result folder, one line on standard output."""
    folder = tmp_path / "two"
    config = Path(__file__).parents[2] / "configuration" / "accelerate" / "cpu_two_processes.yaml"
    words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    words += ["-m", "metaphrase", "train", str(recipe), "--output", str(folder), "--max_updates", "4"]
    words[6:6] = ["--main_process_port", str(free_port())]
    ran = subprocess.run(words, text=True, capture_output=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip().splitlines()[-1] == str(folder) and ran.stdout.count(str(folder)) == 1
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["training"]["processes"] == 2 and results["training"]["updates"] == 4
