"""The snippets of README.md and docs/translating.md run, their commands are commands, the files they name are there."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from metaphrase.cli import main
from metaphrase.training.gradients import GradientCheck

from .conftest import write_corpus

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRANSLATING = (ROOT / "docs/translating.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for text in (README, TRANSLATING) for block in blocks("console", text) for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [line.removeprefix("$ ").split("#")[0].strip() for line in lines]


@pytest.fixture
def desk(tmp_path, model_folder, monkeypatch):
    """A folder in which the README's names mean something: a model, a corpus, files to translate and score."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "multi30k_en_de").symlink_to(model_folder)
    for file in write_corpus(tmp_path / "corpus", train=60, validation=4).iterdir():
        file.rename(file.with_suffix(".en" if file.suffix == ".words" else ".de"))
    for name in ("in.txt", "test.en", "test.de"):
        (tmp_path / name).write_text("one two\nthree\n", encoding="utf-8")
    (tmp_path / "my_recipe.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("block", [*blocks("python"), *blocks("python", TRANSLATING)])
def test_python(block, desk, capsys):
    exec(compile(block, block, "exec"), {"__name__": "readme"})
    assert bool(capsys.readouterr().out.strip()) == ("print(" in block)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("command", commands())
def test_console(command, desk, run, monkeypatch):
    words, _, files = command.partition("<")
    words = shlex.split(words)
    if words[:2] == ["accelerate", "launch"]:
        words = words[words.index("-m") + 1 :]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert words[1] in targets
    elif words[0] == "python":
        if "--lora" in words:
            pytest.importorskip("peft")
        (desk / words[5]).resolve().parent.mkdir(exist_ok=True)
        runpy.run_path(str(ROOT / words[1]))["main"]([*words[2:], "--steps", "2"])
        assert (desk / words[5] / "model.safetensors").is_file()
    elif words[0] == "pip":
        assert words == ["pip", "install", "."]
    else:
        assert words[0] == "metaphrase"
        asked = []
        monkeypatch.setattr("metaphrase.training.run.train", lambda options, **_: asked.append(options) or Path("runs"))
        check = GradientCheck("one batch", 2.0, 1.0, 0.0, 0.0)  # the real ones have tests of their own
        monkeypatch.setattr("metaphrase.training.gradients.check_gradients", lambda *_, **__: [check])
        words += ["--seconds", "0.2"] if words[1] == "plan" else []
        stdin = (desk / shlex.split(files)[0]).read_bytes() if files else b""
        code, text, error = run(*words[1:], stdin=stdin)
        found_faults = words[1:3] == ["doctor", "data"] and code in (1, 3)  # the toy corpus has some
        assert (code == 0 or found_faults) and text, error
        assert len(asked) == (words[1] == "train")


def test_the_recipe_in_the_readme_is_whole(desk):
    from metaphrase import read_recipe
    from metaphrase.recipes import check_model

    options = read_recipe(desk / "my_recipe.yaml")
    check_model(options)
    assert options.epochs == 20 and yaml.safe_load(blocks("yaml")[0])["data"]["path"] == options.data.path


def test_the_files_it_names_are_there():
    for folder, text in ((ROOT, README), (ROOT / "docs", TRANSLATING)):
        for name in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (folder / name).exists(), name


def test_the_first_screen():
    """One sentence, a picture, six lines that load and use a model."""
    first = README.split("## Commands")[0]
    assert first.count("![") == 1 and len(blocks("python")[0].strip().splitlines()) <= 7
    assert len([line for line in first.splitlines() if line]) <= 24


def test_the_help_names_its_commands(capsys):
    main(["--help"])
    text = capsys.readouterr().out
    for command in re.findall(r"^\$ metaphrase (\w+)", README, flags=re.MULTILINE):
        assert f"metaphrase {command}" in text
