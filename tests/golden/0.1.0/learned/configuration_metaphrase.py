"""What a model is: the sizes and choices of one Transformer of "Attention Is All You Need" (arXiv:1706.03762).

The paper's names: N = encoder_layers = decoder_layers, d_model, d_ff = encoder_ffn_dim = decoder_ffn_dim,
h = encoder_attention_heads = decoder_attention_heads, d_k = qk_head_dim, d_v = v_head_dim, P_drop = dropout,
epsilon_ls = label_smoothing.
"""

from difflib import get_close_matches
from typing import ClassVar, Literal

from transformers import PreTrainedConfig

from .presets import PRESETS


class MetaphraseConfig(PreTrainedConfig):
    """Configuration of a metaphrase model; the defaults are the paper's base model (Table 3, first row).

    Args:
        vocab_size: entries of the vocabulary that both languages share.
        d_model: width of every layer's input and output.
        encoder_layers, decoder_layers: how many identical layers each stack has (N).
        encoder_attention_heads, decoder_attention_heads: parallel attention heads (h). The decoder's number also
            serves its attention over the source.
        encoder_ffn_dim, decoder_ffn_dim: inner width of the feed-forward layers (d_ff).
        qk_head_dim: size of a head's queries and keys (d_k). None: d_model / heads.
        v_head_dim: size of a head's values (d_v). None: d_model / heads.
        dropout: P_drop of section 5.4: on each sub-layer's output and on the sums of embeddings and positions.
        attention_dropout: dropout on attention weights. The paper has none.
        activation_dropout: dropout inside the feed-forward layer. The paper has none.
        activation_function: any name of the library's `ACT2FN`.
        normalize_before: False, as in the paper: LayerNorm(x + Sublayer(x)). True: x + Sublayer(LayerNorm(x)), with
            one more LayerNorm after each stack.
        position_embedding_type: "sinusoidal" (section 3.5; any length) or "learned" (Table 3, row E).
        max_position_embeddings: rows of the learned table, the longest input it can read. Sinusoidal positions are
            computed and have no limit; the value is then only what the tokenizer is told.
        scale_embedding: multiply embeddings by sqrt(d_model) (section 3.4).
        share_encoder_decoder_embeddings: one embedding matrix for both stacks.
        tie_word_embeddings: the decoder's embedding matrix is also the output projection (section 3.4).
        label_smoothing: epsilon_ls of section 5.4, spread evenly over the whole vocabulary; acts in training mode
            only, so that an evaluation loss is always the plain cross-entropy.
        init_std: standard deviation of the normal distribution from which matrices are drawn. The paper names none.
        layer_norm_eps: epsilon of every LayerNorm.
        pad_token_id, bos_token_id, eos_token_id: special tokens.
        decoder_start_token_id: first input of the decoder, in training and in generation.

    Raises:
        ValueError: if a value cannot be; the sentence names the field, the value and what would be right.
    """

    model_type = "metaphrase"
    _auto_class: ClassVar[str | None] = "AutoConfig"  # a save brings this file along
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    keys_to_ignore_at_inference = [
        "cache",
        "past_key_values",
        "encoder_last_hidden_state",
        "encoder_hidden_states",
        "encoder_attentions",
        "decoder_hidden_states",
        "decoder_attentions",
        "cross_attentions",
    ]

    vocab_size: int = 37000
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    qk_head_dim: int | None = None
    v_head_dim: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation_function: str = "relu"
    normalize_before: bool = False
    position_embedding_type: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_position_embeddings: int = 1024
    scale_embedding: bool = True
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    label_smoothing: float = 0.0
    init_std: float = 0.02
    layer_norm_eps: float = 1e-5
    is_encoder_decoder: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    def __post_init__(self, **kwargs):
        # A save writes only the saved class's own entry; with all three, every Auto class finds its code on the Hub.
        kwargs.setdefault(
            "auto_map",
            {
                "AutoConfig": "configuration_metaphrase.MetaphraseConfig",
                "AutoModel": "modeling_metaphrase.MetaphraseModel",
                "AutoModelForSeq2SeqLM": "modeling_metaphrase.MetaphraseForConditionalGeneration",
            },
        )
        self._check_names(kwargs)
        super().__post_init__(**kwargs)
        self._check_sizes()
        self._check_rates()
        self._check_choices()

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "MetaphraseConfig":
        """The configuration of a row of the paper's Table 3, or of one of the small ones, by name.

        Args:
            name: a key of `presets.PRESETS`: "base", "big", "A-h1", "B-dk16", "C-N2", "D-drop0.0", "E-learned" …
            overrides: fields to set on top of the preset.

        Raises:
            ValueError: if the preset or a field does not exist; the sentence names the nearest that does.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}{_nearest(name, PRESETS)}; there are {', '.join(PRESETS)}.")
        fields = cls.field_names()
        for field in overrides:
            if field not in fields:
                raise ValueError(f"A model has no field {field!r}{_nearest(field, fields)}.")
        return cls(**{**PRESETS[name], **overrides})

    @classmethod
    def field_names(cls) -> list[str]:
        """The fields that describe a metaphrase model, in the order of the class."""
        library = ("is_encoder_decoder", "use_cache")
        return [name for name in cls.__annotations__ if name not in library and not name.startswith("_")]

    def head_dims(self, num_heads: int) -> tuple[int, int]:
        """(d_k, d_v) of one head of an attention with `num_heads` heads (section 3.2.2)."""
        return self.qk_head_dim or self.d_model // num_heads, self.v_head_dim or self.d_model // num_heads

    @classmethod
    def _check_names(cls, unknown: dict):
        """The library keeps names it does not know, which is right for those in a file, and not for slips in a call."""
        if "model_type" in unknown:
            return
        for name in unknown.keys() - cls.attribute_map.keys():
            close = get_close_matches(name, cls.field_names(), n=1, cutoff=0.85)
            if close:
                raise ValueError(f"A model has no field {name!r}; did you mean {close[0]!r}?")

    def _check_sizes(self):
        for name in ("vocab_size", "d_model", "max_position_embeddings", "encoder_layers", "decoder_layers"):
            self._check(name, _is_int(getattr(self, name)) and getattr(self, name) > 0, "a whole number above 0")
        for stack in ("encoder", "decoder"):
            for name in (f"{stack}_attention_heads", f"{stack}_ffn_dim"):
                self._check(name, _is_int(getattr(self, name)) and getattr(self, name) > 0, "a whole number above 0")
            heads = getattr(self, f"{stack}_attention_heads")
            if self.d_model % heads and not (self.qk_head_dim and self.v_head_dim):
                raise ValueError(
                    f"d_model {self.d_model} is not divisible by {stack}_attention_heads {heads}; choose sizes that "
                    "divide, or set both qk_head_dim and v_head_dim."
                )
        for name in ("qk_head_dim", "v_head_dim"):
            value = getattr(self, name)
            self._check(name, value is None or (_is_int(value) and value > 0), "a whole number above 0, or None")

    def _check_rates(self):
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            value = getattr(self, name)
            self._check(name, _is_number(value) and 0 <= value < 1, "a number from 0 up to but not including 1")
        for name in ("init_std", "layer_norm_eps"):
            value = getattr(self, name)
            self._check(name, _is_number(value) and value > 0, "a number above 0")

    def _check_choices(self):
        for name in (
            "normalize_before",
            "scale_embedding",
            "share_encoder_decoder_embeddings",
            "tie_word_embeddings",
        ):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        choices = ("sinusoidal", "learned")
        self._check("position_embedding_type", self.position_embedding_type in choices, " or ".join(choices))
        if self.decoder_start_token_id is None:
            raise ValueError(
                "decoder_start_token_id is None; the decoder needs a first token, for instance bos_token_id "
                f"{self.bos_token_id}."
            )
        for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
            value = getattr(self, name)
            right = value is None or (_is_int(value) and 0 <= value < self.vocab_size)
            self._check(name, right, f"a token id below vocab_size {self.vocab_size}")
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        right = all(end is None or (_is_int(end) and 0 <= end < self.vocab_size) for end in ends)
        self._check("eos_token_id", right, f"a token id below vocab_size {self.vocab_size}, or a list of them")

    def _check(self, name: str, right: bool, wanted: str):
        if not right:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}.")


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _nearest(name: str, names) -> str:
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


__all__ = ["MetaphraseConfig"]
