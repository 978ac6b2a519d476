"""The library's mixins applied to our classes (PEER=metaphrase) or to BART's (PEER=bart); run by test_peer_suite.py.

The library's tests decide by class name what a model can do, so that our names join its lists first.
"""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path

sys.path.insert(0, os.environ["PEER_TESTS"])

import torch
from transformers import AutoConfig, BartConfig, BartForConditionalGeneration, BartModel
from transformers.models.auto import modeling_auto

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig
from metaphrase.modeling.modeling_metaphrase import (
    MetaphraseForConditionalGeneration,
    MetaphraseModel,
)

modeling_auto.MODEL_MAPPING_NAMES["metaphrase"] = "MetaphraseModel"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["metaphrase"] = "MetaphraseForConditionalGeneration"

from transformers_tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from transformers_tests.test_configuration_common import ConfigTester  # noqa: E402
from transformers_tests.test_modeling_common import ModelTesterMixin  # noqa: E402

PEERS = {
    "metaphrase": (MetaphraseConfig, (MetaphraseModel, MetaphraseForConditionalGeneration)),
    "bart": (BartConfig, (BartModel, BartForConditionalGeneration)),
}
CONFIG, CLASSES = PEERS[os.environ["PEER"]]


class Tester:
    """Sizes and inputs, as the library's own model testers have them."""

    batch_size, seq_length, vocab_size, hidden_size = 3, 7, 99, 16
    num_hidden_layers, num_attention_heads, is_training = 2, 4, True
    encoder_seq_length = decoder_seq_length = key_length = 7

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        return CONFIG(
            vocab_size=self.vocab_size,
            d_model=self.hidden_size,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=20,
            decoder_ffn_dim=20,
            dropout=0.1,
            attention_dropout=0.1,
            max_position_embeddings=40,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        input_ids[:, -1] = 2
        decoder_input_ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {
            "input_ids": input_ids,
            "attention_mask": input_ids.ne(1).long(),
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_input_ids.ne(1).long(),
        }


class ModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = CLASSES
    is_encoder_decoder = True
    test_missing_keys = os.environ["PEER"] != "bart"  # the library's own test of BART leaves it out

    def setUp(self):
        self.model_tester = Tester(self)
        self.config_tester = ConfigTester(self, config_class=CONFIG, d_model=16, vocab_size=40)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_the_names_are_known(self):
        assert type(AutoConfig.for_model(CONFIG.model_type)) is CONFIG
        assert Path(sys.modules[ModelTesterMixin.__module__].__file__).exists()
