"""One head at work on one word, step by step, with the model's own numbers.

S asked positions · d_k, d_v sizes of a head · H heads

    x, X            the vectors that come in: of the asking word, and of the words that are asked
    q = x W^q + b   k = X W^k + b   v = X W^v + b
    s = q · k       s / sqrt(d_k)   a = softmax(s / sqrt(d_k))   z = sum of a_j v_j
    out = Concat(z of every head) W^o + b

Everything is taken from the model by hooks during the same single pass that gives the maps, and the last three lines
are checked against what the model attended to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from metaphrase.configuration.errors import MetaphraseError

from .attend import Attention, named_attention
from .maps import Decode, attention_maps, decode_outputs, encode_output, encode_sources
from .modules import KINDS, Kind, attention_modules, head_count, projections, unwrapped

WHOLE = 70_000  # W^o is kept whole up to so many numbers; of larger ones the first columns
COLUMNS = 16
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Explanation:
    """The numbers of one head for one asking word, float32. Names of `arrays` are those of the page:

    xq [1, d_model], xk [S, d_model], Wq Wk [d_model, d_k], Wv [d_model, d_v] and their biases bq bk bv, q [1, d_k],
    k [S, d_k], v [S, d_v], scores, scaled, visible (1 or 0) and weights [1, S], z [1, d_v], heads [1, H · d_v],
    Wo [H · d_v, n], bo [n], out [1, n]. Of a large W^o only the first n columns are kept. Where the incoming vector is
    an embedding: token and position [1, d_model], which add up to xq. Where scores carry a position bias (T5): bias
    [1, S].
    """

    attention: Attention
    kind: Kind
    layer: int
    head: int
    token: int
    scaling: float
    arrays: dict[str, Tensor]

    def outline(self) -> dict[str, Any]:
        """Everything but the numbers, for the page: names, where each array stands in `numbers`, labels."""
        rows, cols = self.attention.labels(self.kind)
        places, offset = {}, 0
        for name, array in self.arrays.items():
            places[name] = {"offset": offset, "shape": list(array.shape)}
            offset += array.numel()
        asking = self.attention.source if self.kind == "encoder" else self.attention.read
        module_heads = self.attention.maps.of(self.kind).shape[1]
        return {
            "kind": self.kind,
            "layer": self.layer,
            "head": self.head,
            "heads": module_heads,
            "token": self.token,
            "reads": asking.pieces[self.token].text.strip() or asking.pieces[self.token].text,
            "writes": None if self.kind == "encoder" else rows[self.token].strip(),
            "asked": [label.strip() or label for label in cols],
            "scaling": self.scaling,
            "places": places,
        }

    def numbers(self) -> np.ndarray:
        """All arrays one after the other, float32."""
        return np.concatenate([array.detach().float().numpy().reshape(-1) for array in self.arrays.values()])


def explain(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    token: str | int,
    layer: int,
    head: int,
    *,
    kind: Kind = "encoder",
    target: str | None = None,
    num_beams: int = 4,
    decode: Decode | None = None,
) -> Explanation:
    """Take one head's computation for one asking word out of the model.

    Args:
        token: the asking word or piece, or its index among the pieces that ask.
        layer, head: counted from 0.
        kind: "encoder", "decoder" or "cross". In the last two the asking words are those that the decoder writes.
        target, num_beams, decode: as for `attend`. The result's `attention` is what `attend` would give.

    Raises:
        MetaphraseError: if the token, layer or head does not exist, or the model's attention is computed otherwise.
    """
    inner = unwrapped(model)
    modules = attention_modules(inner)
    if kind not in KINDS:
        raise MetaphraseError(f"There is no attention {kind!r}; take one of {', '.join(KINDS)}.")
    if not 0 <= layer < len(modules[kind]):
        raise MetaphraseError(f"There is no layer {layer + 1}: the {kind} attention has {len(modules[kind])}.")
    module = modules[kind][layer]
    if not 0 <= head < head_count(module):
        raise MetaphraseError(f"There is no head {head + 1}: the {kind} attention has {head_count(module)}.")
    inputs = encode_sources(tokenizer, [text], inner.device)
    if target is None:
        outputs = decode_outputs(inner, inputs, num_beams=num_beams, decode=decode)
    else:
        outputs = [encode_output(tokenizer, target)]
    with _recording(inner, module, kind) as record:
        maps = attention_maps(model, inputs, outputs)[0]
    attention = named_attention(model, tokenizer, maps)
    row = find_token(attention, kind, token)
    arrays, scaling = _arrays(module, head, row, kind, record, maps.of(kind)[layer, head, row])
    if layer == 0 and kind != "cross":
        arrays.update(_embedding(record, arrays["xq"], row))
    return Explanation(attention, kind, layer, head, row, scaling, arrays)


def find_token(attention: Attention, kind: Kind, token: str | int) -> int:
    """Index of an asking piece: by number, or the first piece that reads, or whose word reads, as given.

    Raises:
        MetaphraseError: if there is none; the message lists what there is.
    """
    pieces = attention.sides(kind)[0]
    if isinstance(token, int):
        if 0 <= token < len(pieces):
            return token
        raise MetaphraseError(f"There is no token {token}: {len(pieces)} tokens ask, counted from 0.")
    labels = [piece.text.strip() for piece in pieces.pieces]
    shown = zip(pieces.pieces, labels, strict=True)
    words = [None if piece.word is None or not label else pieces.words[piece.word] for piece, label in shown]
    for names in (labels, words):
        if token in names:
            return names.index(token)
    raise MetaphraseError(f"No asking token reads {token!r}; these do: {' '.join(label for label in labels if label)}.")


@contextmanager
def _recording(model: nn.Module, module: nn.Module, kind: Kind) -> Iterator[dict[str, Tensor]]:
    """Keep what goes into and comes out of an attention module's projections, and the embeddings of its stack."""
    record: dict[str, Tensor] = {}
    parts = projections(module)
    stack = model.get_encoder() if kind == "encoder" else model.get_decoder()

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if args and isinstance(args[0], Tensor):
                record[name + "_in"] = args[0].detach().float().cpu()
            record[name] = output.detach().float().cpu()

        return hook

    def keep_bias(_: nn.Module, args: Any, output: tuple[Tensor | None, ...]) -> None:
        if len(output) == 3 and output[1] is not None:
            record["bias"] = output[1].detach().float().cpu()

    names = {"q": parts.query, "k": parts.key, "v": parts.value, "out": parts.out}
    names |= {name: getattr(stack, name) for name in ("embed_tokens", "embed_positions") if hasattr(stack, name)}
    handles = [part.register_forward_hook(keep(name)) for name, part in names.items()]
    handles.append(module.register_forward_hook(keep_bias))
    record["embed_scale"] = torch.tensor(float(getattr(stack, "embed_scale", None) or 1.0))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _arrays(
    module: nn.Module, head: int, row: int, kind: Kind, record: dict[str, Tensor], attended: Tensor
) -> tuple[dict[str, Tensor], float]:
    """The arrays of `Explanation` for one head and one asking position, and what scores are multiplied by."""
    parts = projections(module)
    count = head_count(module)

    def head_of(linear: nn.Linear) -> tuple[Tensor, Tensor, slice]:
        size = linear.out_features // count
        place = slice(head * size, (head + 1) * size)
        weight = linear.weight.detach().float().cpu()[place].T
        bias = torch.zeros(size) if linear.bias is None else linear.bias.detach().float().cpu()[place]
        return weight, bias, place

    w_q, b_q, at_q = head_of(parts.query)
    w_k, b_k, at_k = head_of(parts.key)
    w_v, b_v, at_v = head_of(parts.value)
    query, key, value = record["q"][0, row : row + 1, at_q], record["k"][0, :, at_k], record["v"][0, :, at_v]
    scaling = float(module.scaling)
    scores = query @ key.T
    scaled = scores * scaling
    visible = torch.ones_like(scores)
    if kind == "decoder":
        visible[:, row + 1 :] = 0
    arrays = {"xq": record["q_in"][0, row : row + 1], "xk": record["k_in"][0]}
    arrays |= {"Wq": w_q, "bq": b_q, "Wk": w_k, "bk": b_k, "Wv": w_v, "bv": b_v, "q": query, "k": key, "v": value}
    arrays |= {"scores": scores, "scaled": scaled, "visible": visible}
    if "bias" in record:
        arrays["bias"] = record["bias"][0, head % record["bias"].shape[1], row : row + 1, : scores.shape[1]]
    logits = scaled + arrays.get("bias", torch.zeros_like(scaled))
    again = logits.masked_fill(visible == 0, -torch.inf).softmax(-1)
    if (again[0] - attended).abs().max() > (TOLERANCE if module_is_float(module) else 0.02):
        raise MetaphraseError(
            f"{type(module).__name__} does not attend by softmax(q k / sqrt(d_k)); its steps cannot be shown."
        )
    w_o = parts.out.weight.detach().float().cpu().T
    columns = w_o.shape[1] if w_o.numel() <= WHOLE else COLUMNS
    b_o = torch.zeros(w_o.shape[1]) if parts.out.bias is None else parts.out.bias.detach().float().cpu()
    joined = record["out_in"][0, row : row + 1]
    arrays |= {"weights": attended[None], "z": joined[:, at_v], "heads": joined}
    arrays |= {"Wo": w_o[:, :columns], "bo": b_o[:columns], "out": record["out"][0, row : row + 1, :columns]}
    return {name: array.contiguous() for name, array in arrays.items()}, scaling


def module_is_float(module: nn.Module) -> bool:
    """Whether an attention module computes in single or double precision."""
    return next(module.parameters()).dtype in (torch.float32, torch.float64)


def _embedding(record: dict[str, Tensor], vector: Tensor, row: int) -> dict[str, Tensor]:
    """Token and position parts of the vector that comes into the first layer, where it is just their sum."""
    if "embed_tokens" not in record or "embed_positions" not in record:
        return {}
    size = vector.shape[-1]
    token = record["embed_tokens"].reshape(-1, size)[row : row + 1]
    position = record["embed_positions"].reshape(-1, size)
    position = position[min(row, len(position) - 1)][None]
    for scale in (1.0, float(record["embed_scale"])):
        if torch.allclose(token * scale + position, vector, atol=TOLERANCE):
            return {"token": token * scale, "position": position}
    return {}
