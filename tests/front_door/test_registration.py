"""AUTO-TWICE: the Auto classes know the model type after `import metaphrase`, in any order, any number of times."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings

import pytest

import metaphrase
from metaphrase import registration

CHECK = """
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
import metaphrase
config = AutoConfig.for_model("metaphrase", vocab_size=9, d_model=4, encoder_layers=1, decoder_layers=1,
                              encoder_attention_heads=2, decoder_attention_heads=2)
assert type(config) is metaphrase.MetaphraseConfig, type(config)
assert type(AutoModel.from_config(config)) is metaphrase.MetaphraseModel
assert type(AutoModelForSeq2SeqLM.from_config(config)) is metaphrase.MetaphraseForConditionalGeneration
print("known")
"""
FOREIGN = """
import warnings
from transformers import AutoConfig, PreTrainedConfig
class TheirConfig(PreTrainedConfig):
    model_type = "metaphrase"
AutoConfig.register("metaphrase", TheirConfig)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import metaphrase, importlib
    importlib.reload(metaphrase)
ours = [str(w.message) for w in caught if "model_type" in str(w.message)]
assert type(AutoConfig.for_model("metaphrase")) is TheirConfig
assert len(ours) == 1, ours
assert '"metaphrase"' in ours[0] and "__main__.TheirConfig" in ours[0]
assert "metaphrase.configuration.configuration_metaphrase.MetaphraseConfig" in ours[0]
from transformers import AutoModelForSeq2SeqLM
config = metaphrase.MetaphraseConfig(vocab_size=9, d_model=4, encoder_layers=1, decoder_layers=1,
                                     encoder_attention_heads=2, decoder_attention_heads=2)
assert type(AutoModelForSeq2SeqLM.from_config(config)) is metaphrase.MetaphraseForConditionalGeneration
print("known")
"""


@pytest.mark.parametrize(
    "script",
    [
        "import sys, metaphrase\nassert 'transformers' not in sys.modules" + CHECK,
        "import metaphrase.modeling.modeling_metaphrase" + CHECK,
        FOREIGN,
    ],
    ids=["package first", "model file first", "foreign class first"],
)
def test_in_a_new_process(script):
    ran = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout == "known\n", ran.stderr


def test_again_is_no_op():
    from transformers import AutoConfig

    before = metaphrase.MetaphraseConfig
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(registration)
        importlib.reload(metaphrase)
        spec = importlib.util.spec_from_file_location(
            "metaphrase_elsewhere", metaphrase.__file__, submodule_search_locations=metaphrase.__path__
        )
        elsewhere = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = elsewhere
        try:
            spec.loader.exec_module(elsewhere)
        finally:
            for name in [name for name in sys.modules if name.startswith("metaphrase_elsewhere")]:
                del sys.modules[name]
    assert type(AutoConfig.for_model("metaphrase")) is before is metaphrase.MetaphraseConfig


def test_the_library_has_no_such_model_of_its_own():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert registration.MODEL_TYPE not in CONFIG_MAPPING_NAMES


def test_a_newer_library_with_that_name_keeps_its_class():
    """What the library brings itself is foreign too, and stays."""

    class Theirs:
        pass

    registration._warned.clear()

    with pytest.warns(UserWarning, match="already taken in AutoConfig by .*Theirs"):
        assert not registration._is_free(
            {"metaphrase": Theirs}, "metaphrase", metaphrase.MetaphraseConfig, "AutoConfig"
        )
    assert registration._is_free({}, "metaphrase", metaphrase.MetaphraseConfig, "AutoConfig")
