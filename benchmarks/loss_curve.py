"""Does speed change what is learned? The training loss of the fast paths beside their slow twins and Marian.

All start from the same weights (Marian's by name; it has its own table of positions) and see the same batches and
learning rates in the same order. `fast` is what `metaphrase train` does on two threads: compiled kernels, each half of
a batch in a thread of its own. `slow` takes torch's operations and dropout, a loss from whole logits
and Adam in a loop over parameters. Both run with two seeds of dropout: the fast path may differ from the slow one by
as much as the slow one does from itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import keep, machine

from training import TOKENS, encoded_pairs, marian, ours, prepare

PEAK, WARM_UP = 2e-3, 50


def batches(pairs, updates: int) -> Iterator[dict]:
    """The first batches of the first epoch."""
    from metaphrase.training.data.batching import collate, plan_epoch

    plan = plan_epoch(pairs.source_lengths, pairs.target_lengths, tokens=TOKENS, seed=1, epoch=0)
    for update in range(updates):
        yield collate(pairs[plan[update % len(plan)]])


def rate(update: int) -> float:
    """Linear warm-up, then the inverse square root."""
    return PEAK * min(update / WARM_UP, (WARM_UP / update) ** 0.5)


def curve(model, learn, optimizer, pairs, updates: int, seed: int) -> list[float]:
    """The training loss a token at each update."""
    import torch

    torch.manual_seed(seed)
    losses = []
    for update, batch in enumerate(batches(pairs, updates), start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate(update)
        loss = learn(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def learn_in_halves(model, batch):
    """The gradient from the fused loss, in two threads."""
    from metaphrase.training.objective import plain_loss
    from metaphrase.training.parts import add_gradient

    return add_gradient(model, batch, (batch["labels"] != -100).sum(), plain_loss, 2)


def learn_whole(model, batch):
    """The gradient from whole logits, as autograd has it."""
    loss = loss_from_logits(model, batch)
    loss.backward()
    return loss


def loss_from_logits(model, batch):
    """The loss from whole logits, as torch computes it."""
    from torch.nn.functional import cross_entropy

    logits = model(**batch, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)


def slow_twin(model):
    """The model with torch's own dropout."""
    from torch import nn

    from metaphrase.modeling.dropout import Dropout

    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, Dropout):
                setattr(module, name, nn.Dropout(child.p))
    return model


def contenders(pairs, vocabulary: int, folder: Path, updates: int) -> dict[str, list[float]]:
    """Every contender's curve."""
    import torch

    from metaphrase.training import kernels

    torch.manual_seed(0)
    start = ours(vocabulary, folder).state_dict()

    def fresh(model):
        known = model.state_dict()
        model.load_state_dict({name: start[name] for name in known if name in start}, strict=False)
        return model.train()

    def adam(model, fused):
        return torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=fused)

    curves = {}
    for seed in (1, 2):
        kernels.install()
        model = fresh(ours(vocabulary, folder))
        curves[f"fast, seed {seed}"] = curve(model, learn_in_halves, adam(model, True), pairs, updates, seed)
        kernels.remove()
        model = slow_twin(fresh(ours(vocabulary, folder)))
        curves[f"slow, seed {seed}"] = curve(model, learn_whole, adam(model, False), pairs, updates, seed)
    model = fresh(marian(vocabulary))
    curves["Marian"] = curve(model, learn_whole, adam(model, False), pairs, updates, 1)
    return curves


def gap(first: list[float], second: list[float]) -> float:
    """Mean distance of two curves over their second half, in nats a token."""
    half = len(first) // 2
    return statistics.fmean(abs(a - b) for a, b in zip(first[half:], second[half:], strict=True))


def draw(path: Path, curves: dict[str, list[float]]) -> None:
    """The curves, one over the other."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    styles = {"fast": ("tab:blue", "-"), "slow": ("tab:orange", "--"), "Marian": ("tab:green", ":")}
    for name, losses in curves.items():
        color, line = styles[name.split(",")[0]]
        axis.plot(range(1, len(losses) + 1), losses, line, color=color, label=name, linewidth=1.2, alpha=0.8)
    axis.set(xlabel="update", ylabel="training loss a target token, label smoothing 0.1 (nats)")
    axis.set_title("The fast paths learn what their slow twins learn")
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train.en and train.de; made-up pairs without it")
    parser.add_argument("--updates", type=int, default=100, help="updates of each contender (default: 100)")
    arguments = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory(prefix="metaphrase-bench-") as folder:
        prepare(arguments.data, Path(folder))
        pairs, tokenizer = encoded_pairs(Path(folder))
        curves = contenders(pairs, len(tokenizer), Path(folder), arguments.updates)
    gaps = {
        "fast to slow": gap(curves["fast, seed 1"], curves["slow, seed 1"]),
        "slow to slow, another seed": gap(curves["slow, seed 1"], curves["slow, seed 2"]),
        "fast to fast, another seed": gap(curves["fast, seed 1"], curves["fast, seed 2"]),
        "fast to Marian": gap(curves["fast, seed 1"], curves["Marian"]),
    }
    for name, losses in curves.items():
        print(
            f"{name:<14} loss {losses[0]:.3f} at first, {statistics.fmean(losses[-10:]):.3f} over the last ten updates"
        )
    for name, value in gaps.items():
        print(f"{name:<28} {value:.4f} nats apart on average, second half")
    record = {"machine": machine(torch.get_num_threads()), "updates": arguments.updates, "curves": curves, "gaps": gaps}
    path = keep("loss-curve", record)
    draw(path.with_suffix(".png"), curves)
    print(f"Kept in {path}")


if __name__ == "__main__":
    main()
