"""A metaphrase model for CTranslate2, an engine in C++ that decodes fast on processors and GPUs, in int8 too.

    convert("runs/multi30k", "runs/multi30k-int8", quantization="int8")
    translator = ctranslate2.Translator("runs/multi30k-int8")

The engine names tokens by their strings and adds none: give it a source with its `</s>`. In float32 its greedy outputs
are those of the model; its beam search has a stopping rule of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from metaphrase.configuration.errors import MetaphraseError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUANTIZATIONS = ("float32", "float16", "int8")
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_new": "GELUTanh",
    "gelu_fast": "GELUTanh",
    "gelu_pytorch_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
    "swish": "SWISH",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}
"""The activations that the engine has, by the library's names."""
POSITIONS = 1024
"""Rows of the table that stands for computed positions, if the model does not ask for more: the engine needs an end."""


def convert(model: str | Path, output: str | Path, quantization: str = "float32") -> Path:
    """Writes a model folder's weights, vocabulary and tokenizer in the engine's format.

    Args:
        model: result folder, or an id on the Hub.
        output: folder to write; it must be empty or not exist.
        quantization: "float32", "float16" or "int8".

    Returns:
        the folder written.

    Raises:
        MetaphraseError: the engine cannot express a setting of the model, which is named; or the folder is in use.
    """
    from transformers import AutoTokenizer

    from metaphrase.modeling.modeling_metaphrase import MetaphraseForConditionalGeneration

    output = Path(output)
    if (output.is_dir() and any(output.iterdir())) or output.is_file():
        raise MetaphraseError(f"{output} is in use; give a folder that is empty or does not exist")
    loaded = MetaphraseForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    names += [f"<unused {number}>" for number in range(len(names), loaded.config.vocab_size)]
    save(loaded, names[: loaded.config.vocab_size], output, quantization)
    tokenizer.save_pretrained(output)
    return output


def save(model: PreTrainedModel, tokens: Sequence[str], output: Path, quantization: str = "float32") -> None:
    """Writes a model in memory whose vocabulary is called `tokens`; see `convert`."""
    if quantization not in QUANTIZATIONS:
        raise MetaphraseError(f"quantization is {quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}")
    refuse_inexpressible(model)
    spec = make_spec(model)
    spec.register_source_vocabulary(list(tokens))
    spec.register_target_vocabulary(list(tokens))
    config = model.config
    spec.config.bos_token = tokens[
        config.decoder_start_token_id if config.bos_token_id is None else config.bos_token_id
    ]
    spec.config.eos_token = tokens[config.eos_token_id]
    spec.config.unk_token = "<unk>" if "<unk>" in tokens else tokens[config.pad_token_id]
    spec.config.decoder_start_token = tokens[config.decoder_start_token_id]
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.validate()
    spec.optimize(quantization=None if quantization == "float32" else quantization)
    output.mkdir(parents=True, exist_ok=True)
    spec.save(str(output))


def refuse_inexpressible(model: PreTrainedModel) -> None:
    """Names the first setting of the model, or of its generation, that the engine does not have."""
    config, generation = model.config, model.generation_config
    if config.model_type != "metaphrase":
        raise MetaphraseError(f"this exporter writes metaphrase models, and {config.model_type} is not one")
    if config.activation_function not in ACTIVATIONS:
        raise MetaphraseError(
            f"CTranslate2 has no activation_function {config.activation_function!r}; it has {', '.join(ACTIVATIONS)}"
        )
    for stack in ("encoder", "decoder"):
        heads = getattr(config, f"{stack}_attention_heads")
        for name, size in zip(("qk_head_dim", "v_head_dim"), config.head_dims(heads), strict=True):
            if size * heads != config.d_model:
                raise MetaphraseError(
                    f"CTranslate2 cannot express {name} {size}: with d_model {config.d_model} and {heads} heads in the "
                    f"{stack} it computes with {config.d_model / heads:g}"
                )
    if not isinstance(config.eos_token_id, int):
        raise MetaphraseError(f"CTranslate2 knows one end token, and eos_token_id is {config.eos_token_id}")
    for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "bad_words_ids", "sequence_bias"):
        if getattr(generation, name, None) is not None:
            raise MetaphraseError(f"CTranslate2 cannot keep {name} {getattr(generation, name)} in a model's folder")


def make_spec(model: PreTrainedModel) -> Any:
    """The engine's description of a Transformer, filled with this model's weights."""
    from ctranslate2.specs import common_spec, transformer_spec

    config = model.config
    shared = {
        "pre_norm": config.normalize_before,
        "activation": common_spec.Activation[ACTIVATIONS[config.activation_function]],
    }
    encoder = transformer_spec.TransformerEncoderSpec(config.encoder_layers, config.encoder_attention_heads, **shared)
    decoder = transformer_spec.TransformerDecoderSpec(config.decoder_layers, config.decoder_attention_heads, **shared)
    _fill_stack(encoder, encoder.embeddings[0], model.model.encoder)
    _fill_stack(decoder, decoder.embeddings, model.model.decoder)
    for layer, module in zip(decoder.layer, model.model.decoder.layers, strict=True):
        asking = module.encoder_attn
        _fill(layer.attention.linear[0], asking.q_proj)
        _fill(layer.attention.linear[1], asking.k_proj, asking.v_proj)
        _fill(layer.attention.linear[2], asking.out_proj)
        _fill_norm(layer.attention.layer_norm, module.encoder_attn_layer_norm)
    _fill(decoder.projection, model.lm_head)
    return transformer_spec.TransformerSpec(encoder, decoder)


def _fill_stack(spec: Any, embeddings: Any, stack: nn.Module) -> None:
    """What encoder and decoder have in common."""
    config = stack.config
    embeddings.weight = _copy(stack.embed_tokens.weight)
    spec.scale_embeddings = config.scale_embedding
    rows = config.max_position_embeddings
    if config.position_embedding_type != "learned":
        rows = max(rows, POSITIONS)
    with torch.no_grad():
        spec.position_encodings.encodings = (
            stack.embed_positions(torch.arange(rows, device=stack.device), rows).float().cpu().clone()
        )
    if config.normalize_before:
        _fill_norm(spec.layer_norm, stack.layer_norm)
    for layer, module in zip(spec.layer, stack.layers, strict=True):
        own = module.self_attn
        _fill(layer.self_attention.linear[0], own.q_proj, own.k_proj, own.v_proj)
        _fill(layer.self_attention.linear[1], own.out_proj)
        _fill_norm(layer.self_attention.layer_norm, module.self_attn_layer_norm)
        _fill(layer.ffn.linear_0, module.fc1)
        _fill(layer.ffn.linear_1, module.fc2)
        _fill_norm(layer.ffn.layer_norm, module.final_layer_norm)


def _fill(spec: Any, *modules: nn.Linear) -> None:
    """One linear layer, or several side by side."""
    spec.weight = torch.cat([_copy(module.weight) for module in modules])
    if modules[0].bias is not None:
        spec.bias = torch.cat([_copy(module.bias) for module in modules])


def _fill_norm(spec: Any, module: nn.LayerNorm) -> None:
    spec.gamma = _copy(module.weight)
    spec.beta = _copy(module.bias)


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    """The engine's tools quantize in place, and the model goes on living."""
    return parameter.detach().to("cpu", torch.float32, copy=True).contiguous()
