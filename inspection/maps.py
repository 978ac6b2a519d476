"""Attention maps at full decoding speed.

B batch · L layers · H heads · S source positions · T output positions

Decoding keeps whatever attention kernel it likes. Afterwards ONE pass over source and chosen output (the decoder reads
the output as in training) gives every map. So the maps belong to the output that was chosen, whatever beams were
tried on the way, and there is nothing to follow.

    the output        y_0   y_1   …   </s>      what the decoder writes at step t, a row of the decoder and cross maps
    the decoder reads  <s>  y_0   y_1   …       what it has read then, a column of the decoder map
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.modeling.generation import LENGTH_MARGIN

from .modules import Kind, eager_attention_of, unwrapped

Decode = Callable[[PreTrainedModel, dict[str, Tensor]], Tensor]
"""Anything that turns a model and its inputs (`input_ids`, `attention_mask`, both [B, S]) into generated ids [B, T]."""


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one sentence and its output, float32 on the CPU; every row sums to 1.

    encoder [L, H, S, S], decoder [L, H, T, T] (0 above the diagonal), cross [L, H, T, S]. Padding has no rows and no
    columns. `source_ids` are S, `read_ids` and `written_ids` T each.
    """

    source_ids: list[int]
    read_ids: list[int]
    written_ids: list[int]
    encoder: Tensor
    decoder: Tensor
    cross: Tensor

    def of(self, kind: Kind) -> Tensor:
        """The maps of one kind."""
        return {"encoder": self.encoder, "decoder": self.decoder, "cross": self.cross}[kind]


def encode_sources(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """Padded `input_ids` and `attention_mask`, [B, S]."""
    batch = tokenizer(list(texts), return_tensors="pt", padding=True)
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


def encode_output(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids the decoder should write for a given output text, as labels are made for training."""
    return list(tokenizer(text_target=text)["input_ids"])


def decode_outputs(
    model: nn.Module, inputs: dict[str, Tensor], *, num_beams: int = 4, decode: Decode | None = None
) -> list[list[int]]:
    """The chosen output of each sentence: ids without the start token, up to the first end token.

    `decode` replaces the model's own beam search of `num_beams` beams.
    """
    inner = unwrapped(model)
    if decode is not None:
        return [_chosen(row, inner) for row in decode(inner, inputs).tolist()]
    settings = inner.generation_config
    limited = settings.max_new_tokens or settings.max_length
    more = {} if limited else {"max_new_tokens": inputs["input_ids"].shape[1] + LENGTH_MARGIN}
    with torch.no_grad():
        generated = inner.generate(**inputs, num_beams=num_beams, do_sample=False, **more)
    chosen = [_chosen(row, inner) for row in generated.tolist()]
    if limited:
        return chosen
    # An output that does not end must not run on because a longer sentence is in the batch.
    lengths = inputs["attention_mask"].sum(-1).tolist()
    return [output[: length + LENGTH_MARGIN] for output, length in zip(chosen, lengths, strict=True)]


def _chosen(row: list[int], model: PreTrainedModel) -> list[int]:
    """Generated ids without the start token and without what follows the end token."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    written = row[1:]
    for place, token in enumerate(written):
        if token in ends:
            return written[: place + 1]
    return written


def attention_maps(
    model: nn.Module, inputs: dict[str, Tensor], outputs: Sequence[Sequence[int]]
) -> list[AttentionMaps]:
    """Every attention map of a batch, by one pass of the model over sources and outputs.

    Args:
        model: an encoder-decoder; its attention implementation and mode are as before afterwards.
        inputs: `input_ids` and `attention_mask` [B, S], padded on either side.
        outputs: for each sentence the ids that the decoder writes, without the start token.

    Raises:
        MetaphraseError: if an output is empty, or the model gives no weights.
    """
    if any(len(output) == 0 for output in outputs):
        raise MetaphraseError("An output has no tokens; attention needs at least one, such as the end token.")
    with eager_attention_of(model) as inner, torch.no_grad():
        start = inner.config.decoder_start_token_id
        start = inner.generation_config.decoder_start_token_id if start is None else start
        if start is None:
            raise MetaphraseError(
                "The model's config.json has no decoder_start_token_id; set it to the id its decoder starts with."
            )
        read, mask = _decoder_inputs(outputs, start, inputs["input_ids"].device)
        result = inner(
            **inputs, decoder_input_ids=read, decoder_attention_mask=mask, output_attentions=True, use_cache=False
        )
    kinds = (result.encoder_attentions, result.decoder_attentions, result.cross_attentions)
    if any(not maps or any(layer is None for layer in maps) for maps in kinds):
        raise MetaphraseError(f"{type(inner).__name__} gives no attention weights in its eager implementation.")
    stacks = [torch.stack(maps, 1).float().cpu() for maps in kinds]  # [B, L, H, …, …]
    return [_cut(i, inputs, list(output), start, stacks) for i, output in enumerate(outputs)]


def _decoder_inputs(outputs: Sequence[Sequence[int]], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the decoder reads, [B, T]: a start token, then each output but its last token; and the mask of it."""
    length = max(map(len, outputs))
    read = torch.full((len(outputs), length), start, dtype=torch.long)
    mask = torch.zeros((len(outputs), length), dtype=torch.long)
    for row, output in enumerate(outputs):
        read[row, 1 : len(output)] = torch.tensor(list(output[:-1]), dtype=torch.long)
        mask[row, : len(output)] = 1
    return read.to(device), mask.to(device)


def _cut(row: int, inputs: dict[str, Tensor], output: list[int], start: int, stacks: list[Tensor]) -> AttentionMaps:
    """One sentence's maps without padding. In half precision rows are made to sum to 1 again."""
    source = inputs["attention_mask"][row].bool().cpu()
    count = len(output)
    encoder = stacks[0][row][:, :, source][..., source]
    decoder = stacks[1][row][:, :, :count, :count]
    cross = stacks[2][row][:, :, :count][..., source]
    return AttentionMaps(
        source_ids=inputs["input_ids"][row].cpu()[source].tolist(),
        read_ids=[start, *output[:-1]],
        written_ids=output,
        encoder=encoder / encoder.sum(-1, keepdim=True),
        decoder=decoder / decoder.sum(-1, keepdim=True),
        cross=cross / cross.sum(-1, keepdim=True),
    )
