"""The end of a run: which weights win, the one scoring of the test split, and the result folder."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers.utils import logging

from metaphrase.configuration.options import RunOptions
from metaphrase.modeling.companions import weights_digest
from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration
from metaphrase.training import checkpoint, evaluate, kernels, states
from metaphrase.training.card import write_card
from metaphrase.training.curves import draw_curves
from metaphrase.training.folder import CHECKPOINTS, RESULTS
from metaphrase.training.judge import Judge
from metaphrase.training.log import NAME as LOG
from metaphrase.training.loop import Progress
from metaphrase.training.material import Material
from metaphrase.training.running_mean import NAME as MEAN
from metaphrase.training.snapshot import MODEL


@dataclass
class Run:
    """All that the end of a run looks back on."""

    folder: Path
    recipe_name: str
    command: str | None
    options: RunOptions
    material: Material
    accelerator: Accelerator
    judge: Judge


def finish(run: Run, model: MetaphraseForConditionalGeneration, progress: Progress, epochs: float) -> None:
    """Choose the final weights, score the test split once, and write the result folder.

    Every process takes part in scoring; the main one writes.

    Args:
        model: the trained model; its configuration is taken, its weights come from the checkpoints.
        epochs: passes over the training pairs that were made.
    """
    folder, accelerator = run.folder, run.accelerator
    final = MetaphraseForConditionalGeneration(model.config).to(accelerator.device)
    final.generation_config = model.generation_config
    name, validation = choose(final, run, progress)
    if accelerator.is_main_process:
        logging.disable_progress_bar()
        final.save_pretrained(folder)
        logging.enable_progress_bar()
        run.material.tokenizer.save_pretrained(folder)
    test, lines = score_test(final, run)
    if accelerator.is_main_process:
        draw_curves(folder / LOG, folder / "curves.png", run.judge.metric)
        results = {
            "name": folder.resolve().name,
            "recipe": run.recipe_name,
            "command": run.command,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "weights": weights_digest(folder),
            **describe(run, final, progress, epochs),
            "validation": validation,
            "test": test,
            "versions": versions(),
            "hardware": hardware(accelerator),
            "licence": run.options.licence,
            "limits": limits(run.options),
        }
        results["data"]["test_pairs"] = lines
        results["training"]["final"] = name
        checkpoint.write_file(folder / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        write_card(folder, results)
    accelerator.wait_for_everyone()


def describe(run: Run, final: MetaphraseForConditionalGeneration, progress: Progress, epochs: float) -> dict[str, Any]:
    """The parts of results.json that say what was learned from, by what, and how."""
    options, accelerator = run.options, run.accelerator
    preset = options.model.get("preset", "base")
    best = run.judge.best(progress)
    more = [{"path": one.path, "source": one.source, "target": one.target} for one in options.data.more]
    return {
        "data": {
            "path": options.data.path,
            "source": options.data.source,
            "target": options.data.target,
            **({"more": more} if more else {}),
            "train_pairs": run.material.pairs or run.material.report.kept,
            "dropped": run.material.report.dropped,
            "validation_pairs": len(run.material.validation) if run.material.validation is not None else 0,
        },
        "tokenizer": {
            "kind": options.tokenizer.kind,
            "vocab_size": len(run.material.tokenizer),
            "path": options.tokenizer.path,
        },
        "model": {"parameters": final.num_parameters(), **options.model, "preset": preset},
        "training": {
            "updates": progress.updates,
            "skipped_updates": progress.skipped,
            "out_of_memory_updates": progress.out_of_memory,
            "epochs": round(epochs, 2),
            "minutes": round(progress.seconds / 60, 2),
            "tokens_per_second": round(progress.target_tokens / max(1e-9, progress.training_seconds), 1),
            "target_tokens": progress.target_tokens,
            "batch_tokens": options.batches.tokens,
            "accumulation": options.batches.accumulation,
            "processes": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "seed": options.seed,
            "best_update": best["update"] if best else progress.updates,
        },
    }


def choose(
    final: MetaphraseForConditionalGeneration, run: Run, progress: Progress
) -> tuple[str, dict[str, Any] | None]:
    """Load the best of these into `final`, and say which one won: the checkpoint with the best score, the average of
    the best ones, and the running mean where one was kept. Of equal ones the first wins."""
    root, options, judge = run.folder / CHECKPOINTS, run.options, run.judge
    here = dict(checkpoint.list_checkpoints(root))
    best = [update for update in judge.best_updates(progress, options.checkpoints.keep_best) if update in here]
    if not best:  # nothing was ever scored
        best = [max(here)]
    candidates: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        f"checkpoint-{best[0]}": lambda: states.load_tensors(here[best[0]] / MODEL)
    }
    if len(best) > 1:
        candidates[f"average of {len(best)}"] = lambda: evaluate.average([here[update] / MODEL for update in best])
    if (newest := here[max(here)] / MEAN).exists():
        candidates["running mean"] = lambda: states.load_tensors(newest)
    results: dict[str, dict[str, Any]] = {}
    for name, load in candidates.items():
        states.load_model_tensors(final, load(), root)
        results[name] = judge.score(final)
    winner = min(results, key=lambda name: (judge.rank(results[name]), list(results).index(name)))
    if len(results) > 1:
        shown = ", ".join(f"{name} {result['score']:.2f}" for name, result in results.items())
        judge.log.say(f"Validation {judge.metric}: {shown}. The final model is {winner}.")
    states.load_model_tensors(final, candidates[winner](), root)
    validation = {k: v for k, v in results[winner].items() if k not in ("samples", "score", "attention")}
    return winner, validation or None


def score_test(final: MetaphraseForConditionalGeneration, run: Run) -> tuple[dict[str, Any] | None, int]:
    """Read the test split, for the first time, and score it once with beam search."""
    options, accelerator, log = run.options, run.accelerator, run.judge.log
    if not options.evaluation.metrics:
        return None, 0
    texts = run.material.read_test()
    if texts is None:
        return None, 0
    scores, _ = evaluate.score_set(
        final.eval(),
        run.material.tokenizer,
        texts,
        options.evaluation.metrics,
        accelerator,
        num_beams=options.evaluation.num_beams,
        length_penalty=options.evaluation.length_penalty,
        batch_tokens=options.batches.tokens,
        progress=accelerator.is_local_main_process,
    )
    for name, result in scores.items():
        log.say(f"Test ({len(texts):,} lines, beam {options.evaluation.num_beams}): {name} {result['score']:.2f}")
        log.say(f"  {result['signature']}")
    return {**scores, "num_beams": options.evaluation.num_beams}, len(texts)


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    names = ("metaphrase", "torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")
    known = {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
    return {**known, "kernels": kernels.compiler()} if kernels.compiler() else known


def hardware(accelerator: Accelerator) -> str:
    """What the run was computed on, in a few words."""
    if accelerator.device.type == "cuda":
        return f"{accelerator.num_processes} x {torch.cuda.get_device_name()}"
    return f"{accelerator.num_processes} x {torch.get_num_threads()} CPU threads ({processor_name()})"


def processor_name() -> str:
    """The CPU's name as the system tells it."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return name


def limits(options: RunOptions) -> str:
    """What the model is not fit for: what the recipe says, and what the run knows."""
    known = f"Trained on pairs of at most {options.data.max_length} tokens a side; longer texts are new to it."
    return f"{options.limits.strip()} {known}" if options.limits else known
