"""An exponential running mean of the weights: mean <- decay · mean + (1 - decay) · weights, after each update."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from metaphrase.training import states

NAME = "running_mean.safetensors"


class RunningMean:
    """Lies over the processes as the weights do."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.means = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the mean."""
        torch._foreach_lerp_(self.means, [weight.detach() for weight in self.weights], 1 - self.decay)

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole model with the means in place of its weights; every process calls it."""
        means = {id(weight): mean for weight, mean in zip(self.weights, self.means, strict=True)}
        return {
            name: states.whole(means.get(id(tensor), tensor)) for name, tensor in states.named_tensors(model).items()
        }

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint; one that holds no mean leaves it at the weights as they are."""
        saved = states.load_tensors(checkpoint / NAME) if (checkpoint / NAME).exists() else {}
        for name, weight, mean in zip(self.names, self.weights, self.means, strict=True):
            mean.copy_(states.spread(saved[name], weight) if name in saved else weight.detach())
