"""What generation asks of this model beyond its `forward`: where a padded prompt's positions begin, and how long an
output may be."""

import torch
from transformers.generation import GenerationMixin
from transformers.utils import logging

from .embeddings import count_positions

logger = logging.get_logger(__name__)

LENGTH_MARGIN = 50  # section 6.1: an output may be this much longer than its source


class MetaphraseGenerationMixin(GenerationMixin):
    """The library's `generate`, with the paper's rule for the length of an output."""

    def prepare_inputs_for_generation(self, input_ids: torch.LongTensor, *args, **kwargs) -> dict:
        """As the library does; and a padded target prompt's positions are counted over its real tokens."""
        mask = kwargs.get("decoder_attention_mask")
        if mask is not None and mask.dim() == 2 and kwargs.get("decoder_position_ids") is None:
            kwargs["decoder_position_ids"] = count_positions(mask, mask.shape[1], 0, mask.device)
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    def _prepare_generated_length(
        self, generation_config, has_default_max_length, *, input_ids_length, inputs_tensor, **kwargs
    ):
        """Section 6.1: unless the caller says otherwise, an output is at most 50 tokens longer than its source (the
        longest of the batch). With learned positions it ends, at the latest, with the token that follows the last."""
        asked = not has_default_max_length or generation_config.max_new_tokens is not None
        if not asked:
            generation_config.max_new_tokens = inputs_tensor.shape[1] + LENGTH_MARGIN
        generation_config = super()._prepare_generated_length(
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            input_ids_length=input_ids_length,
            inputs_tensor=inputs_tensor,
            **kwargs,
        )
        end = self.config.max_position_embeddings + 1
        if self.config.position_embedding_type == "learned" and generation_config.max_length > end:
            if asked:
                logger.warning(
                    f"Generation was asked for {generation_config.max_length} tokens, start token included; it stops "
                    f"at {end}, as learned positions end at max_position_embeddings {end - 1}."
                )
            generation_config.max_length = end
        return generation_config
