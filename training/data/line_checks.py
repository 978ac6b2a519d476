"""What can be wrong with one line, seen from the line alone; and the repairs that lose nothing that was meant."""

from __future__ import annotations

import re
import unicodedata

CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters and line separators; a tab is none."""

UNSEEN = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]")
"""Zero-width and directional marks and the soft hyphen. The joiners U+200C and U+200D are letters of some scripts."""

MISREAD = re.compile("[\u00c2-\u00c5\u00d0\u00d1][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6"
                     "\u02dc\u2013-\u203a\u20ac\u2122]|\u00e2[\u0080-\u00bf\u20ac\u2039\u203a\u2020\u2021\u2030\u0152"
                     "\u0153\u0160\u0161\u0178][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6"
                     "\u02dc\u2013-\u203a\u20ac\u2122]")  # fmt: skip
"""What two or three bytes of UTF-8 look like when they are read as Windows-1252: "Ã¼" for "ü", "â€™" for "’"."""

MARKUP = re.compile(r"&(?:[a-zA-Z]{2,8}|#\d{1,6}|#x[0-9a-fA-F]{1,5});|</?[a-zA-Z][^<>]{0,80}>")
"""HTML entities and tags."""


def faults(text: str) -> list[str]:
    """Names of what is wrong with the text: "control", "unseen", "misread", "lost", "not_nfc", "markup"."""
    found = []
    if CONTROLS.search(text):
        found.append("control")
    if ("&" in text or "<" in text) and MARKUP.search(text):
        found.append("markup")
    if text.isascii():
        return found
    if UNSEEN.search(text):
        found.append("unseen")
    if MISREAD.search(text) and mend_misread(text) != text:
        found.append("misread")
    if "\ufffd" in text:
        found.append("lost")
    if not unicodedata.is_normalized("NFC", text):
        found.append("not_nfc")
    return found


def mend(text: str) -> str:
    """The text without controls and unseen marks, read in the right encoding, in NFC."""
    text = mend_misread(text)
    text = UNSEEN.sub("", text)
    text = CONTROLS.sub(" ", text)
    return unicodedata.normalize("NFC", text)


def mend_misread(text: str) -> str:
    """Reads again as UTF-8 what was read as Windows-1252, where that gives a character."""
    return MISREAD.sub(_read_again, text)


def _read_again(match: re.Match[str]) -> str:
    try:
        raw = b"".join(bytes([ord(c)]) if ord(c) < 256 else c.encode("cp1252") for c in match[0])
        return raw.decode("utf-8")
    except UnicodeError:
        return match[0]


def folded(text: str) -> str:
    """The text as it is compared: without case, and with single spaces."""
    return " ".join(text.casefold().split())
