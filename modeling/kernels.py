"""Where compiled code may take the place of a few operations of a training pass on a CPU.

Nothing is here until something is put here: `metaphrase.training.kernels` does, where there is a C++ compiler. What a
kernel computes is what the code beside its place computes, up to rounding.
"""

from collections.abc import Callable

import torch
from torch import nn

KERNELS: dict[str, Callable] = {}
"""By place: "loss", "attention", "add_norm", "linear"."""


def kernel(name: str, *tensors: torch.Tensor) -> Callable | None:
    """What is to take the place of that name for these tensors, if anything: kernels are for plain float32 tensors of a
    training pass in one thread of a CPU."""
    if name not in KERNELS or torch.compiler.is_compiling():
        return None
    plain = all(
        tensor.device.type == "cpu" and tensor.dtype == torch.float32 and type(tensor) in (torch.Tensor, nn.Parameter)
        for tensor in tensors
    )
    alone = torch.get_num_threads() == 1 and not torch.is_autocast_enabled("cpu")
    return KERNELS[name] if plain and alone else None


def linear(layer: nn.Linear, inputs: torch.Tensor, activation: Callable | None = None) -> torch.Tensor:
    """`layer(inputs)`, and `activation` of it if there is one. What is more than a plain layer (an adapter, a quantized
    one, one with hooks) is called as it is."""
    plain = layer.training and type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
    compiled = kernel("linear", inputs, layer.weight) if plain and layer.bias is not None else None
    if compiled is not None:
        return compiled(layer, inputs, activation)
    return activation(layer(inputs)) if activation is not None else layer(inputs)
