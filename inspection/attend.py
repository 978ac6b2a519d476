"""One sentence, its output, and what every head attended to: what the page, the heat maps and the notebook show."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from metaphrase.configuration.errors import MetaphraseError

from .maps import AttentionMaps, Decode, attention_maps, decode_outputs, encode_output, encode_sources
from .modules import Kind, unwrapped
from .words import Pieces, merge_words, read_pieces


@dataclass(frozen=True)
class Attention:
    """The maps of one sentence with the pieces they belong to.

    `source` are the encoder's tokens, `written` what the decoder writes (rows of the decoder and cross maps) and `read`
    what it has read (columns of the decoder map).
    """

    model_name: str
    source: Pieces
    read: Pieces
    written: Pieces
    maps: AttentionMaps

    def sides(self, kind: Kind) -> tuple[Pieces, Pieces]:
        """Who asks and who is asked."""
        return {
            "encoder": (self.source, self.source),
            "decoder": (self.written, self.read),
            "cross": (self.written, self.source),
        }[kind]

    def weights(self, kind: Kind, *, words: bool = False) -> Tensor:
        """Maps [layers, heads, asking, asked] between pieces, or between words and special tokens."""
        weights = self.maps.of(kind)
        if not words:
            return weights
        rows, cols = self.sides(kind)
        return merge_words(weights, rows.units()[1], cols.units()[1])

    def labels(self, kind: Kind, *, words: bool = False) -> tuple[list[str], list[str]]:
        """The texts of the rows and of the columns of `weights`."""
        rows, cols = self.sides(kind)
        if words:
            return rows.units()[0], cols.units()[0]
        return [piece.text for piece in rows.pieces], [piece.text for piece in cols.pieces]

    def _repr_html_(self) -> str:
        from .page import notebook_frame

        return notebook_frame(self)


def attend(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    target: str | None = None,
    num_beams: int = 4,
    decode: Decode | None = None,
) -> Attention:
    """Translate a sentence and look at what was attended to.

    Args:
        model: an encoder-decoder with its output layer; it decodes with the attention kernel that it has.
        tokenizer: the model's tokenizer.
        text: the source sentence.
        target: an output to look at in place of the model's own.
        num_beams: beams of the model's own search.
        decode: another way of decoding: `(model, inputs) -> ids [B, T]`, start token first.

    Raises:
        MetaphraseError: if the sentence is blank, or the model is no encoder-decoder.
    """
    if not text.strip():
        raise MetaphraseError("The sentence is blank; give one with at least one word.")
    inner = unwrapped(model)
    inputs = encode_sources(tokenizer, [text], inner.device)
    if target is None:
        outputs = decode_outputs(inner, inputs, num_beams=num_beams, decode=decode)
    else:
        outputs = [encode_output(tokenizer, target)]
    return named_attention(model, tokenizer, attention_maps(model, inputs, outputs)[0])


def named_attention(model: nn.Module, tokenizer: PreTrainedTokenizerBase, maps: AttentionMaps) -> Attention:
    """Put texts to the token ids of a sentence's maps."""
    inner = unwrapped(model)
    return Attention(
        model_name=inner.config._name_or_path or type(inner).__name__,
        source=read_pieces(tokenizer, maps.source_ids, source=True),
        read=read_pieces(tokenizer, maps.read_ids),
        written=read_pieces(tokenizer, maps.written_ids),
        maps=maps,
    )
