"""Attention: section 3.2 of "Attention Is All You Need" (arXiv:1706.03762).

B batch · T asking positions · S asked positions · H heads · D head size, d_k for queries and keys, d_v for values
the paper's h = H;  W^Q W^K W^V W^O = q_proj k_proj v_proj out_proj
Masks are boolean, True = may attend, broadcastable to [B, H, T, S]:

    the source            a decoder row        a target of 3 that asks a source of 4, the last one padding
    1 1 1 0               1 0 0                1 1 1 0
    1 1 1 0               1 1 0                1 1 1 0
    1 1 1 0               1 1 1                1 1 1 0
    1 1 1 0
"""

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_metaphrase import MetaphraseConfig
from .kernels import kernel, linear, project


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V, equation 1.

    Args:
        query: Q, [B, H, T, d_k].
        key: K, [B, H, S, d_k].
        value: V, [B, H, S, d_v].
        mask: True where a position may be attended to. A row that may attend to nothing gives zeros.
        scaling: what scores are multiplied by; 1 / sqrt(d_k) if None.
        dropout: chance that a weight is dropped.

    Returns:
        context [B, H, T, d_v] and the weights [B, H, T, S] before dropout.
    """
    scores = query @ key.transpose(-2, -1) * (scaling or query.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)  # matters only to a row in which every score was masked
    return nn.functional.dropout(weights, p=dropout, training=dropout > 0) @ value, weights


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 1 in the signature of the library's attention backends: context comes as [B, T, H, d_v]."""
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask == 0  # the library's eager masks are sums: 0 may attend, the lowest may not
    elif attention_mask is not None:
        attention_mask = attention_mask.bool()
    context, weights = scaled_dot_product_attention(query, key, value, attention_mask, scaling=scaling, dropout=dropout)
    return context.transpose(1, 2), weights


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V); figure 2."""

    def __init__(self, config: MetaphraseConfig, num_heads: int, layer_idx: int, is_causal: bool):
        super().__init__()
        d_k, d_v = config.head_dims(num_heads)
        self.config = config
        self.num_heads = num_heads
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.dropout = config.attention_dropout
        self.scaling = d_k**-0.5
        self.q_proj = nn.Linear(config.d_model, num_heads * d_k)
        self.k_proj = nn.Linear(config.d_model, num_heads * d_k)
        self.v_proj = nn.Linear(config.d_model, num_heads * d_v)
        self.out_proj = nn.Linear(num_heads * d_v, config.d_model)

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """[B, T, H · D] -> [B, H, T, D]"""
        return states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Heads attend through the chosen backend, are joined and projected: [B, H, T, D] x 3 -> [B, T, d_model].

        The weights [B, H, T, S] come second; backends that never hold them give None, so that a pass that asks for them
        (`output_attentions`) runs eagerly.
        """
        backend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if kwargs.get("output_attentions"):
            backend = eager_attention
        elif self.config._attn_implementation == "sdpa" and self.training and not self.dropout:
            backend = kernel("attention", query, key, value) or backend
        dropout = self.dropout if self.training else 0.0
        context, weights = backend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return linear(self.out_proj, context.flatten(2)), weights


class SelfAttention(MultiHeadAttention):
    """A sequence attends to itself: everywhere in the encoder, to the left in the decoder (section 3.2.3)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, d_model] -> [B, T, d_model], weights. With a cache, its keys and values stand before the new ones."""
        projected = project((self.q_proj, self.k_proj, self.v_proj), hidden_states)
        query, key, value = map(self.split_heads, projected)
        if cache is not None:
            past = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
            key, value = past.update(key, value, self.layer_idx)
        return self.attend(query, key, value, attention_mask, **kwargs)


class CrossAttention(MultiHeadAttention):
    """The decoder asks the encoder's output (section 3.2.3, "encoder-decoder attention")."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, d_model], [B, S, d_model] -> [B, T, d_model], weights. With a cache the source is projected once."""
        query = self.split_heads(linear(self.q_proj, hidden_states))
        if cache is not None and cache.is_updated.get(self.layer_idx):
            source = cache.cross_attention_cache.layers[self.layer_idx]
            key, value = source.keys, source.values
        else:
            key, value = map(self.split_heads, project((self.k_proj, self.v_proj), encoder_hidden_states))
            if cache is not None:
                key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
                cache.is_updated[self.layer_idx] = True
        return self.attend(query, key, value, attention_mask, **kwargs)
