"""What a model costs, counted from its sizes: parameters, floating-point operations, memory, bytes to send and store.

d = d_model, h heads of d_k and d_v, f = d_ff, N layers in each stack, V vocabulary entries, P learned positions;
B pairs of S source and T target positions, padding counted. Nothing is built or measured here. Tests hold each formula
against a real model: parameters and operations must be equal, memory must be near.
"""

from __future__ import annotations

from dataclasses import dataclass

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig

FLOAT = 4
"""Bytes of a float32: weights, gradients and Adam's moments are float32 under every `mixed_precision`."""
TRAINING = 3
"""A training step costs so many forward passes: each product of the forward pass has two in the backward pass."""
LOSS_ROWS = 256
"""Positions whose logits the fused loss holds at a time on a CPU (`modeling/loss.py`)."""


def attention_parameters(d: int, h: int, d_k: int, d_v: int) -> int:
    """W^Q, W^K, W^V and W^O with their biases."""
    return 2 * (d * h * d_k + h * d_k) + (d * h * d_v + h * d_v) + (h * d_v * d + d)


def parameters(config: MetaphraseConfig) -> int:
    """Parameters of a model, each shared matrix once."""
    d, norm = config.d_model, 2 * config.d_model
    total = 0
    for layers, h, f, attentions in (
        (config.encoder_layers, config.encoder_attention_heads, config.encoder_ffn_dim, 1),
        (config.decoder_layers, config.decoder_attention_heads, config.decoder_ffn_dim, 2),
    ):
        d_k, d_v = config.head_dims(h)
        feed_forward = (d * f + f) + (f * d + d)
        total += layers * (attentions * attention_parameters(d, h, d_k, d_v) + feed_forward + (attentions + 1) * norm)
        total += norm if config.normalize_before else 0
        total += config.max_position_embeddings * d if config.position_embedding_type == "learned" else 0
    matrices = 1 + (not config.share_encoder_decoder_embeddings) + (not config.tie_word_embeddings)
    return total + matrices * config.vocab_size * d


def forward_flops(config: MetaphraseConfig, source: int, target: int) -> int:
    """Floating-point operations of a forward pass over one pair: two for each multiplication in a matrix product."""
    h = config.decoder_attention_heads
    decoder = config.decoder_layers * (
        _attention_flops(config, h, target, target)
        + _attention_flops(config, h, target, source)
        + 4 * target * config.d_model * config.decoder_ffn_dim
    )
    return encoder_flops(config, source) + decoder + 2 * target * config.d_model * config.vocab_size


def encoder_flops(config: MetaphraseConfig, source: int) -> int:
    """The encoder's part of `forward_flops`."""
    attention = _attention_flops(config, config.encoder_attention_heads, source, source)
    return config.encoder_layers * (attention + 4 * source * config.d_model * config.encoder_ffn_dim)


def _attention_flops(config: MetaphraseConfig, h: int, asking: int, asked: int) -> int:
    d = config.d_model
    d_k, d_v = config.head_dims(h)
    projections = asking * d * h * d_k + asked * d * h * (d_k + d_v) + asking * h * d_v * d
    return 2 * (projections + h * asking * asked * (d_k + d_v))


def decoding_flops(config: MetaphraseConfig, source: int, target: int, beams: int = 1) -> int:
    """Operations of a search that writes `target` tokens on each of its beams, the source's keys and values once."""
    d, h, f = config.d_model, config.decoder_attention_heads, config.decoder_ffn_dim
    d_k, d_v = config.head_dims(h)
    width = h * (d_k + d_v)
    keys = config.decoder_layers * 2 * source * d * width
    a_token = config.decoder_layers * (6 * d * width + 4 * d * f) + 2 * d * config.vocab_size
    looks = config.decoder_layers * 2 * width * (target * (target + 1) // 2 + target * source)
    return encoder_flops(config, source) + keys + beams * (target * a_token + looks)


def activation_bytes(config: MetaphraseConfig, rows: int, source: int, target: int) -> int:
    """What a training step's forward pass keeps for its backward pass, in float32, with the default backend.

    A row of a layer keeps: a sub-layer's dropout mask, the sum that its LayerNorm reads and the result (3 d), with two
    numbers of the LayerNorm; an attention's queries, keys, values and context, with a number a head; the inner f.
    Cross-attention keeps keys and values a source position. The fused loss keeps the gradients that it made.
    """
    d, N_e, N_d = config.d_model, config.encoder_layers, config.decoder_layers
    h = config.encoder_attention_heads
    width = h * sum(config.head_dims(h))
    a_source = 2 * d + N_e * (6 * d + 4 + 2 * width + h + config.encoder_ffn_dim)
    h = config.decoder_attention_heads
    width = h * sum(config.head_dims(h))
    a_source += N_d * width
    a_target = 2 * d + N_d * (9 * d + 6 + 3 * width + 2 * h + config.decoder_ffn_dim)
    masks = N_e * source * source + N_d * target * source
    ids = 2 * (source + target)
    return FLOAT * (rows * (source * a_source + target * a_target + masks + ids) + config.vocab_size * d)


def loss_bytes(config: MetaphraseConfig) -> int:
    """Room that the fused loss needs beside what it keeps: a chunk's logits twice, and a product as large as W."""
    return FLOAT * config.vocab_size * (2 * LOSS_ROWS + config.d_model)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that training holds, by what they are."""

    weights: int
    gradients: int
    optimizer: int
    running_mean: int
    activations: int
    loss: int

    @property
    def peak(self) -> int:
        """Gradients come as activations go: the most at one time is the larger of the two, on top of the rest."""
        held = self.weights + self.optimizer + self.running_mean
        return held + max(self.gradients, self.activations + self.loss)


def training_memory(
    config: MetaphraseConfig, rows: int, source: int, target: int, *, running_mean: bool = False, shards: int = 1
) -> TrainingMemory:
    """Memory of one process, for batches of at most this shape.

    Args:
        running_mean: whether a mean of the weights is kept (`optimizer.ema`).
        shards: processes over which weights, gradients and moments are spread (FSDP); 1: each has all of them.
    """
    weights = FLOAT * parameters(config) // shards
    return TrainingMemory(
        weights=weights,
        gradients=weights,
        optimizer=2 * weights,
        running_mean=weights if running_mean else 0,
        activations=activation_bytes(config, rows, source, target),
        loss=loss_bytes(config),
    )


def checkpoint_bytes(config: MetaphraseConfig, *, running_mean: bool = False) -> int:
    """A checkpoint on disk: weights, two moments, and the running mean of the weights where one is kept."""
    return FLOAT * parameters(config) * (4 if running_mean else 3)


def kernels(config: MetaphraseConfig) -> int:
    """Pieces of work, about, that a GPU is given for the forward and backward pass of one batch."""
    return 60 * config.encoder_layers + 120 * config.decoder_layers + 60


def gradient_bytes(config: MetaphraseConfig) -> int:
    """What one process brings to the sum of gradients that ends an update."""
    return FLOAT * parameters(config)


def all_reduce_seconds(size: int, processes: int, bandwidth: float) -> float:
    """Time of a ring all-reduce of `size` bytes: each process sends and receives 2 (n - 1) / n of them.

    Args:
        bandwidth: bytes a second that each process can send while it receives as many.
    """
    return 2 * (processes - 1) / processes * size / bandwidth
