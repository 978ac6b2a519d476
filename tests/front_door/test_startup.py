"""What a start costs: nothing heavy is imported before it is needed, and the package adds little to transformers."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "datasets", "accelerate", "evaluate", "sacrebleu", "numpy", "pandas", "matplotlib"}
FOR_TRAINING = {"datasets", "evaluate", "sacrebleu", "pandas", "matplotlib", "tensorboard"}
MOST = 0.3
"""Seconds that `import metaphrase` may add to `import transformers`."""


def modules(script: str) -> set[str]:
    """Top-level modules that are there after a script."""
    script = f"import sys\n{script}\nprint('LOADED', *{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_import_adds_little_to_transformers():
    """Counted in processor time: other work on the machine does not count."""
    script = "import time, transformers; t = time.process_time(); import metaphrase; print(time.process_time() - t)"
    times = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
        times.append(float(done.stdout))
    assert statistics.median(times) <= MOST


def test_import_after_transformers_brings_nothing_else():
    with_us, without = modules("import transformers, metaphrase"), modules("import transformers")
    assert not (with_us - without) & HEAVY


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--help"],
        ["doctor", "data", "--help"],
        ["attend", "--help"],
        ["publish", "--help"],
        ["train", "multi30k"],
        ["plan", "multi30k_en_de", "--gpus", "0"],
        ["train", "multi30k_en_de", "--batches.tokens", "few"],
        ["translate", "no-such-folder"],
        ["tarin"],
    ],
    ids=" ".join,
)
def test_help_and_mistakes_come_first(words):
    assert not modules(f"import metaphrase.cli as c; c.main({words})") & HEAVY


def test_using_a_model_does_not_import_what_training_needs():
    script = "from metaphrase import MetaphraseForConditionalGeneration, translate"
    assert not modules(script) & FOR_TRAINING
