"""Adam and its learning rate: section 5.3 of "Attention Is All You Need" (arXiv:1706.03762).

    lrate = d_model^-0.5 · min(step^-0.5, step · warmup^-1.5)          (equation 3)

which is a straight rise to d_model^-0.5 · warmup^-0.5 in `warmup` updates, then a fall with the inverse square root.
The rate is a function of the number of updates made, and of nothing else: not of processes, not of accumulation, and
an update that was skipped does not count. So it has no state to save.
"""

from __future__ import annotations

import torch

from metaphrase.configuration.options import OptimizerOptions


def learning_rate(update: int, *, peak: float, warmup: int) -> float:
    """Learning rate of an update, counted from 1 (equation 3, with its highest value given as `peak`).

    Before the first update (0) it is 0. Without warm-up the fall starts at the first update.
    """
    if update <= 0:
        return 0.0
    warmup = max(1, warmup)
    return peak * min(update / warmup, (warmup / update) ** 0.5)


def peak_learning_rate(options: OptimizerOptions, d_model: int) -> float:
    """The highest learning rate: the one asked for, or the paper's d_model^-0.5 · warmup^-0.5."""
    if options.learning_rate is not None:
        return options.learning_rate
    return (d_model * max(1, options.warmup)) ** -0.5


def build_optimizer(model: torch.nn.Module, options: OptimizerOptions) -> torch.optim.AdamW:
    """Adam; with `weight_decay`, the decoupled kind, for matrices only. Without it AdamW is plain Adam.

    The learning rate is 0 until `set_learning_rate` is called.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=tuple(options.betas),
        eps=options.epsilon,
        fused=bool(parameters),  # one pass over the moments: a quarter of the time on a CPU, and no small kernels
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
