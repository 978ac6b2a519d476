"""The Transformer of "Attention Is All You Need" (arXiv:1706.03762), figure 1, as a model of the transformers library.

B batch · S source positions · T target positions · V vocabulary

Read from here to the softmax in three files: this one (two stacks and the output projection), `layers`, `attention`.
"""

import math
from copy import copy

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import CrossAttention, SelfAttention
from .configuration_metaphrase import MetaphraseConfig
from .dropout import Dropout
from .embeddings import LearnedPositions, SinusoidalPositions, count_positions
from .generation import MetaphraseGenerationMixin
from .layers import DecoderLayer, EncoderLayer
from .loss import IGNORED, cross_entropy_per_token, linear_cross_entropy_per_token
from .saving import OneSetOfWeights


def shift_tokens_right(
    labels: torch.Tensor, pad_token_id: int | None, decoder_start_token_id: int | None
) -> torch.Tensor:
    """The decoder's inputs for these labels: a start token, then all labels but the last; -100 becomes padding.

    [B, T] -> [B, T]; `labels` stays as it is.

    Raises:
        ValueError: if one of the two tokens is None.
    """
    for name, token in (("pad_token_id", pad_token_id), ("decoder_start_token_id", decoder_start_token_id)):
        if token is None:
            raise ValueError(f"{name} is None; the decoder's inputs cannot be made from labels without it.")
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = decoder_start_token_id
    return shifted.masked_fill(shifted == IGNORED, pad_token_id)


class MetaphrasePreTrainedModel(OneSetOfWeights):
    """What the library needs to know to initialise, load, save, parallelise and look inside."""

    config_class = MetaphraseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Matrices from N(0, init_std), biases 0, layer norms 1 and 0. Loaded weights are kept."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, mean=0.0, std=self.config.init_std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def _resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of=None, mean_resizing=True) -> nn.Embedding:
        """As the library does; and where the decoder has a matrix of its own, that one too."""
        embeddings = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder = getattr(self.base_model, "decoder", None)
        if decoder is not None and not self.config.share_encoder_decoder_embeddings:
            old, size = decoder.embed_tokens, embeddings.num_embeddings
            decoder.embed_tokens = self._get_resized_embeddings(old, size, mean_resizing=mean_resizing)
            decoder.embed_tokens.requires_grad_(old.weight.requires_grad)
        return embeddings

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Which matrices are one. The library has one flag for all ties; here each has its own."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})


class MetaphraseStack(MetaphrasePreTrainedModel):
    """What encoder and decoder have in common: token embeddings, positions, layers, and the last norm of pre-norm."""

    def __init__(self, config: MetaphraseConfig, layers: list[nn.Module]):
        super().__init__(config)
        learned = config.position_embedding_type == "learned"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_positions = LearnedPositions(config) if learned else SinusoidalPositions(config)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(layers)
        normalize = config.normalize_before
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if normalize else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def look_up(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Token vectors, [B, T] -> [B, T, d_model], unless the caller brings them.

        Raises:
            ValueError: if ids and vectors are both given, or neither.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(
                f"{type(self).__name__} takes exactly one of token ids and embeddings, and {given} was given."
            )
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def mask_config(self, output_attentions: bool | None) -> MetaphraseConfig:
        """Whom masks are made for: the backend in use, or eager attention in a pass that gives its weights away."""
        if not output_attentions:
            return self.config
        config = copy(self.config)
        config._attn_implementation = "eager"
        return config

    def place(self, embeds: torch.Tensor, position_ids: torch.Tensor, past: int | torch.Tensor = 0) -> torch.Tensor:
        """dropout(sqrt(d_model) · embedding + position), sections 3.4, 3.5 and 5.4: [B, T, d_model]."""
        positions = self.embed_positions(position_ids, past + embeds.shape[1])
        return self.dropout(embeds * self.embed_scale + positions.to(embeds))


class MetaphraseEncoder(MetaphraseStack):
    """The left half of figure 1."""

    _can_record_outputs = {
        "hidden_states": EncoderLayer,
        "attentions": OutputRecorder(SelfAttention, index=1, layer_name="self_attn"),
    }

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config, [EncoderLayer(config, layer_idx) for layer_idx in range(config.encoder_layers)])

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Source token ids [B, S], or their embeddings [B, S, d_model], and a mask [B, S], 0 at padding.

        Returns:
            last_hidden_state [B, S, d_model].
        """
        embeds = self.look_up(input_ids, inputs_embeds)
        position_ids = count_positions(attention_mask, embeds.shape[1], 0, embeds.device)
        hidden_states = self.place(embeds, position_ids)
        config = self.mask_config(kwargs.get("output_attentions"))
        mask = create_bidirectional_mask(config=config, inputs_embeds=embeds, attention_mask=attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))


class MetaphraseDecoder(MetaphraseStack):
    """The right half of figure 1, without the output projection."""

    _can_record_outputs = {
        "hidden_states": DecoderLayer,
        "attentions": OutputRecorder(SelfAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(CrossAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config, [DecoderLayer(config, layer_idx) for layer_idx in range(config.decoder_layers)])

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Target token ids [B, T], or their embeddings [B, T, d_model]; the encoder's output [B, S, d_model].

        Args:
            attention_mask: [B, past + T], 0 at padding, which may stand on either side.
            encoder_attention_mask: [B, S], 0 at padding.
            cache: keys and values of `past` earlier positions; a cache belongs to one source.
            position_ids: [B, T]; counted from the mask if None.

        Returns:
            last_hidden_state [B, T, d_model], and the cache if `use_cache`.
        """
        embeds = self.look_up(input_ids, inputs_embeds)
        if use_cache and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        own_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        past = own_cache.get_seq_length() if own_cache is not None else 0
        if position_ids is None:
            position_ids = count_positions(attention_mask, embeds.shape[1], past, embeds.device)
        hidden_states = self.place(embeds, position_ids, past)
        config = self.mask_config(kwargs.get("output_attentions"))
        mask = create_causal_mask(config=config, inputs_embeds=embeds, attention_mask=attention_mask, cache=own_cache)
        source_mask = create_bidirectional_mask(
            config=config,
            inputs_embeds=embeds,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, encoder_hidden_states, source_mask, cache=cache, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.layer_norm(hidden_states), cache=cache if use_cache else None
        )


class MetaphraseModel(MetaphrasePreTrainedModel):
    """Encoder and decoder."""

    _auto_class = "AutoModel"  # a save brings this code along, for machines without the package

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
            self._tied_weights_keys = {
                "encoder.embed_tokens.weight": "shared.weight",
                "decoder.embed_tokens.weight": "shared.weight",
            }
        self.encoder = MetaphraseEncoder(config)
        self.decoder = MetaphraseDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding):
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = self.decoder.embed_tokens = value

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple[torch.Tensor] | BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Source [B, S] and target [B, T] token ids (or their embeddings) -> last_hidden_state [B, T, d_model].

        Args:
            attention_mask, decoder_attention_mask: 0 at padding, [B, S] and [B, past + T].
            encoder_outputs: an earlier result of the encoder, in place of `input_ids`.
            cache: keys and values of earlier target positions and of the source.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            position_ids=decoder_position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            cache=decoder_outputs.cache,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class MetaphraseForConditionalGeneration(MetaphrasePreTrainedModel, MetaphraseGenerationMixin):
    """The whole of figure 1: encoder, decoder, and the projection to the vocabulary."""

    _auto_class = "AutoModelForSeq2SeqLM"

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        self.model = MetaphraseModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            source = "shared" if config.share_encoder_decoder_embeddings else "decoder.embed_tokens"
            self._tied_weights_keys = {"lm_head.weight": f"model.{source}.weight"}
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """The decoder's inputs for these labels, [B, T] -> [B, T]; collators call it."""
        return shift_tokens_right(labels, self.config.pad_token_id, self.config.decoder_start_token_id)

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple[torch.Tensor] | BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Source [B, S] and target [B, T] token ids (or their embeddings) -> logits [B, T, V].

        Args:
            attention_mask, decoder_attention_mask: 0 at padding, [B, S] and [B, past + T].
            encoder_outputs: an earlier result of the encoder, in place of `input_ids`.
            cache: keys and values of earlier target positions and of the source.
            labels: [B, T], -100 where nothing is to be learnt. Gives a loss; the decoder's inputs are made from them
                unless given.
            logits_to_keep: give logits only for the last so many positions; 0 for all.
            num_items_in_batch: target tokens of the whole update; the loss is then these labels' sum over it.
                A training engine that gives it reads no logits: in training mode the loss is computed without them,
                and `logits` is None.

        Returns:
            loss (smoothed in training mode only), logits, cache, and what else was asked for.

        Raises:
            ValueError: if the decoder gets no input, or if ids and embeddings are both given, or neither.
        """
        if labels is not None:
            use_cache = False
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError(
                    "The decoder has no input: give decoder_input_ids, or labels to make them from. (A Trainer with "
                    "label_smoothing_factor takes the labels away: give its collator `model=`, so that it makes them.)"
                )
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        smoothing = self.config.label_smoothing if self.training else 0.0
        logits = loss = None
        plain_head = type(self.lm_head) is nn.Linear  # an adapter (PEFT) or a quantized layer computes more than W h
        if labels is not None and self.training and num_items_in_batch is not None and plain_head:
            loss = linear_cross_entropy_per_token(
                hidden_states, self.lm_head.weight, labels, smoothing, num_items_in_batch
            )
        else:
            logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
            if labels is not None:
                loss = cross_entropy_per_token(logits, labels, smoothing, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )


__all__ = ["MetaphraseForConditionalGeneration", "MetaphraseModel", "MetaphrasePreTrainedModel"]
