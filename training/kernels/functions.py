"""The kernels as differentiable functions of tensors. Each takes what its slow twin in `modeling/` takes.

B sentences · H heads · T asking, S asked positions · D head size · V vocabulary · d = d_model
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_double, c_float, c_int, c_long, c_uint64, c_void_p

import torch
from torch import nn

from metaphrase.modeling.dropout import draw, threshold_and_scale
from metaphrase.modeling.kernels import is_plain
from metaphrase.modeling.loss import IGNORED, loss_and_gradients

WIDTH = 16
"""Sizes must be multiples of it: floats of the widest register."""
LONGEST = 128
"""Positions up to which the attention kernel is the faster one."""
LARGEST_MATRIX = 2**17
"""Entries of a layer's weight up to which the kernel beats a library's product."""
FEWEST_ROWS = 32
LARGEST_PROJECTION = 2**23
"""Entries of the projection to the vocabulary up to which it is laid out three times more, as the loss kernel needs."""
SIGNATURES = {
    "loss_room": (c_long, [c_long] * 2),
    "loss_and_gradients": (c_double, [c_long] * 3 + [c_void_p] * 3 + [c_float] + [c_void_p] * 3),
    "add_norm": (None, [c_long] * 2 + [c_void_p] * 3 + [c_int, c_float] + [c_void_p] * 2 + [c_float] + [c_void_p] * 3),
    "add_norm_backward": (None, [c_long] * 2 + [c_void_p] * 4 + [c_int, c_float] + [c_void_p] * 5),
    "draw_bits": (None, [c_uint64, c_long, c_void_p]),
    "linear_room": (c_long, [c_long] * 3),
    "linear": (None, [c_long] * 4 + [c_void_p] * 3 + [c_int] + [c_void_p] * 2),
    "linear_backward": (None, [c_long] * 4 + [c_void_p] * 8),
    "attention_room": (c_long, [c_int] * 3),
    "attention_forward": (c_int, [c_int] * 5 + [c_void_p] * 8 + [c_int, c_float] + [c_void_p] * 3),
    "attention_backward": (c_int, [c_int] * 5 + [c_void_p] * 8 + [c_int, c_float] + [c_void_p] * 7),
}


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, its functions told what they take and give.

    Raises:
        AttributeError: a function is not in it.
    """
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Kernels:
    """What `metaphrase.modeling.kernels` is given."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def loss(self, hidden, weight, labels, label_smoothing, wants_grad):
        """`metaphrase.modeling.loss.loss_and_gradients`."""
        entries, width = weight.shape
        counted = labels[labels != IGNORED]
        inside = not len(counted) or (int(counted.min()) >= 0 and int(counted.max()) < entries)
        fits = width % WIDTH == 0 and weight.numel() <= LARGEST_PROJECTION
        if not (wants_grad and inside and fits):
            return loss_and_gradients(hidden, weight, labels, label_smoothing, wants_grad)
        hidden, weight, labels = hidden.contiguous(), weight.contiguous(), labels.long().contiguous()
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
        room = hidden.new_empty(self.library.loss_room(entries, width))
        total = self.library.loss_and_gradients(
            len(hidden),
            entries,
            width,
            hidden.data_ptr(),
            weight.data_ptr(),
            labels.data_ptr(),
            label_smoothing,
            grad_hidden.data_ptr(),
            grad_weight.data_ptr(),
            room.data_ptr(),
        )
        return hidden.new_tensor(total), grad_hidden, grad_weight

    def add_norm(self, states: torch.Tensor, update: torch.Tensor, dropout: nn.Dropout, norm: nn.LayerNorm):
        """`norm(states + dropout(update))`, all [..., d]."""
        last = norm.normalized_shape == states.shape[-1:] and norm.bias is not None
        if not last or states.shape != update.shape or states.shape[-1] % WIDTH or not 0 < dropout.p < 1:
            return norm(states + dropout(update))
        return _AddNorm.apply(self.library, states, update, dropout.p, norm.weight, norm.bias, norm.eps)

    def linear(self, layers: Sequence[nn.Linear], inputs: torch.Tensor, activation: Callable | None) -> list:
        """`activation(layer(inputs))` for each layer; inputs [..., inputs]."""
        outputs, width = shape = layers[0].weight.shape
        small = outputs % WIDTH == 0 and width % WIDTH == 0 and outputs * width <= LARGEST_MATRIX
        fits = inputs.shape[-1] == width and all(layer.weight.shape == shape for layer in layers)
        if not small or not fits or inputs.numel() < FEWEST_ROWS * width:
            results = [layer(inputs) for layer in layers]
            return results if activation is None else [activation(result) for result in results]
        relu = len(layers) == 1 and isinstance(activation, nn.Module) and is_plain(activation, nn.ReLU)
        parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
        results = _Linear.apply(self.library, inputs, relu, *parameters)
        return list(results) if relu or activation is None else [activation(result) for result in results]

    def bits(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        """`metaphrase.modeling.dropout.draw`: other numbers, from one that the generator gives."""
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=generator))
        bits = torch.empty(shape, dtype=torch.int16, device="cpu")
        self.library.draw_bits(seed % 2**64, bits.numel(), bits.data_ptr())
        return bits

    def attention(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        """A backend of the library's: query [B, H, T, D], key and value [B, H, S, D] -> [B, T, H, D] and no weights."""
        causal = attention_mask is None and module.is_causal and query.shape[2] > 1
        if not self.suits(query, key, value, attention_mask, causal):
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return _Attention.apply(self.library, query, key, value, attention_mask, causal, scaling), None

    @staticmethod
    def suits(query, key, value, mask, causal) -> bool:
        """Whether the attention kernel can compute this, and is faster."""
        size, longest = query.shape[-1], max(query.shape[2], key.shape[2])
        same = key.shape == value.shape and query.shape[:2] == key.shape[:2] and size == key.shape[-1]
        rows = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        square = not causal or query.shape[2] == key.shape[2]
        boolean = mask is None or (mask.dtype == torch.bool and mask.dim() == 4)
        return size % WIDTH == 0 and longest <= LONGEST and same and rows and square and boolean


def _once(backward: Callable) -> Callable:
    """A backward pass that has no gradient itself, and says so where one is asked for."""

    @functools.wraps(backward)
    def once(ctx, *grads):
        if torch.is_grad_enabled():  # only under create_graph
            raise RuntimeError("Compiled kernels have no second derivative; metaphrase.training.kernels.remove() them.")
        return backward(ctx, *grads)

    return once


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, library, states, update, p, gain, bias, eps):
        states, update, gain, bias = (tensor.contiguous() for tensor in (states, update, gain, bias))
        width = states.shape[-1]
        rows = states.numel() // width
        draws, (lowest, scale) = draw(update.shape), threshold_and_scale(p)
        output, normed, inverse = torch.empty_like(states), torch.empty_like(states), states.new_empty(rows)
        inputs = (states.data_ptr(), update.data_ptr(), draws.data_ptr(), lowest, scale)
        results = (output.data_ptr(), normed.data_ptr(), inverse.data_ptr())
        library.add_norm(rows, width, *inputs, gain.data_ptr(), bias.data_ptr(), eps, *results)
        ctx.save_for_backward(normed, inverse, draws, gain)
        ctx.library, ctx.keep = library, (lowest, scale)
        return output

    @staticmethod
    @_once
    def backward(ctx, grad):
        normed, inverse, draws, gain = ctx.saved_tensors
        grad, width = grad.contiguous(), grad.shape[-1]
        grad_states, grad_update = torch.empty_like(grad), torch.empty_like(grad)
        grad_gain, grad_bias = torch.zeros_like(gain), torch.zeros_like(gain)
        saved = (normed.data_ptr(), inverse.data_ptr(), draws.data_ptr(), *ctx.keep, gain.data_ptr())
        results = (tensor.data_ptr() for tensor in (grad_states, grad_update, grad_gain, grad_bias))
        ctx.library.add_norm_backward(grad.numel() // width, width, grad.data_ptr(), *saved, *results)
        return None, grad_states, grad_update, None, grad_gain, grad_bias, None


def _addresses(tensors: Sequence[torch.Tensor]):
    """Where so many tensors begin, as an array for C."""
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, library, inputs, relu, *parameters):
        inputs, *parameters = (tensor.contiguous() for tensor in (inputs, *parameters))
        weights, biases = parameters[::2], parameters[1::2]
        outputs, width = weights[0].shape
        results = tuple(inputs.new_empty(*inputs.shape[:-1], outputs) for _ in weights)
        room = inputs.new_empty(library.linear_room(len(weights), outputs, width))
        sizes = (inputs.numel() // width, len(weights), outputs, width)
        given = (inputs.data_ptr(), _addresses(weights), _addresses(biases), relu)
        library.linear(*sizes, *given, _addresses(results), room.data_ptr())
        ctx.save_for_backward(inputs, results[0] if relu else None, *weights)
        ctx.library = library
        return results

    @staticmethod
    @_once
    def backward(ctx, *grads):
        inputs, result, *weights = ctx.saved_tensors
        outputs, width = weights[0].shape
        grads = [grad.contiguous() for grad in grads]
        grad_inputs, grad_weights = torch.empty_like(inputs), [torch.empty_like(weight) for weight in weights]
        grad_biases = [weight.new_empty(outputs) for weight in weights]
        room = inputs.new_empty(ctx.library.linear_room(len(weights), outputs, width))
        sizes = (inputs.numel() // width, len(weights), outputs, width)
        given = (inputs.data_ptr(), _addresses(weights), None if result is None else result.data_ptr())
        places = (grad_inputs.data_ptr(), _addresses(grad_weights), _addresses(grad_biases), room.data_ptr())
        ctx.library.linear_backward(*sizes, *given, _addresses(grads), *places)
        parameters = (grad for pair in zip(grad_weights, grad_biases, strict=True) for grad in pair)
        return None, grad_inputs, None, *parameters


def _strides(tensor: torch.Tensor, dimensions: int = 3):
    """Steps of the first dimensions, in entries, as an array for C."""
    return (c_long * dimensions)(*tensor.stride()[:dimensions])


def _asked(query, key, value, mask, causal, scaling) -> list:
    """What both ways through the attention kernel begin with."""
    batch, heads, asking, size = query.shape
    asked = key.shape[2]
    arguments = [size, batch, heads, asking, asked]
    for tensor in (query, key, value):
        arguments += [tensor.data_ptr(), _strides(tensor)]
    if mask is None:
        return [*arguments, None, None, causal, scaling]
    return [*arguments, mask.data_ptr(), _strides(mask.expand(batch, heads, asking, asked), 4), causal, scaling]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, library, query, key, value, mask, causal, scaling):
        batch, heads, asking, size = query.shape
        context, log_sums = query.new_empty(batch, asking, heads, size), query.new_empty(batch, heads, asking)
        room = query.new_empty(library.attention_room(size, asking, key.shape[2]))
        asked = _asked(query, key, value, mask, causal, scaling)
        library.attention_forward(*asked, context.data_ptr(), log_sums.data_ptr(), room.data_ptr())
        ctx.save_for_backward(query, key, value, mask, log_sums)
        ctx.library, ctx.causal, ctx.scaling = library, causal, scaling
        return context

    @staticmethod
    @_once
    def backward(ctx, grad):
        query, key, value, mask, log_sums = ctx.saved_tensors
        batch, heads, asking, size = query.shape
        grad = grad.contiguous().transpose(1, 2)
        results = [query.new_empty(batch, length, heads, size) for length in (asking, key.shape[2], key.shape[2])]
        room = query.new_empty(ctx.library.attention_room(size, asking, key.shape[2]))
        asked = _asked(query, key, value, mask, ctx.causal, ctx.scaling)
        given = (grad.data_ptr(), _strides(grad), log_sums.data_ptr())
        ctx.library.attention_backward(*asked, *given, *(tensor.data_ptr() for tensor in results), room.data_ptr())
        return None, *(tensor.transpose(1, 2) for tensor in results), None, None, None
