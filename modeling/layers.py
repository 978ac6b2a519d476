"""The layers of both stacks: section 3.1 and figure 1 of "Attention Is All You Need" (arXiv:1706.03762).

B batch · T target positions · S source positions
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import CrossAttention, SelfAttention
from .configuration_metaphrase import MetaphraseConfig
from .dropout import Dropout
from .kernels import is_plain, kernel, linear


class TransformerLayer(GradientCheckpointingLayer):
    """What encoder and decoder layers have in common: residual connections, and the position-wise feed-forward."""

    def __init__(self, config: MetaphraseConfig, ffn_dim: int):
        super().__init__()
        if config.activation_function not in ACT2FN:
            raise ValueError(
                f"activation_function is {config.activation_function!r}; it must be one of {', '.join(sorted(ACT2FN))}."
            )
        self.normalize_before = config.normalize_before
        self.dropout = Dropout(config.dropout)
        self.activation_fn = ACT2FN[config.activation_function]
        self.activation_dropout = Dropout(config.activation_dropout)
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, equation 2: [B, T, d_model] -> [B, T, d_model]."""
        inner = linear(self.fc1, hidden_states, self.activation_fn)
        return linear(self.fc2, self.activation_dropout(inner))

    def residual(
        self,
        hidden_states: torch.Tensor,
        layer_norm: nn.LayerNorm,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """LayerNorm(x + Sublayer(x)), section 3.1; with `normalize_before`, x + Sublayer(LayerNorm(x))."""
        if self.normalize_before:
            return hidden_states + self.dropout(sublayer(layer_norm(hidden_states)))
        update = sublayer(hidden_states)
        plain = is_plain(layer_norm, nn.LayerNorm) and is_plain(self.dropout, Dropout) and layer_norm.elementwise_affine
        compiled = kernel("add_norm", hidden_states, update, layer_norm.weight) if plain else None
        if compiled is not None:
            return compiled(hidden_states, update, self.dropout, layer_norm)
        return layer_norm(hidden_states + self.dropout(update))


class EncoderLayer(TransformerLayer):
    """Self-attention, then feed-forward."""

    def __init__(self, config: MetaphraseConfig, layer_idx: int):
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = SelfAttention(config, config.encoder_attention_heads, layer_idx, is_causal=False)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs) -> torch.Tensor:
        """[B, S, d_model] -> [B, S, d_model]"""

        def attend(states):
            return self.self_attn(states, attention_mask, **kwargs)[0]

        hidden_states = self.residual(hidden_states, self.self_attn_layer_norm, attend)
        return self.residual(hidden_states, self.final_layer_norm, self.feed_forward)


class DecoderLayer(TransformerLayer):
    """Self-attention to the left, attention over the source, then feed-forward."""

    def __init__(self, config: MetaphraseConfig, layer_idx: int):
        super().__init__(config, config.decoder_ffn_dim)
        self.self_attn = SelfAttention(config, config.decoder_attention_heads, layer_idx, is_causal=True)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.encoder_attn = CrossAttention(config, config.decoder_attention_heads, layer_idx, is_causal=False)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """[B, T, d_model], source [B, S, d_model] -> [B, T, d_model]"""

        def attend(states):
            return self.self_attn(states, attention_mask, cache=cache, **kwargs)[0]

        def ask_source(states):
            return self.encoder_attn(states, encoder_hidden_states, encoder_attention_mask, cache=cache, **kwargs)[0]

        hidden_states = self.residual(hidden_states, self.self_attn_layer_norm, attend)
        hidden_states = self.residual(hidden_states, self.encoder_attn_layer_norm, ask_source)
        return self.residual(hidden_states, self.final_layer_norm, self.feed_forward)
