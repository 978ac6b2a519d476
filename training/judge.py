"""Evaluation during training: loss over the whole validation set, greedy translations of its first sentences."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from accelerate import Accelerator

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.configuration.options import RunOptions
from metaphrase.training import evaluate, states
from metaphrase.training.data.corpus import EvaluationSet
from metaphrase.training.log import TrainLog
from metaphrase.training.loop import Progress

SAMPLES = 3
"""Translations that a record of the log shows."""


class Judge:
    """Scores a model on the validation set, always in the same way, and remembers which update was best.

    `metric` names what chooses: the first of `evaluation.metrics`, or the loss where there is none.
    """

    def __init__(
        self,
        texts: EvaluationSet | None,
        tokenizer: Any,
        options: RunOptions,
        config: MetaphraseConfig,
        accelerator: Accelerator,
        log: TrainLog,
    ) -> None:
        self.tokenizer, self.options, self.accelerator, self.log = tokenizer, options, accelerator, log
        self.metric = options.evaluation.metrics[0] if options.evaluation.metrics else "loss"
        self.head = texts.head(options.evaluation.sentences) if texts is not None else None
        limit = config.max_position_embeddings if config.position_embedding_type == "learned" else None
        tokens = options.batches.tokens
        self.loss = evaluate.loss_batches(texts, tokenizer, tokens=tokens, longest=limit) if texts is not None else None

    def score(self, model: torch.nn.Module) -> dict[str, Any]:
        """`loss`, `perplexity`, `tokens`, each metric, `samples`; `score` is the number that chooses.

        Every process calls it and gets the same result. No random state is changed.
        """
        if self.loss is None or self.head is None:
            return {"score": math.nan, "loss": math.nan}
        random = states.random_states()
        model.eval()
        result: dict[str, Any] = evaluate.validation_loss(model, self.loss, self.accelerator)
        if self.options.evaluation.metrics:
            scores, outputs = evaluate.score_set(
                model,
                self.tokenizer,
                self.head,
                self.options.evaluation.metrics,
                self.accelerator,
                num_beams=1,
                batch_tokens=self.options.batches.tokens,
            )
            result.update(scores)
            result["samples"] = [
                {"source": source, "reference": references[0], "output": output}
                for source, references, output in zip(
                    self.head.sources[:SAMPLES], self.head.references[:SAMPLES], outputs[:SAMPLES], strict=True
                )
            ]
        if self.options.evaluation.attention:
            result["attention"] = self.attention_health(model)
        result["score"] = result["loss"] if self.metric == "loss" else result[self.metric]["score"]
        states.restore_random_states(random)
        return result

    def attention_health(self, model: torch.nn.Module) -> dict[str, Any]:
        """Of each kind of attention: mean entropy of its heads (0 looks at one place, 1 at all alike), dead heads."""
        if not self.accelerator.is_main_process:
            return {}
        from metaphrase.inspection.health import summarize

        heads = summarize(model, self.tokenizer, self.head.sources[: self.options.evaluation.attention])
        health = {}
        for kind in dict.fromkeys(head.kind for head in heads):
            own = [head for head in heads if head.kind == kind]
            health[kind] = {
                "entropy": round(sum(head.entropy for head in own) / len(own), 4),
                "dead": [[head.layer, head.head] for head in own if head.dead],
            }
        return health

    def evaluate(self, model: torch.nn.Module, progress: Progress) -> None:
        """Score the model as it is after `progress.updates`, and enter the result."""
        began = time.monotonic()
        result = self.score(model)
        best = self.best(progress)
        gain = best is None or self.rank(result) < self.rank(best)
        progress.without_gain = 0 if gain else progress.without_gain + 1
        progress.evaluated = progress.updates
        entry = {"update": progress.updates, "score": result["score"], "loss": result["loss"]}
        progress.evaluations.append(entry)
        scored = self.options.evaluation.metrics
        flat = {name: value["score"] if name in scored else value for name, value in result.items()}
        seconds = round(time.monotonic() - began, 2)
        self.log.write({"kind": "evaluation", "update": progress.updates, **flat, "evaluation_seconds": seconds})
        if self.loss is not None:
            numbers = ", ".join(f"{name} {flat[name]:.2f}" for name in self.options.evaluation.metrics)
            self.log.say(
                f"update {progress.updates:,}: validation loss {flat['loss']:.4f}, perplexity {flat['perplexity']:.2f}"
                f"{', ' + numbers if numbers else ''}{' (best)' if gain else ''}, {seconds:.0f} s"
            )

    def rank(self, entry: dict[str, Any]) -> tuple[float, float]:
        """Sorts results from the best to the worst: by the score, equal ones by the loss, NaN last."""
        sign = 1 if self.metric in evaluate.LOWER_IS_BETTER else -1
        score, loss = sign * entry["score"], entry["loss"]
        return math.inf if math.isnan(score) else score, math.inf if math.isnan(loss) else loss

    def ranked(self, progress: Progress) -> list[dict[str, Any]]:
        """Evaluations from the best to the worst; of equal ones the earlier is better."""
        return sorted(progress.evaluations, key=lambda entry: (self.rank(entry), entry["update"]))

    def best(self, progress: Progress) -> dict[str, Any] | None:
        """The best evaluation so far."""
        ranked = self.ranked(progress)
        return ranked[0] if ranked else None

    def best_updates(self, progress: Progress, number: int) -> list[int]:
        """Updates of the best evaluations, the best first; at least one."""
        return [entry["update"] for entry in self.ranked(progress)[: max(1, number)]]
