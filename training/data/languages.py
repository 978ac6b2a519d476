"""Which language a text is likely in: by the words that only the other side uses, by function words, by script."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

FUNCTION_WORDS = {
    "cs": "je se že ve jsou jako jsem ale pro",
    "da": "og det er ikke til af på med jeg",
    "de": "der die und das ist nicht ein eine mit den",
    "en": "the of and to is that with are this on",
    "es": "el los las que una del por con está y",
    "fi": "ja on ei että se oli mutta hän kun",
    "fr": "le les des est une dans et pour du il",
    "hu": "és az hogy nem egy van is volt meg",
    "it": "il di che è una della per gli con sono",
    "nl": "het een van niet zijn op dat voor met de",
    "pl": "się nie jest na że do jak to przez",
    "pt": "os não uma em com um da do no para",
    "ro": "și nu este cu pe în care la mai",
    "sv": "och att det som är på inte för jag en",
    "tr": "ve bir bu için çok ile da değil olan",
}
"""A few frequent words of languages written in the Latin script, most of them of that language alone."""

SCRIPTS = {
    "ar": "ARABIC", "fa": "ARABIC", "ur": "ARABIC", "he": "HEBREW", "el": "GREEK", "ru": "CYRILLIC", "uk": "CYRILLIC",
    "bg": "CYRILLIC", "mk": "CYRILLIC", "be": "CYRILLIC", "hi": "DEVANAGARI", "mr": "DEVANAGARI", "ne": "DEVANAGARI",
    "bn": "BENGALI", "ta": "TAMIL", "te": "TELUGU", "th": "THAI", "zh": "CJK", "ja": "CJK HIRAGANA KATAKANA",
    "ko": "HANGUL", "ka": "GEORGIAN", "hy": "ARMENIAN", "am": "ETHIOPIC", "km": "KHMER", "my": "MYANMAR",
}  # fmt: skip

SAMPLE = 2000
"""Lines that tell a language."""


def features(text: str) -> list[str]:
    """Words, or characters where nothing is set apart by spaces."""
    return text.split() if " " in text else list(text)


class Sides:
    """What each side of a corpus is written with; learned from the corpus itself, so it needs no list of languages."""

    def __init__(self) -> None:
        self.counts = Counter[str](), Counter[str]()
        self._odds: dict[str, float] | None = None

    def learn(self, source: str, target: str) -> None:
        self.counts[0].update(features(source))
        self.counts[1].update(features(target))

    def odds(self, text: str) -> float:
        """Mean log-odds a feature, above zero where the text looks like the source side."""
        if self._odds is None:
            totals = [sum(counts.values()) + 1 for counts in self.counts]
            self._odds = {
                feature: math.log((self.counts[0][feature] + 0.5) / totals[0])
                - math.log((self.counts[1][feature] + 0.5) / totals[1])
                for feature in self.counts[0].keys() | self.counts[1].keys()
            }
        found = features(text)
        return sum(self._odds.get(feature, 0.0) for feature in found) / max(len(found), 1)

    def swapped(self, source: str, target: str) -> bool:
        """True where each of the two looks much more like the other side."""
        return self.odds(source) < -1 and self.odds(target) > 1


def language_of(texts: Iterable[str]) -> str | None:
    """The language of `FUNCTION_WORDS` that the texts look like most, where one stands out."""
    words = Counter(word for text in texts for word in re.findall(r"\w+", text.lower()))
    total = sum(words.values())
    if total < 50:
        return None
    shares = {code: sum(words[word] for word in known.split()) / total for code, known in FUNCTION_WORDS.items()}
    best, second = sorted(shares, key=shares.get, reverse=True)[:2]
    return best if shares[best] > 0.05 and shares[best] > 1.5 * shares[second] else None


def script_of(texts: Iterable[str]) -> str | None:
    """The script of most letters: "LATIN", "CYRILLIC", "CJK" …, by their Unicode names."""
    scripts = Counter(
        unicodedata.name(letter, "?").split()[0].split("-")[0]
        for text in texts
        for letter in text[:100]
        if letter.isalpha()
    )
    return scripts.most_common(1)[0][0] if scripts else None


def contradiction(code: str, texts: list[str]) -> str | None:
    """What the texts look like, where that is not what a language code (`de`, `ru_RU`) says; None where it may be."""
    code = re.split(r"[^a-z]", code.lower())[0]
    script, expected = script_of(texts), SCRIPTS.get(code, "LATIN" if code in FUNCTION_WORDS else None)
    if expected is not None and script is not None and script not in expected.split():
        return f"the {script.title()} script"
    language = language_of(texts)
    if code in FUNCTION_WORDS and language is not None and language != code:
        return language
    return None
