"""Where compiled code may take the place of a few operations of a training pass on a CPU.

Nothing is here until something is put here: `metaphrase.training.kernels` does, where there is a C++ compiler. What a
kernel computes is what the code beside its place computes, up to rounding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

KERNELS: dict[str, Callable] = {}
"""By place: "loss", "attention", "add_norm", "linear", and "bits" for dropout."""

HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


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


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether this is in training, and of that kind and no more: no adapter, no quantized layer, none with hooks."""
    own = any(getattr(module, f"_{when}_hooks") for when in HOOKS) or "forward" in vars(module)
    everywhere = any(getattr(torch.nn.modules.module, f"_global_{when}_hooks") for when in HOOKS)
    return module.training and type(module) is kind and not (own or everywhere)


def linear(layer: nn.Linear, inputs: torch.Tensor, activation: Callable | None = None) -> torch.Tensor:
    """`layer(inputs)`, and `activation` of it if there is one."""
    return project((layer,), inputs, activation)[0]


def project(
    layers: Sequence[nn.Linear], inputs: torch.Tensor, activation: Callable | None = None
) -> list[torch.Tensor]:
    """`layer(inputs)` for each layer, and `activation` of it if there is one."""
    plain = all(is_plain(layer, nn.Linear) and layer.bias is not None for layer in layers)
    compiled = kernel("linear", inputs, *(layer.weight for layer in layers)) if plain else None
    if compiled is not None:
        return compiled(layers, inputs, activation)
    results = [layer(inputs) for layer in layers]
    return results if activation is None else [activation(result) for result in results]
