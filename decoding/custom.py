"""The fast search inside the library's own `generate`.

    from metaphrase.decoding.custom import fast_search
    model.generate(**inputs, num_beams=5, custom_generate=fast_search)

`generate` prepares all it always prepares (settings, encoder, processors, limits) and leaves the search to us. Beyond
its own settings these may be given to it: `length_norm`, `coverage_penalty`, `seed`, `ensemble` (further models), and
`mbr`, the tokenizer: of the `num_return_sequences` outputs the one that the others resemble most is given (`mbr.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from metaphrase.configuration.errors import MetaphraseError
from metaphrase.decoding.beam import Hypothesis
from metaphrase.decoding.greedy import Task
from metaphrase.decoding.mbr import least_risk
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.search import search
from metaphrase.decoding.step import encode
from metaphrase.decoding.weights import read_weights

WITHOUT_EFFECT = {"cache", "encoder_outputs", "attention_mask", "decoder_attention_mask", "use_cache", "logits_to_keep"}
"""What `generate` hands on and the search reads, or does in its own way with the same outcome."""

UNKNOWN = {
    "output_attentions": False,
    "output_hidden_states": False,
    "output_logits": False,
    "output_scores": False,
    "penalty_alpha": None,
    "dola_layers": None,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
}
"""Settings that ask for something else than this search does, and the value at which they do not."""


def fast_search(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: torch.Tensor | None = None,
    length_norm: str = "length",
    coverage_penalty: float = 0.0,
    seed: int | None = None,
    ensemble: Sequence[PreTrainedModel] = (),
    mbr: PreTrainedTokenizerBase | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateEncoderDecoderOutput | GenerateBeamEncoderDecoderOutput:
    """A `custom_generate` of transformers: the ids that `generate` gives without it, [B x n, T]; with `mbr` [B, T].

    With `return_dict_in_generate` a beam search also gives `sequences_scores`.

    Raises:
        MetaphraseError: a setting that this search does not know; it is named, and nothing is left out.
    """
    refuse_unknown(generation_config, stopping_criteria, model_kwargs)
    config = generation_config
    if mbr is not None and not isinstance(mbr, PreTrainedTokenizerBase):
        raise MetaphraseError(f"mbr is {mbr!r}; inside generate it must be the tokenizer that gives outputs their text")
    if mbr is not None and config.num_return_sequences < 2:
        raise MetaphraseError("mbr chooses among outputs, and num_return_sequences is 1; ask for 16 samples or more")
    options = SearchOptions(
        num_beams=config.num_beams,
        num_return=config.num_return_sequences,
        length_penalty=config.length_penalty,
        length_norm=length_norm,
        coverage_penalty=coverage_penalty,
        early_stopping=config.early_stopping,
        sample=bool(config.do_sample),
        seed=seed,
    )
    copies = max(config.num_beams, config.num_return_sequences)
    encoded = model_kwargs["encoder_outputs"].last_hidden_state[::copies]
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones(encoded.shape[:2], dtype=torch.long, device=encoded.device) if mask is None else mask[::copies]
    prompts, padding = input_ids[::copies], None
    if (decoder_mask := model_kwargs.get("decoder_attention_mask")) is not None:
        prompts, padding = move_padding_right(prompts, decoder_mask[::copies], logits_processor)
    task = make_task(prompts, padding, stopping_criteria, config)
    sources = inputs_tensor if inputs_tensor is not None and inputs_tensor.dim() == 2 else None
    if ensemble and sources is None:
        raise MetaphraseError("an ensemble reads input_ids, and generate was given embeddings")
    others = [read_weights(member) for member in ensemble]
    with torch.inference_mode():
        states = [encoded, *(encode(member.encoder, sources, mask) for member in others)]
    found = search(
        [read_weights(model), *others],
        mask if sources is None else sources,
        mask,
        options,
        task,
        logits_processor,
        states,
    )
    if mbr is not None:
        texts = [[mbr.decode(one.tokens, skip_special_tokens=True) for one in hypotheses] for hypotheses in found]
        found = [[hypotheses[least_risk(told)]] for hypotheses, told in zip(found, texts, strict=True)]
    return as_generate_gives_it(found, input_ids[::copies], config)


def refuse_unknown(config: GenerationConfig, criteria: StoppingCriteriaList, model_kwargs: dict[str, Any]) -> None:
    """Names the first setting that the search would have to leave out."""
    for name, neutral in UNKNOWN.items():
        if (getattr(config, name, neutral) or neutral) != neutral:
            raise MetaphraseError(f"the fast search does not know {name}; leave it out, or leave out custom_generate")
    for criterion in criteria:
        if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria):
            raise MetaphraseError(
                f"the fast search ends at </s> or at the longest length, and does not know "
                f"{type(criterion).__name__}; leave it out, or leave out custom_generate"
            )
    for name, value in model_kwargs.items():
        if value is not None and value is not False and name not in WITHOUT_EFFECT:
            raise MetaphraseError(f"the fast search does not know {name}; leave it out, or leave out custom_generate")
    cache = model_kwargs.get("cache")
    if cache is not None and cache.get_seq_length() > 0:
        raise MetaphraseError("the fast search starts from an empty cache, and generate was given a filled one")


def move_padding_right(
    prompts: torch.Tensor, mask: torch.Tensor, processors: LogitsProcessorList
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on either side -> the same padded on the right, and how much padding each has: [B, P], [B]."""
    padding = (mask == 0).sum(1)
    if bool(padding.any()) and processors:
        raise MetaphraseError(
            f"the fast search does not know padded decoder prompts together with {type(processors[0]).__name__}; "
            "leave out one of them, or custom_generate"
        )
    order = (mask == 0).long().argsort(dim=1, stable=True)
    return prompts.gather(1, order), padding


def make_task(
    prompts: torch.Tensor, padding: torch.Tensor | None, criteria: StoppingCriteriaList, config: GenerationConfig
) -> Task:
    """Where outputs start and end: `max_length` counts the prompt as it came, padding included."""
    rows, places = prompts.shape
    lengths = prompts.new_full((rows,), places)
    ends = [criterion.eos_token_id for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    limit = next((c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), config.max_length)
    return Task(
        prompts=prompts,
        prompt_lengths=lengths if padding is None else lengths - padding,
        limits=prompts.new_full((rows,), limit - places),
        ends=ends[0].to(prompts) if ends else prompts.new_zeros(0),
        pad=0 if config._pad_token_tensor is None else int(config._pad_token_tensor),
    )


def as_generate_gives_it(
    found: list[list[Hypothesis]], prompts: torch.Tensor, config: GenerationConfig
) -> torch.Tensor | GenerateEncoderDecoderOutput | GenerateBeamEncoderDecoderOutput:
    """Prompts and outputs side by side, padded as `generate` pads them.

    Its beam search fills up with `</s>` where the padding token is 0, since it reads 0 as "none".
    """
    beams = config.num_beams > 1
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    if beams and not pad:
        pad = -1 if config._eos_token_tensor is None else int(config._eos_token_tensor[0])
    outputs = [hypothesis for hypotheses in found for hypothesis in hypotheses]
    longest = max(len(output.tokens) for output in outputs)
    chosen = torch.tensor([output.tokens + [pad] * (longest - len(output.tokens)) for output in outputs])
    repeated = prompts.repeat_interleave(len(outputs) // len(found), 0)
    sequences = torch.cat([repeated, chosen.to(repeated)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    if not beams:
        return GenerateEncoderDecoderOutput(sequences=sequences)
    scores = torch.tensor([output.score for output in outputs], device=sequences.device)
    return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores)
