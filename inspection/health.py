"""How the heads of a model do over a corpus: what each looks at, which add nothing, and what a head is worth.

Every figure is a mean over all asking positions of all sentences, a number for each head of each layer:

    entropy       -sum a ln a / ln n of a row with n visible positions: 0 looks at one, 1 at all alike
    diagonality   1 - sum a |t/T - s/S|: 1 when a word looks at its own place in the other sentence
    rest          weight on special tokens (`</s>`, `<s>`), where heads go that have nothing to do (Clark et al. 2019)
    agreement     1 - Jensen-Shannon divergence / ln 2 to the other heads of its layer: 1 when all look alike
    contribution  |z W^O| of the head / the sum of that over the layer's heads: what it adds; equal shares are 1 / H

A head is dead when its contribution is below a tenth of an equal share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from metaphrase.configuration.errors import MetaphraseError

from .attend import Attention, named_attention
from .maps import attention_maps, decode_outputs, encode_sources
from .modules import KINDS, Kind, attention_modules, head_count, projections, unwrapped

DEAD = 0.1  # of an equal share


@dataclass(frozen=True)
class HeadHealth:
    """One head's figures; `layer` and `head` count from 0. `bleu_loss` is set by `pruning_costs`."""

    kind: Kind
    layer: int
    head: int
    entropy: float
    diagonality: float
    rest: float
    agreement: float
    contribution: float
    dead: bool
    bleu_loss: float | None = None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def summarize(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    batch_size: int = 16,
    num_beams: int = 1,
) -> list[HeadHealth]:
    """Decode the sentences and measure every head. Blank sentences are left out.

    Raises:
        MetaphraseError: if no sentence is left.
    """
    inner = unwrapped(model)
    kept = [text for text in texts if text.strip()]
    if not kept:
        raise MetaphraseError("There is no sentence to measure the heads on; give at least one that is not blank.")
    sums: dict[Kind, Tensor] = {}
    rows = dict.fromkeys(KINDS, 0)
    with measured_contributions(inner) as contributions:
        for start in range(0, len(kept), batch_size):
            inputs = encode_sources(tokenizer, kept[start : start + batch_size], inner.device)
            contributions.on = False
            outputs = decode_outputs(inner, inputs, num_beams=num_beams)
            contributions.begin(inputs["attention_mask"], [len(output) for output in outputs])
            for maps in attention_maps(inner, inputs, outputs):
                attention = named_attention(inner, tokenizer, maps)
                for kind in KINDS:
                    figures = measure(attention, kind)
                    sums[kind] = sums.get(kind, torch.zeros_like(figures)) + figures
                    rows[kind] += maps.of(kind).shape[2]
    return list(_heads(sums, rows, contributions.shares()))


def _heads(sums: dict[Kind, Tensor], rows: dict[Kind, int], shares: dict[Kind, Tensor]) -> Iterator[HeadHealth]:
    for kind in KINDS:
        means = sums[kind] / rows[kind]
        for layer in range(means.shape[1]):
            for head in range(means.shape[2]):
                share = float(shares[kind][layer, head])
                figures = [float(value) for value in means[:, layer, head]]
                yield HeadHealth(kind, layer, head, *figures, share, share < DEAD / means.shape[2])


def measure(attention: Attention, kind: Kind) -> Tensor:
    """Entropy, diagonality, rest and agreement of each head, summed over asking positions: [4, layers, heads]."""
    weights = attention.maps.of(kind).double()
    layers, heads, asking, asked = weights.shape
    visible = torch.arange(1, asking + 1) if kind == "decoder" else torch.full((asking,), asked)
    spread = entropy(weights) / visible.double().log().clamp(min=1e-9)
    spread = spread.masked_fill(visible == 1, 0.0)
    steps = torch.arange(asking).double() / max(asking - 1, 1)
    places = torch.arange(asked).double() / max(asked - 1, 1)
    away = (weights * (steps[:, None] - places[None]).abs()).sum(-1)
    special = torch.tensor([piece.special for piece in attention.sides(kind)[1].pieces])
    resting = weights[..., special].sum(-1)
    agreeing = torch.ones(layers, heads, asking, dtype=torch.double)
    if heads > 1:
        pairs = 1 - divergence(weights[:, :, None], weights[:, None]) / math.log(2)  # [layers, heads, heads, asking]
        agreeing = (pairs.sum(2) - 1) / (heads - 1)
    return torch.stack([one.sum(-1) for one in (spread, 1 - away, resting, agreeing)])


def entropy(weights: Tensor) -> Tensor:
    """-sum a ln a over the last axis, in nats; 0 ln 0 is 0."""
    return -torch.xlogy(weights, weights).sum(-1)


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence over the last axis, in nats: 0 when alike, ln 2 when apart."""
    return entropy((first + second) / 2) - (entropy(first) + entropy(second)) / 2


class Contributions:
    """Collects how large each head's part of its layer's output is: |z W^O| over real asking positions."""

    def __init__(self, modules: dict[Kind, list[nn.Module]]) -> None:
        self.sums = {
            kind: [torch.zeros(head_count(one), dtype=torch.double) for one in modules[kind]] for kind in modules
        }
        self.on = False
        self.masks: dict[Kind, Tensor] = {}

    def begin(self, source_mask: Tensor, lengths: Sequence[int]) -> None:
        """Take part in the next pass, over these sources and outputs of these lengths."""
        self.on = True
        written = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
        self.masks = {"encoder": source_mask.bool().cpu(), "decoder": written, "cross": written}

    def hook(self, kind: Kind, layer: int, heads: int) -> Callable[..., None]:
        """A hook on an output projection: its input holds the heads side by side."""

        def add(linear: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
            if not self.on:
                return
            joined = args[0][self.masks[kind].to(args[0].device)].float()  # [positions, H · d_v]
            weight = linear.weight.float().unflatten(1, (heads, -1))  # [d_model, H, d_v]
            parts = torch.einsum("phd,mhd->phm", joined.unflatten(1, (heads, -1)), weight)
            self.sums[kind][layer] += parts.norm(dim=-1).sum(0).double().cpu()

        return add

    def shares(self) -> dict[Kind, Tensor]:
        """Each head's share of its layer, [layers, heads], rows summing to 1."""
        return {
            kind: torch.stack([one / one.sum().clamp(min=1e-30) for one in sums]) for kind, sums in self.sums.items()
        }


@contextmanager
def measured_contributions(model: nn.Module) -> Iterator[Contributions]:
    """Measure contributions of every pass inside for which `begin` was called."""
    modules = attention_modules(model)
    contributions = Contributions(modules)
    with ExitStack() as stack:
        for kind, layers in modules.items():
            for layer, module in enumerate(layers):
                hook = contributions.hook(kind, layer, head_count(module))
                stack.callback(projections(module).out.register_forward_hook(hook).remove)
        yield contributions


@contextmanager
def without_head(model: nn.Module, kind: Kind, layer: int, head: int) -> Iterator[None]:
    """Inside, this head adds nothing wherever the model runs, decoding included; afterwards it is as before.

    The head's columns of W^O are zero for that time. A hook would do for the model itself, but not for a search that
    computes with the weights.
    """
    module = attention_modules(model)[kind][layer]
    weight, heads = projections(module).out.weight, head_count(module)
    size = weight.shape[1] // heads
    columns = slice(head * size, (head + 1) * size)
    before = weight.detach()[:, columns].clone()
    try:
        with torch.no_grad():
            weight[:, columns] = 0
        yield
    finally:
        with torch.no_grad():
            weight[:, columns] = before


def pruning_costs(
    model: nn.Module,
    translate: Callable[[], Sequence[str]],
    references: Sequence[str],
    heads: Iterable[HeadHealth],
    *,
    progress: Callable[[HeadHealth], None] | None = None,
) -> tuple[float, list[HeadHealth]]:
    """What each head is worth: BLEU of the whole model less BLEU without the head. Decodes once a head.

    Args:
        translate: decodes the corpus with `model` as it is at the time.
        references: one a sentence.
        progress: called after each head.

    Returns:
        BLEU of the whole model, and the heads with `bleu_loss`.
    """
    from sacrebleu.metrics import BLEU

    def score() -> float:
        return BLEU().corpus_score(list(translate()), [list(references)]).score

    whole = score()
    costed = []
    for health in heads:
        with without_head(model, health.kind, health.layer, health.head):
            costed.append(HeadHealth(**{**asdict(health), "bleu_loss": whole - score()}))
        if progress:
            progress(costed[-1])
    return whole, costed


def table(heads: Sequence[HeadHealth]) -> str:
    """The figures as text, a head a line; layers and heads count from 1, as on the page."""
    costed = any(head.bleu_loss is not None for head in heads)
    names = ["attention", "layer", "head", "entropy", "diagonality", "rest", "agreement", "contribution"]
    lines = ["  ".join([*names, *(["BLEU without it"] if costed else []), ""]).rstrip()]
    for one in heads:
        figures = [one.entropy, one.diagonality, one.rest, one.agreement, one.contribution]
        cells = [one.kind, str(one.layer + 1), str(one.head + 1), *(f"{figure:.3f}" for figure in figures)]
        line = "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True))
        cost = "" if one.bleu_loss is None else f"  {-one.bleu_loss:+15.2f}"
        lines.append(line + cost + ("  dead" if one.dead else ""))
    return "\n".join(lines)
