"""Writes scale.md: growth and plans as measured (from benchmarks/results), and 8 and 512 GPUs and 10^9 pairs on paper.

    python docs/make_scale.py

No number is typed: measured ones are read from the newest records, the others are computed by training/costs.py and
training/assumed.py. A test holds the page against this script.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from textwrap import fill
from typing import Any

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.training import costs
from metaphrase.training.assumed import Assumptions

TARGET = Path(__file__).with_name("scale.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PAIRS = 10**9
LENGTH = 32
"""Tokens of a side; padding is left out, as batches of one length have next to none."""
BATCH = 3328
"""Tokens of a side in a batch: the paper's 25,000 on eight processes, as in the recipe wmt14_en_de."""
THREADS = 64
DISK = 1e9
"""Bytes a second that a disk writes."""
SORTED = 8 + 8 + 4
"""Bytes a pair while an epoch is planned: sorting keys, their order, and the order kept."""
LENGTHS = 8
"""Bytes a pair for the two lengths, held as long as a run lasts."""
SETTINGS = ((8, 1), (8, 16), (128, 1), (512, 1), (512, 4))
"""GPUs, and batches that each adds up before an update."""


def newest(name: str) -> tuple[Path, dict[str, Any]]:
    """The newest record of a benchmark."""
    path = sorted(RESULTS.glob(f"????-??-??-{name}.json"))[-1]
    return path, json.loads(path.read_text(encoding="utf-8"))


def exponent(points: list[dict[str, Any]], key: str, counted: str | None = None) -> float:
    """p of cost ~ size^p over the last step of an axis."""
    costs_of = [point["expected"][counted] if counted else point[key] for point in points[-2:]]
    return math.log(costs_of[1] / costs_of[0]) / math.log(points[-1]["size"] / points[-2]["size"])


def growth(scale: dict[str, Any]) -> str:
    rows = ["| changed | work | smallest | largest | time grows as | counted | memory grows as | counted |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for axis, series in scale["axes"].items():
        for work, points in series.items():
            ends = [f"{one['seconds'] * 1e3:,.0f} ms, {one['bytes'] / 1e6:,.0f} MB" for one in (points[0], points[-1])]
            powers = (
                exponent(points, "seconds"),
                exponent(points, "", "flops"),
                exponent(points, "bytes"),
                exponent(points, "", "bytes"),
            )
            name = f"{'d_model' if axis == 'width' else axis} {points[0]['size']:,} to {points[-1]['size']:,}"
            rows.append(f"| {name} | {work} | {ends[0]} | {ends[1]} | " + " | ".join(f"{p:.2f}" for p in powers) + " |")
    return "\n".join(rows)


def rates(scale: dict[str, Any]) -> dict[str, str]:
    """GFLOP/s at the sizes that the page speaks of, and how large what they hold is."""

    def rate(axis: str, work: str, size: int) -> float:
        point = next(one for one in scale["axes"][axis][work] if one["size"] == size)
        return point["expected"]["flops"] / point["seconds"] / 1e9

    batch = scale["axes"]["batch"]["training"]
    batches = [(rate("batch", "training", one["size"]), one["size"]) for one in batch]
    best, best_size = max(batches)
    wide = 1024
    stack = {f"{name}_layers": 3 for name in ("encoder", "decoder")}
    stack |= {f"{name}_ffn_dim": 4 * wide for name in ("encoder", "decoder")}
    widest = MetaphraseConfig(d_model=wide, vocab_size=8000, **stack)
    shown = {
        "short_rate": rate("length", "training", 8),
        "long_rate": rate("length", "training", 1024),
        "short_search": rate("length", "decoding", 8),
        "long_search": rate("length", "decoding", 1024),
        "few_rate": rate("vocabulary", "training", 32_000),
        "many_rate": rate("vocabulary", "training", 64_000),
        "thin_rate": rate("width", "training", 128),
        "wide_rate": rate("width", "training", 512),
        "one_rate": rate("batch", "training", 1),
        "best_rate": best,
        "most_rate": rate("batch", "training", 256),
    }
    sizes = {
        "cache": costs.FLOAT * 3 * 2 * 8 * 1024 * 2 * 256,  # layers, attentions, sentences, words, keys and values
        "chunk": costs.FLOAT * costs.LOSS_ROWS * 64_000,
        "moments": 3 * costs.FLOAT * costs.parameters(widest),
        "inner": costs.FLOAT * 256 * 32 * 1024,
    }
    return {
        **{name: f"{value:.0f}" for name, value in shown.items()},
        "over": f"{batch[-1]['bytes'] / batch[-1]['expected']['bytes']:.2f}",
        "libraries": size(batch[0]["bytes"] - batch[0]["expected"]["bytes"]),
        **{name: size(value) for name, value in sizes.items()},
        "best_size": f"{best_size:,}",
    }


PLANNED = {
    "tokens_per_second": ("target tokens a second", 1),
    "updates": ("updates made", 1),
    "minutes": ("minutes until trained", 1),
    "seconds": ("seconds of the whole command", 1),
    "memory": ("highest memory, MB", 1e6),
    "evaluation_seconds": ("seconds of an evaluation", 1),
}


def planning(recipe: str) -> str:
    """Means over the rounds of a record of benchmarks/planning.py, predicted beside shown."""
    _, record = newest(f"planning-{recipe}")
    rows = [f"| `{recipe}` | predicted | shown | predicted / shown |", "|---|---|---|---|"]
    for key, (name, unit) in PLANNED.items():
        sides = [[one[side][key] / unit for one in record["rounds"]] for side in ("predicted", "shown")]
        ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(*sides, strict=True))
        digits = 0 if sides[1][0] > 100 else 1
        predicted, shown = (f"{statistics.mean(side):,.{digits}f}" for side in sides)
        rows.append(f"| {name} | {predicted} | {shown} | {ratios} |")
    return "\n".join(rows)


def on_paper(preset: str, assumed: Assumptions) -> str:
    """A model on several numbers of GPUs."""
    config = MetaphraseConfig.from_preset(preset)
    a_batch = costs.TRAINING * BATCH // LENGTH * costs.forward_flops(config, LENGTH, LENGTH)
    rows = [
        f"| `{preset}`: GPUs x batches | target tokens an update | operations | gradients | efficiency "
        "| target tokens/s | a pass over 10^9 pairs | its updates |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for gpus, batches in SETTINGS:
        alone = assumed.update(config, 1, batches * a_batch, batches)
        update = assumed.update(config, gpus, batches * a_batch, batches)
        tokens = gpus * batches * BATCH
        speed = tokens / update.seconds
        cells = (
            f"{gpus} x {batches}",
            f"{tokens:,}",
            f"{update.learning * 1e3:,.0f} ms",
            f"{update.sending * 1e3:,.1f} ms",
            f"{alone.seconds / update.seconds:.0%}",
            f"{speed / 1e6:,.2f} M",
            span(PAIRS * LENGTH / speed),
            f"{PAIRS * LENGTH / tokens:,.0f}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def memory(presets: tuple[str, ...]) -> str:
    """What one GPU holds."""
    rows = ["| | weights | gradients | Adam | activations | loss | at most | at most, over 512 (FSDP) |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for preset in presets:
        config = MetaphraseConfig.from_preset(preset)
        shape = (BATCH // LENGTH, LENGTH, LENGTH)
        whole, piece = (costs.training_memory(config, *shape, shards=shards) for shards in (1, 512))
        parts = (whole.weights, whole.gradients, whole.optimizer, whole.activations, whole.loss, whole.peak, piece.peak)
        rows.append(f"| `{preset}` | " + " | ".join(size(part) for part in parts) + " |")
    return "\n".join(rows)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.3g} {unit}" if count < 100 else f"{count:,.0f} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def span(seconds: float) -> str:
    for unit, least in (("days", 172_800), ("h", 7200), ("min", 120)):
        if seconds >= least:
            return f"{seconds / {'days': 86_400, 'h': 3600, 'min': 60}[unit]:,.1f} {unit}"
    return f"{seconds:,.0f} s"


TEMPLATE = """# How cost grows, and how far it goes

Made by `docs/make_scale.py` from the records in `benchmarks/results` and the formulas in `training/costs.py` and
`training/assumed.py`; a test holds the page against the script. `metaphrase plan RECIPE --gpus N` does the same for a
run of your own.

## Measured on one thread

`python benchmarks/scale.py` ({scale_date}, {cpu}, commit {scale_commit}, torch {torch}; {peak} GFLOP/s in a plain
matrix product). One size is changed at a time, from 3 + 3 layers, d_model 256, vocabulary 8,000, sentences of 32
tokens. A training step has 2,048 tokens of a side, decoding 8 sentences. "Grows as" is p of cost ~ size^p over the last
doubling; "counted" is the same by the number of operations, and of bytes in weights, moments and activations.

{growth}

![Time of each size; dashed as counted](../benchmarks/results/{stem}-time.png)
![Memory of each size; dashed as counted](../benchmarks/results/{stem}-memory.png)

Where a curve leaves the count:

- **Length, training.** As counted. What grows a token is attention alone, which is little until sentences are as long
  as the model is wide: {short_rate} GFLOP/s at 8 tokens, {long_rate} at 1,024.
- **Length, decoding.** Faster than counted. A new word multiplies little and reads much: keys and values of every word
  before it and of the source, {cache} for these 8 sentences at 1,024 words, which is more than a processor's cache
  holds. It waits for memory ({short_search} GFLOP/s at 8 words, {long_search} at 1,024). This curve showed a fault:
  the source's keys lay in strides, and a product with one query copied them at each step, nine times the time of the
  layer at 1,024 words, and almost three times at 14. They are laid out whole now, before the first step.
- **Vocabulary.** Nearly as counted. Memory does not grow with tokens x vocabulary, for the fused loss holds the logits
  of 256 positions at a time; at 64,000 entries these are {chunk}, which leave the cache ({few_rate} GFLOP/s at 32,000
  entries, {many_rate} at 64,000). Fewer rows starve the matrix product: left as it is.
- **d_model.** Small matrices are slow ({thin_rate} GFLOP/s at 128, {wide_rate} at 512), so that time at first grows
  less than counted; at 1,024 weights and Adam's moments, {moments}, are read and written each step.
- **Beams.** Less than counted: a step's calls and the encoder are paid once, however many beams there are.
- **Batch.** Small ones pay for calls and not for work ({one_rate} GFLOP/s for one sentence in training, {best_rate} for
  {best_size}). From there on time grows as the work does, or a little faster ({most_rate} GFLOP/s for 256 sentences,
  8,192 tokens), as tensors of the feed-forward layer, {inner} each, leave the cache. It is not the system's handing out
  of memory: with `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` at 8 GB the step took no less.
- **Memory.** A process holds more than is counted: libraries and buffers, {libraries} with one sentence, and what the
  allocator keeps between two uses, {over} times the count with 256. Training memory does not depend on how 2,048 tokens
  are cut into sentences.

## What a plan is worth

`python benchmarks/planning.py RECIPE --minutes M` plans a run, makes it, and compares.

{multi30k}

{g2p}

A plan lets a search write as many words as the reference has. A model that has learned for a minute only goes on to the
limit of source + 50, so the first evaluations of a run take longer than planned, and the later ones do not.

## On paper: 8 and 512 GPUs

Assumed: a GPU of {assumed.gpu_tflops:,.0f} TFLOP/s in bfloat16 of which training reaches {mfu};
{assumed.machine} GPUs a machine, {assumed.link_inside:,.0f} GB/s from one to the next inside and
{assumed.link:,.0f} GB/s between machines; {assumed.memory_bandwidth:,.0f} GB/s between a GPU and its memory, for Adam;
{assumed.launch:.0f} µs to start a piece of work. Vocabulary {vocabulary}, sentences of {length} tokens, batches of
{batch} tokens a side on each GPU. Nothing here was run on a GPU.

    an update      max(batches x F / (peak x MFU), batches x pieces x launch) + gradients + step
    F              3 x operations of a forward pass over the batch ({a_token} MFLOP a target token for base)
    gradients      2 (n - 1) / n x 4 bytes x parameters / link: a ring, after the backward pass, nothing overlapping
    step           32 bytes x parameters / memory bandwidth: gradients, weights and moments read and written
    efficiency     tokens a second over n times those of one GPU with as many batches an update

{base}

{big}

- **Compute.** A pass over 10^9 pairs of {length} tokens is {whole} operations for base.
- **Communication.** Every process brings {base_gradients} of gradients for base, {big_gradients} for big, whatever the
  number of GPUs: inside a machine that is little beside the work, between machines it is more than the work of one
  batch. Adding up more batches before an update pays for it (`batches.accumulation`), and so does a larger
  `batches.tokens`. `batches.max_out_of_memory: 0` lets gradients travel during the backward pass, which hides at most
  as much as that takes.
- **How large an update may be.** Ott et al. (2018) learned well from 400,000 tokens an update, with a higher learning
  rate: 128 GPUs with a batch each. 512 GPUs have to take {quarter} tokens each to stay there, and wait for the links
  most of the time: {quarter_gain} times the speed of 128. For these models the step from 128 to 512 GPUs needs faster
  links, gradients that travel meanwhile, or larger updates, whose learning has to be looked at first.
- **Uneven shares.** Each GPU has a batch of its own, and all wait for the slowest; batches of one token budget differ
  in cost by their lengths. `metaphrase plan --gpus N` counts it on the real batches.
- **The smallest batch.** Below about {smallest} target tokens a batch, a GPU that learns base waits for the start of
  work and not for the work.

## Memory of one GPU

{memory}

Activations are counted in float32; bfloat16 halves some and keeps copies of others. Weights, gradients and moments are
float32 under every precision. With FSDP a GPU holds a 512th of them, and receives each layer's weights twice an update:
3 (n - 1) / n in place of 2 (n - 1) / n sent. Neither model needs it; it is for larger ones.

## Data: 10^9 pairs

Measured on one thread by `python benchmarks/feeding.py` ({feeding_date}, commit {feeding_commit}), {fed_pairs} pairs of
{fed_tokens} target tokens; carried on in proportion, the planning by the slowing that it showed from one million pairs
to four.

| | a second, one thread | 10^9 pairs |
|---|---|---|
| reading and checking | {reading} pairs | {reading_all}, one thread |
| tokenizing | {tokenizing} pairs | {tokenizing_all}, {threads} threads |
| planning an epoch | {planning} pairs, at {planned} | {planning_all}, one thread |
| fetching and padding batches | {batching} pairs | as training goes |

- **On disk.** {bytes_a_pair} bytes a pair in the cache, text and ids: {disk} at these lengths, once a machine.
- **In memory.** Every process holds the lengths, {lengths}, and {sorting} more while it plans an epoch: those of a
  machine {machine_memory}. That is the limit of a corpus that is shuffled whole. Beyond about 10^8 pairs
  `data.streaming` plans windows of `data.window` pairs, and memory no longer grows.
- **Feeding.** A GPU at the speed above takes {wanted} pairs of base a second, and a thread gives {batching}. Batches
  are made between updates and not beside them, so a GPU waits {waits} as long as it works. That is what to mend first
  on a GPU.
- **Checkpoints.** {base_checkpoint} for base, {big_checkpoint} for big, whatever the number of GPUs; {big_written} at
  {disk_speed}/s, written by one process while the others wait.
- **Going on after a fault.** A run resumes at the pair where it stopped, with any number of GPUs; what is lost is the
  time since the last checkpoint.
"""


def page() -> str:
    scale_path, scale = newest("scale")
    feeding = newest("feeding")[1]
    fed, assumed = feeding["medians"], Assumptions()
    base, big = (MetaphraseConfig.from_preset(name) for name in ("base", "big"))
    a_token = costs.TRAINING * costs.forward_flops(base, LENGTH, LENGTH) / LENGTH
    few, many = sorted(int(name.split("_")[1]) for name in fed if name.startswith("planning_"))
    slower = fed[f"planning_{few}"] / fed[f"planning_{many}"]  # a pair, at so many times as many pairs
    planning_seconds = PAIRS / fed[f"planning_{many}"] * slower ** math.log(PAIRS / many, many / few)
    gpu = assumed.update(base, assumed.machine, a_token * BATCH, 1)
    wanted = BATCH / LENGTH / gpu.seconds
    full_speed = 128 * BATCH / assumed.update(base, 128, a_token * BATCH, 1).seconds
    quarter_speed = 128 * BATCH / assumed.update(base, 512, a_token * BATCH / 4, 1).seconds
    launches = costs.kernels(base) * assumed.launch * 1e-6
    text = TEMPLATE.format(
        scale_date=scale["machine"]["date"][:10],
        cpu=scale["machine"]["cpu"],
        scale_commit=scale["machine"]["commit"],
        torch=scale["machine"]["versions"]["torch"],
        peak=f"{scale['gemm_peak'] / 1e9:,.0f}",
        growth=growth(scale),
        **rates(scale),
        stem=scale_path.stem,
        multi30k=planning("multi30k_en_de"),
        g2p=planning("g2p_cmudict"),
        assumed=assumed,
        mfu=f"{assumed.mfu:.0%}",
        vocabulary=f"{base.vocab_size:,}",
        batch=f"{BATCH:,}",
        length=LENGTH,
        a_token=f"{a_token / 1e6:,.0f}",
        base=on_paper("base", assumed),
        big=on_paper("big", assumed),
        whole=f"{PAIRS * LENGTH * a_token:.1e}",
        base_gradients=size(costs.gradient_bytes(base)),
        big_gradients=size(costs.gradient_bytes(big)),
        quarter=f"{BATCH // 4:,}",
        quarter_gain=f"{quarter_speed / full_speed:.1f}",
        smallest=f"{launches * assumed.gpu_tflops * 1e12 * assumed.mfu / a_token:,.0f}",
        memory=memory(("base", "big")),
        feeding_date=feeding["machine"]["date"][:10],
        feeding_commit=feeding["machine"]["commit"],
        fed_pairs=f"{fed['pairs']:,.0f}",
        fed_tokens=f"{fed['target_tokens_a_pair']:.0f}",
        reading=f"{fed['reading']:,.0f}",
        reading_all=span(PAIRS / fed["reading"]),
        tokenizing=f"{fed['tokenizing']:,.0f}",
        tokenizing_all=span(PAIRS / fed["tokenizing"] / THREADS),
        threads=THREADS,
        planning=f"{fed[f'planning_{many}']:,.0f}",
        planned=f"{many:,}",
        planning_all=span(planning_seconds),
        batching=f"{fed['batching']:,.0f}",
        disk=size(fed["bytes_a_pair"] * PAIRS),
        bytes_a_pair=f"{fed['bytes_a_pair']:,.0f}",
        lengths=size(LENGTHS * PAIRS),
        sorting=size(SORTED * PAIRS),
        machine_memory=size(assumed.machine * (LENGTHS + SORTED) * PAIRS),
        wanted=f"{wanted:,.0f}",
        waits=f"{wanted / fed['batching']:.0%}",
        base_checkpoint=size(costs.checkpoint_bytes(base)),
        big_checkpoint=size(costs.checkpoint_bytes(big)),
        big_written=span(costs.checkpoint_bytes(big) / DISK),
        disk_speed=size(DISK),
    )
    return "\n\n".join(wrapped(block) for block in text.split("\n\n"))


def wrapped(block: str) -> str:
    """Prose at 120 columns; tables, formulas, headings and pictures as they are."""
    if block.startswith(("|", "#", "    ", "!")):
        return block
    if block.startswith("- "):
        points = block.rstrip("\n").replace("\n- ", "\n\n- ").split("\n\n")
        lines = [fill(" ".join(point.split()), 120, subsequent_indent="  ", break_on_hyphens=False) for point in points]
        return "\n".join(lines) + ("\n" if block.endswith("\n") else "")
    return fill(" ".join(block.split()), 120, break_on_hyphens=False)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
