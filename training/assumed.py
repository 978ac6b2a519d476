"""What a run takes on GPUs that are not at hand: arithmetic on assumptions, each with its value here."""

from __future__ import annotations

from dataclasses import dataclass

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.training import costs


@dataclass(frozen=True)
class Assumptions:
    """What stands for machines that are not at hand."""

    gpu_tflops: float = 312.0
    """Peak of a GPU in 10^12 bfloat16 operations a second (A100: 312, H100: 989)."""
    mfu: float = 0.3
    """Part of that peak which training reaches."""
    link: float = 25.0
    """10^9 bytes a second that a GPU can send to one of another machine while it receives as many (200 Gbit/s: 25)."""
    link_inside: float = 250.0
    """The same between the GPUs of one machine (NVLink of an A100: 250)."""
    machine: int = 8
    """GPUs of a machine."""
    memory_bandwidth: float = 1500.0
    """10^9 bytes a second between a GPU and its own memory, for clipping and Adam."""
    launch: float = 5.0
    """10^-6 seconds to start a piece of work on a GPU: a small batch takes no less than its pieces take to start."""

    def bandwidth(self, gpus: int) -> float:
        """Bytes a second of the slowest link in a ring of so many GPUs."""
        return 1e9 * (self.link_inside if gpus <= self.machine else self.link)

    def update(self, config: MetaphraseConfig, gpus: int, flops: float, batches: int, *, ema: bool = False) -> Update:
        """An update in which the GPU with the most to do has so many operations, in so many batches.

        Gradients travel in a ring after the backward pass; nothing overlaps.
        """
        operations = flops / (self.gpu_tflops * 1e12 * self.mfu)
        launches = batches * costs.kernels(config) * self.launch * 1e-6
        moved = (10 if ema else 8) * costs.FLOAT * costs.parameters(config)
        sending = costs.all_reduce_seconds(costs.gradient_bytes(config), gpus, self.bandwidth(gpus))
        return Update(operations, launches, sending, moved / (self.memory_bandwidth * 1e9))


@dataclass(frozen=True)
class Update:
    """Seconds of one update on GPUs."""

    operations: float
    launches: float
    sending: float
    step: float

    @property
    def learning(self) -> float:
        """Forward and backward: what its operations take, or the start of its pieces of work, whichever is more."""
        return max(self.operations, self.launches)

    @property
    def seconds(self) -> float:
        return self.learning + self.sending + self.step
