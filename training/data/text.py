"""Bytes to lines: the one place where a text file becomes strings.

A line ends at the byte 0x0A and nowhere else: U+2028, U+2029, U+0085, the form feed and a lone carriage return are
characters of the line they stand in. A byte-order mark at the start of the file and the carriage return of a CRLF are
not text and are removed. Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from metaphrase.configuration.errors import MetaphraseError

INVISIBLE = "".join(
    map(chr, [*range(0x21), *range(0x7F, 0xA1), 0xAD, 0x1680, 0x180E, *range(0x2000, 0x2010)])
) + "".join(map(chr, [*range(0x2028, 0x2030), *range(0x205F, 0x2070), 0x3000, 0xFEFF]))
"""Characters that leave no ink: white space, controls, zero-width and directional marks."""

BLOCK = 1 << 20


def is_blank(text: str) -> bool:
    """True where `text` holds no visible character: '', spaces, a lone U+200B."""
    return not text.strip(INVISIBLE)


def count_lines(path: Path) -> int:
    """Number of lines, by the rule of this file; a last line without a line feed counts."""
    lines, last = 0, b"\n"
    with open_bytes(path) as file:
        while block := file.read(BLOCK):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")


def read_lines(path: Path) -> Iterator[str | None]:
    """Yields each line as text; None for a line that is not UTF-8.

    Raises:
        MetaphraseError: the file cannot be opened, or begins like UTF-16 or UTF-32.
    """
    with open_bytes(path) as file:
        for number, line in enumerate(file):
            if number == 0:
                _refuse_utf16(line, path)
                line = line.removeprefix(b"\xef\xbb\xbf")
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError:
                yield None


def open_bytes(path: Path):
    """Opens a file for reading bytes, with an error that says which file."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise MetaphraseError(f"there is no file {path}") from None
    except OSError as error:
        raise MetaphraseError(f"{path} cannot be read: {error.strerror}") from None


def _refuse_utf16(first_line: bytes, path: Path) -> None:
    if first_line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise MetaphraseError(f"{path} is UTF-16 or UTF-32, by its byte-order mark; convert it to UTF-8")
