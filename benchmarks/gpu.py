"""Training and decoding on a GPU: speed, share of the peak (MFU), memory, host syncs and attention kernels.

    python benchmarks/gpu.py [--presets base big] [--tokens 4096 16384] [--rounds 3]

Without a GPU it says so and ends. `--device cpu --quick` runs the same code on a CPU with tiny sizes: a rehearsal.

Training is forward, backward, clipping and Adam (fused) over batches of made-up ids, a quarter of each source padding,
so that masks are real. Contenders change one thing at a time from bfloat16 autocast with sdpa and the fused loss:
float32 and TF32; the loss from whole logits; sdpa with no padding (so that its flash kernel can be taken); flash
attention, where the package is installed; `torch.compile`. MFU is operations as counted (training/costs.py) over the
peak of the GPU by its data sheet where it is known here, else over a measured matrix product.

Decoding translates 256 sentences, and one, into as many words as they have: our search in float32 and bfloat16, the
library's `generate`, and `generate` with a static cache, compiled into CUDA graphs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from common import keep, machine, ratios, take_turns

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.options import OptimizerOptions
from metaphrase.decoding.greedy import Task
from metaphrase.decoding.options import SearchOptions
from metaphrase.decoding.search import search
from metaphrase.decoding.weights import read_weights
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import costs
from metaphrase.training.measure import matrix_peak, wait
from metaphrase.training.schedule import build_optimizer, set_learning_rate

PEAKS = {"A100": 312, "H100": 989, "H200": 989, "A10": 125, "L4": 121, "L40S": 362, "V100": 125, "4090": 165}
"""10^12 dense bfloat16 operations a second by the data sheets (V100: float16)."""
LENGTH = 32
WARM_UP, STEPS = 5, 20


@dataclass(frozen=True)
class Way:
    """How a training step is computed."""

    half: bool = True
    tf32: bool = False
    attention: str = "sdpa"
    padded: bool = True
    fused_loss: bool = True
    compiled: bool = False


USUAL = "bf16, sdpa, fused loss"
WAYS = {
    USUAL: Way(),
    "float32": Way(half=False),
    "float32 with TF32": Way(half=False, tf32=True),
    "bf16, loss from whole logits": Way(fused_loss=False),
    "bf16, no padding": Way(padded=False),
    "bf16, flash attention": Way(attention="flash_attention_2"),
    "bf16, compiled": Way(compiled=True),
}


def made_up(config: MetaphraseConfig, rows: int, device: torch.device, *, padded: bool) -> dict[str, torch.Tensor]:
    """A batch of 32 x 32 tokens; with padding, every second source ends after half."""
    ids = torch.randint(4, config.vocab_size, (rows, LENGTH), device=device)
    mask = torch.ones_like(ids)
    if padded:
        mask[::2, LENGTH // 2 :] = 0
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.flip(1)}
    return batch if padded else {name: batch[name] for name in ("input_ids", "labels")}


def training(preset: str, tokens: int, way: Way, device: torch.device, vocabulary: int) -> Callable[[], object]:
    """A training step, ready to be taken again and again."""
    config = MetaphraseConfig.from_preset(preset, vocab_size=vocabulary)
    config._attn_implementation = way.attention
    torch.manual_seed(1)
    model = MetaphraseForConditionalGeneration(config).to(device).train()
    if way.compiled:
        model.compile(dynamic=True)
    optimizer = build_optimizer(model, OptimizerOptions())
    set_learning_rate(optimizer, 1e-4)
    batch = made_up(config, tokens // LENGTH, device, padded=way.padded)
    count = torch.tensor(float(batch["labels"].numel()), device=device)

    def step() -> None:
        torch.backends.cuda.matmul.allow_tf32 = way.tf32
        with torch.autocast(device.type, torch.bfloat16, enabled=way.half):
            loss = model(**batch, **({"num_items_in_batch": count} if way.fused_loss else {})).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def speed(step: Callable[[], object], amount: float, device: torch.device, steps: int) -> Callable[[], float]:
    """Measures how much a second: warmed up once, then `steps` steps a round."""
    warmed: list[bool] = []

    def measure() -> float:
        for _ in range(0 if warmed else WARM_UP):
            step()
        warmed.append(True)
        wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        return amount * steps / (time.perf_counter() - began)

    return measure


def peak_memory(step: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a step holds at most."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return torch.cuda.max_memory_allocated(device)


def host_syncs(step: Callable[[], object], device: torch.device) -> list[str]:
    """Where a step makes the processor wait for the GPU, each place with its count."""
    if device.type != "cuda":
        return []
    places: collections.Counter[str] = collections.Counter()
    with warnings.catch_warnings(record=True) as caught, _sync_warnings():
        warnings.simplefilter("always")
        step()
    for warning in caught:
        places[f"{warning.filename.rsplit('site-packages/', 1)[-1]}:{warning.lineno}"] += 1
    return [f"{place} x {count}" for place, count in places.most_common()]


@contextlib.contextmanager
def _sync_warnings() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attention_kernels(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Which attention operators a step runs, and how often."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        wait(device)
    names = ("flash_attention", "efficient_attention", "cudnn_attention", "attention_math", "flash_attn")
    found = {event.key: event.count for event in profile.key_averages() if any(name in event.key for name in names)}
    return {key: count for key, count in found.items() if "backward" not in key}


def data_sheet(device: torch.device) -> float | None:
    """Peak FLOP/s in bfloat16 of the GPU at hand."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for known, peak in PEAKS.items() if known in name.replace("-", " ").split()), None)


def bench_training(arguments: argparse.Namespace, device: torch.device, peak: float) -> list[dict[str, Any]]:
    records = []
    for preset in arguments.presets:
        config = MetaphraseConfig.from_preset(preset, vocab_size=arguments.vocabulary)
        a_token = costs.TRAINING * costs.forward_flops(config, LENGTH, LENGTH) / LENGTH
        for tokens in arguments.tokens:
            steps, failed = {}, {}
            for name, way in WAYS.items():
                try:
                    step = training(preset, tokens, way, device, arguments.vocabulary)
                    step()
                    steps[name] = step
                except (ImportError, RuntimeError, ValueError) as error:  # no package, no memory, no kernel for it
                    failed[name] = str(error).strip().splitlines()[0]
            contenders = {name: speed(step, tokens, device, arguments.steps) for name, step in steps.items()}
            measured = take_turns(contenders, arguments.rounds)
            print(f"\n{preset}, batches of {tokens:,} tokens a side; {a_token / 1e6:,.0f} MFLOP a target token")
            for name, values in measured.items():
                share = statistics.median(values) * a_token / peak
                memory = peak_memory(steps[name], device)
                record = {"preset": preset, "tokens": tokens, "way": name, "tokens_per_second": values, "mfu": share}
                record |= {"memory": memory, "ratio": statistics.median(ratios(measured, name, USUAL))}
                record |= {
                    "syncs": host_syncs(steps[name], device),
                    "attention": attention_kernels(steps[name], device),
                }
                records.append(record)
                print(
                    f"{name:32} {statistics.median(values):12,.0f} tokens/s  MFU {share:6.1%}  {record['ratio']:5.2f} x"
                    f"  {(memory or 0) / 1e9:6.2f} GB  {len(record['syncs'])} places that sync  {record['attention']}"
                )
            for name, sentence in failed.items():
                print(f"{name:32} not run: {sentence}")
    return records


def our_search(model: Any, ids: torch.Tensor, beams: int) -> Callable[[], object]:
    """Our search, writing as many words as the sources have."""
    weights = read_weights(model)
    ones = torch.ones(len(ids), dtype=torch.long, device=ids.device)
    task = Task(ones[:, None], ones, ones * LENGTH, torch.tensor([-1], device=ids.device))
    return lambda: search([weights], ids, torch.ones_like(ids), SearchOptions(num_beams=beams), task)


def library_search(model: Any, ids: torch.Tensor, beams: int, **how: Any) -> Callable[[], object]:
    """The library's `generate` to the same length."""
    length = {"min_new_tokens": LENGTH - 1, "max_new_tokens": LENGTH - 1}
    mask = torch.ones_like(ids)
    return lambda: model.generate(ids, attention_mask=mask, num_beams=beams, do_sample=False, **length, **how)


def bench_decoding(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    records = []
    config = MetaphraseConfig.from_preset(arguments.presets[0], vocab_size=arguments.vocabulary)
    torch.manual_seed(1)
    model = MetaphraseForConditionalGeneration(config).to(device).eval()
    half = MetaphraseForConditionalGeneration(config).to(device, torch.bfloat16).eval()
    for batch in arguments.batches:
        ids = torch.randint(4, config.vocab_size, (batch, LENGTH), device=device)
        for beams in (1, 5):
            ways = {
                "our search, bf16": our_search(half, ids, beams),
                "our search, float32": our_search(model, ids, beams),
                "generate, bf16": library_search(half, ids, beams),
            }
            if device.type == "cuda" and beams == 1:
                ways["generate, bf16, CUDA graphs"] = library_search(half, ids, 1, cache_implementation="static")
            measured = take_turns({name: speed(way, batch, device, 2) for name, way in ways.items()}, arguments.rounds)
            for name, values in measured.items():
                record = {"batch": batch, "beams": beams, "way": name, "sentences_per_second": values}
                record |= {"syncs": host_syncs(ways[name], device)}
                records.append(record)
                ratio = statistics.median(ratios(measured, name, "generate, bf16"))
                rate = statistics.median(values)
                print(f"batch {batch}, beams {beams}  {name:30} {rate:10,.1f} sentences/s {ratio:5.2f} x")
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["base", "big"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 1], help="sentences, in decoding")
    parser.add_argument("--vocabulary", type=int, default=37_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that it runs")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no GPU here: nothing is measured. (--device cpu --quick rehearses it.)")
        return
    if arguments.quick:
        arguments.presets, arguments.tokens, arguments.batches = ["tiny"], [128], [2]
        arguments.vocabulary, arguments.rounds, arguments.steps = 200, 1, 1
        for name in [name for name, way in WAYS.items() if way.compiled]:
            del WAYS[name]  # compiling takes a minute
    device = torch.device(arguments.device)
    measured_peak = matrix_peak(device, half=device.type == "cuda")
    peak = data_sheet(device) or measured_peak
    print(machine(torch.get_num_threads()))
    print(f"{measured_peak / 1e12:.2f} TFLOP/s in a matrix product; MFU is of {peak / 1e12:.2f}")
    record = {
        "machine": machine(torch.get_num_threads()),
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "matrix_product": measured_peak,
        "peak": peak,
        "training": bench_training(arguments, device, peak),
        "decoding": bench_decoding(arguments, device),
    }
    if not arguments.quick:
        print(f"Kept in {keep('gpu', record)}")


if __name__ == "__main__":
    main()
