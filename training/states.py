"""What a checkpoint holds of a running process: weights, Adam's moments and random states, as tensors and JSON.

Everything is keyed by parameter name and stored whole, so it can be read back by another number of processes. Under
FSDP2 a parameter is spread over the processes (a `DTensor`); reading one is a collective call, so every process calls
these functions, and only the main one writes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # a torch that was built without torch.distributed

    class DTensor:  # type: ignore[no-redef]
        """Stands in: no tensor is one."""


from metaphrase.configuration.errors import MetaphraseError


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each shared one once, under the first of its names."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights, whole, on the CPU."""
    return {name: whole(tensor) for name, tensor in named_tensors(model).items()}


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor], origin: Path) -> None:
    """Copy weights into the model in place.

    Raises:
        MetaphraseError: names of tensors or shapes differ: the checkpoint is of another model.
    """
    own = named_tensors(model)
    for name in sorted(own.keys() ^ tensors.keys()):
        side = "lacks" if name in own else "holds an unknown"
        raise MetaphraseError(f"{origin} is of another model: it {side} {name}.")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise MetaphraseError(
                f"{origin} is of another model: {name} is {list(tensors[name].shape)} there, {list(tensor.shape)} here."
            )
        with torch.no_grad():
            tensor.copy_(spread(tensors[name], tensor))


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Adam's state as `exp_avg.<parameter>`, `exp_avg_sq.<parameter>` and `step.<parameter>`, whole, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = whole(value)
    return tensors


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give every parameter the state that was saved under its name; a parameter without one starts anew."""
    saved: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, name = key.split(".", 1)
        saved.setdefault(name, {})[kind] = tensor
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter] if name in saved else {}
        for kind, tensor in saved.get(name, {}).items():
            if kind == "step":
                state[kind] = tensor.to(parameter.device) if fused else tensor.clone()
            else:
                state[kind] = spread(tensor, parameter)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into memory."""
    return load_file(path)


def random_states() -> dict[str, Any]:
    """States of this process's generators (python, numpy, torch, and its GPU), as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = bytes(torch.cuda.get_rng_state().numpy()).hex()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set this process's generators to what `random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(states["cuda"]))


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch, all its devices included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU; every process calls it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor on the device of `like`, spread over the processes as `like` is. Never shares memory with it."""
    if isinstance(like, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device, copy=True)
