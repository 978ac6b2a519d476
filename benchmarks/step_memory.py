"""Peak memory of a training step beside Marian's, by vocabulary.

Each contender is a process of its own: 4 + 4 layers, d_model 128, one batch of 4,096 padded tokens, float32. What is
told is the highest resident memory during a step, less that before it, when weights, gradients and Adam's moments are
there. Ours is with compiled kernels. On two threads `metaphrase train` learns from two parts of the batch at once, and
holds a gradient for each.
Linux only: the high-water mark is reset through /proc.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import keep, machine, resident

from training import TOKENS, marian, ours

ROWS, LENGTH = TOKENS // 16, 16
PARTS = "metaphrase, 2 threads"
CONTENDERS = ("metaphrase", PARTS, "Marian")
MIB = 2**20


def peak_of_a_step(name: str, vocabulary: int) -> int:
    """Bytes that a step needs beside what stays."""
    import torch
    from loss_curve import loss_from_logits

    from metaphrase.training import kernels
    from metaphrase.training.objective import plain_loss
    from metaphrase.training.parts import add_gradient

    kernels.install()
    torch.set_num_threads(2 if name == PARTS else 1)
    with tempfile.TemporaryDirectory(prefix="metaphrase-bench-") as folder:
        model = marian(vocabulary) if name == "Marian" else ours(vocabulary, Path(folder))
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(rows: int) -> None:
        ids = torch.randint(4, vocabulary, (rows, LENGTH))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        tokens = torch.tensor(ids.numel())
        if name == PARTS:
            add_gradient(model, batch, tokens, plain_loss, 2)
        elif name == "Marian":
            loss_from_logits(model, batch).backward()
        else:
            plain_loss(model, batch, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(2)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step(ROWS)
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[10_000, 32_000])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(peak_of_a_step(arguments.child[0], int(arguments.child[1])))
        return
    measured: dict[str, dict[str, float]] = {}
    for vocabulary in arguments.vocabularies:
        row = {}
        for name in CONTENDERS:
            command = [sys.executable, __file__, "--child", name, str(vocabulary)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row[name] = int(done.stdout.split()[-1]) / MIB
        measured[str(vocabulary)] = row
        figures = "  ".join(f"{name} {value:,.0f} MiB" for name, value in row.items())
        ours_to_marian = " and ".join(f"{row[name] / row['Marian']:.2f}" for name in ("metaphrase", PARTS))
        print(f"vocabulary {vocabulary:,}  {figures}  {ours_to_marian} x", flush=True)
    print(f"Kept in {keep('step-memory', {'machine': machine(1), 'unit': 'MiB', 'measured': measured})}")


if __name__ == "__main__":
    main()
