"""Bytes to lines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.training.data.text import count_lines, is_blank, read_lines


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("any")


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n", ["a", ""]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\xef\xbb\xbfa\r\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),  # a mark at the beginning only
        (b"a\rb\n", ["a\rb"]),
        ("b\u2028c\u2029d\u0085e\x0cf\x0bg\x1ch\n".encode(), ["b\u2028c\u2029d\u0085e\x0cf\x0bg\x1ch"]),
        (b"a\xff\nb\n", [None, "b"]),
        (b"a\x00b\n", ["a\x00b"]),
    ],
)
def test_a_line_ends_at_a_line_feed_only(tmp_path, content, lines):
    file = tmp_path / "text"
    file.write_bytes(content)
    assert list(read_lines(file)) == lines
    assert count_lines(file) == len(lines)


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_are_read_line_for_line(scratch, content):
    file = scratch / "text"
    file.write_bytes(content)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        with pytest.raises(MetaphraseError, match="UTF-16"):
            list(read_lines(file))
        return
    lines = list(read_lines(file))
    raw = content.split(b"\n")[: None if content[-1:] not in (b"", b"\n") else -1]
    assert len(lines) == count_lines(file) == len(raw)
    for number, (line, wanted) in enumerate(zip(lines, raw, strict=True)):
        wanted = wanted.removeprefix(b"\xef\xbb\xbf") if number == 0 else wanted
        try:
            assert line == wanted.removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            assert line is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), max_size=8))
def test_texts_come_back_as_they_were_written(scratch, texts):
    file = scratch / "text"
    file.write_bytes("".join(text + "\r\n" for text in texts).encode())
    wanted = [text.removeprefix("\ufeff") if number == 0 else text for number, text in enumerate(texts)]
    assert list(read_lines(file)) == wanted


def test_what_leaves_no_ink_is_blank():
    assert all(map(is_blank, ["", " ", "\t", "\u200b", "\ufeff", "\u00a0\u3000", "\r", "\u2028", "\x00"]))
    assert not any(map(is_blank, ["a", ".", "\u200ba", "家", "-", "–", "\U0001f600"]))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(MetaphraseError, match=r"there is no file .*nothing"):
        list(read_lines(tmp_path / "nothing"))
    with pytest.raises(MetaphraseError, match="cannot be read"):
        list(read_lines(tmp_path))
    file = tmp_path / "wide"
    file.write_bytes("text".encode("utf-16"))
    with pytest.raises(MetaphraseError, match="convert it to UTF-8"):
        list(read_lines(file))
