"""The page as a file: self-contained, small, escaped, and with the model's own numbers in it."""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from importlib.resources import files

import numpy as np
import pytest
import torch

from metaphrase.inspection.attend import Attention, attend
from metaphrase.inspection.explain import explain
from metaphrase.inspection.heatmap import draw_head, draw_heads, save_png
from metaphrase.inspection.maps import AttentionMaps
from metaphrase.inspection.page import json_in_script, pack_weights, render_page, write_page
from metaphrase.inspection.words import Piece, Pieces

SOURCE = "The animal didn't cross the street because it was too tired ."
TARGET = "Das Tier überquerte die Straße nicht , weil es zu müde war ."


def part(page: str, name: str) -> str:
    return re.search(rf'<script type="[a-z/]+" id="{name}">(.*?)</script>', page, re.DOTALL)[1]


def unpack(page: str, name: str, dtype: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(part(page, name))), dtype)


def made_up(tokens: int, layers: int, heads: int, word: str = "word") -> Attention:
    """An attention of random weights over so many tokens."""
    body = tuple(Piece(9, f" {word}{i}", False, i) for i in range(tokens - 1))
    pieces = Pieces((*body, Piece(2, "</s>", True, None)), " ".join(f"{word}{i}" for i in range(tokens - 1)))
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(3, layers, heads, tokens, tokens, generator=generator) * 2).softmax(-1)
    return Attention("made up", pieces, pieces, pieces, AttentionMaps(pieces.ids, pieces.ids, pieces.ids, *weights))


def test_thirty_tokens_take_less_than_a_megabyte(tmp_path):
    path = write_page(made_up(30, 6, 8), tmp_path / "new" / "page.html")
    assert path.stat().st_size < 1_000_000


def test_the_page_asks_nothing_of_a_network(ours, word_tokenizer):
    page = render_page(attend(ours, word_tokenizer, SOURCE, target=TARGET))
    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page)
    assert not re.findall(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", page)
    assert "{{" not in page


def test_weights_in_the_page_are_the_models(ours, word_tokenizer):
    attention = attend(ours, word_tokenizer, SOURCE, target=TARGET)
    page = render_page(attention)
    data = json.loads(part(page, "data"))
    codes = unpack(page, "weights", "<u2")
    for kind, place in data["maps"].items():
        shape = [place[name] for name in ("layers", "heads", "rows", "cols")]
        found = codes[place["offset"] :][: int(np.prod(shape))].reshape(shape) / 65535
        assert np.abs(found - attention.weights(kind).numpy()).max() < 1e-5


def test_long_sentences_take_a_byte_a_weight():
    attention = made_up(150, 6, 16)
    raw, _, bits = pack_weights(attention)
    assert bits == 8 and len(raw) == 3 * 6 * 16 * 150 * 150
    found = (np.frombuffer(raw, "u1").astype(float) / 255) ** 2
    wanted = np.concatenate([attention.weights(kind).numpy().ravel() for kind in ("encoder", "decoder", "cross")])
    assert np.abs(found - wanted).max() < 0.005
    assert np.abs(found - wanted)[wanted < 0.01].max() < 0.0005


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "</script>", "<!--", "]]>", "a & b", "\u2028", "'\"`${x}"]
)
def test_texts_cannot_leave_their_script_element(text):
    written = json_in_script({"text": text})
    assert json.loads(written)["text"] == text
    assert not set("<>&\u2028\u2029") & set(written)


def test_a_sentence_of_markup_stays_text(tmp_path):
    attention = made_up(4, 1, 1, word="</script><script>alert(1)</script>")
    page = render_page(attention)
    assert "alert(1)" in page  # as data …
    assert "<script>alert" not in page  # … never as markup
    assert page.count("</script>") == 4


def test_explanation_numbers_are_in_the_page(ours, word_tokenizer):
    told = explain(ours, word_tokenizer, SOURCE, "it", 1, 1, target=TARGET)
    page = render_page(told.attention, explanation=told)
    outline = json.loads(part(page, "data"))["explanation"]
    numbers = unpack(page, "numbers", "<f4")
    place = outline["places"]["weights"]
    found = numbers[place["offset"] :][: place["shape"][1]]
    assert np.abs(found - told.attention.maps.encoder[1, 1, 7].numpy()).max() < 1e-6


def test_a_notebook_shows_the_page_in_a_frame(ours, word_tokenizer):
    attention = attend(ours, word_tokenizer, SOURCE, target=TARGET)
    frame = attention._repr_html_()
    assert frame.startswith("<iframe") and 'sandbox="allow-scripts"' in frame
    inner = re.search(r'srcdoc="([^"]*)"', frame)[1]
    assert html.unescape(inner) == render_page(attention)


def test_every_file_of_the_page_is_packaged():
    folder = files("metaphrase.inspection") / "web"
    assert {item.name for item in folder.iterdir()} >= {"page.html", "style.css", "explain.css", "main.js", "engine.js"}


def test_heat_maps(tmp_path, ours, word_tokenizer):
    attention = attend(ours, word_tokenizer, "The animal was 猫 $x_1$ 😀", target=TARGET)
    figure = draw_head(attention, "cross", 1, 0)
    axes = figure.axes[0]
    assert len(axes.get_xticklabels()) == len(attention.labels("cross", words=True)[1])
    assert len(axes.get_yticklabels()) == len(attention.labels("cross", words=True)[0])
    assert save_png(figure, tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
    assert len(draw_heads(attention, "encoder").axes) == 4
    assert save_png(draw_head(attention, "decoder", 0, words=False), tmp_path / "a" / "two.png").stat().st_size > 5000
