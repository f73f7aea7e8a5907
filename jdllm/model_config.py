"""What a model is (ModelConfig), read from a Hugging Face ``config.json``.

Every field of such a file is honoured, known to be without effect on inference, or refused by name: a checkpoint never
loads with a setting that is silently ignored.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

GENERIC_HF_FIELDS = frozenset(
    (
        "_attn_implementation_autoset _name_or_path architectures auto_map bos_token_id dtype model_type "
        "tokenizer_class torch_dtype transformers_version"
    ).split()
)
"""Fields that Hugging Face writes into any config.json and that do not change the forward pass."""


class ConfigError(ValueError):
    """A configuration field is missing, unknown or has a value that jdllm does not support; the text names it."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape and arithmetic of one masked diffusion transformer.

    Attributes:
        family: whose checkpoints it comes from: one of FAMILIES.
        vocab_size: rows of the embedding and columns of the head, padding ids included (V).
        d_model, n_layers, n_heads, n_kv_heads, d_ff: widths and counts (D, L, Q, K, F).
        max_sequence_length: the longest canvas that the model was trained for.
        rope_theta, rms_norm_eps: as in the checkpoint.
        weight_tying: the head is the transposed embedding.
        scale_logits: logits are divided by sqrt(D).
        input_emb_norm: embeddings are multiplied by sqrt(D).
        qkv_bias, linear_bias, norm_bias: which projections carry a bias; ``linear_bias`` is on every other matrix
            (attention output, feed-forward, head).
        mask_id, eos_id, pad_id: special token ids.
        shifted_logits: the logits of position i predict position i + 1 (Dream), else position i (LLaDA).
    """

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    max_sequence_length: int
    rope_theta: float
    rms_norm_eps: float
    mask_id: int
    eos_id: int
    pad_id: int
    weight_tying: bool = False
    scale_logits: bool = False
    input_emb_norm: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    norm_bias: bool = False
    shifted_logits: bool = False

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "max_sequence_length", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1")
        if self.d_model % self.n_heads:
            raise ConfigError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head size {self.head_dim} is odd: rotary embedding needs two halves")
        if self.mask_id == self.eos_id:
            raise ConfigError(f"mask_id and eos_id are both {self.mask_id}")
        for name in ("mask_id", "eos_id", "pad_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ConfigError(f"{name} {getattr(self, name)} is outside the vocabulary of {self.vocab_size}")

    @property
    def head_dim(self) -> int:
        """H."""
        return self.d_model // self.n_heads


# LLaDA's modeling file is a trimmed OLMo: most fields exist because OLMo had them.
_LLADA_INERT = frozenset(
    (
        "alibi_bias_max attention_dropout embedding_dropout residual_dropout flash_attention init_cutoff_factor "
        "init_device init_fn init_std precision use_cache rope_full_precision"
    ).split()
)
"""Training-time and implementation fields. ``rope_full_precision`` is inert since rotary angles are float32 always."""

_LLADA_ONLY = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "attention_layer_norm": False,
    "alibi": False,
    "rope": True,
    "block_group_size": 1,
}
"""Fields of which the real checkpoints use one value, the only one supported. (The affine flag of an attention layer
norm has no meaning without that norm.)"""

_LLADA_HONOURED = frozenset(
    (
        "vocab_size embedding_size d_model n_layers n_heads n_kv_heads multi_query_attention mlp_ratio "
        "mlp_hidden_size max_sequence_length rope_theta rms_norm_eps weight_tying scale_logits input_emb_norm "
        "include_bias include_qkv_bias bias_for_layer_norm mask_token_id eos_token_id pad_token_id "
        "attention_layer_norm_with_affine"
    ).split()
)


def _llada_config(hf: Mapping[str, Any]) -> ModelConfig:
    _check_fields(hf, "LLaDA", _LLADA_HONOURED | _LLADA_INERT, _LLADA_ONLY)
    d_model, n_heads = _integer(hf, "d_model"), _integer(hf, "n_heads")
    if hf.get("embedding_size") and _integer(hf, "embedding_size") < _integer(hf, "vocab_size"):
        raise ConfigError(f"config.json: embedding_size={hf['embedding_size']} is below vocab_size={hf['vocab_size']}")
    bias = _flag(hf, "include_bias", False)
    return ModelConfig(
        family="llada",
        vocab_size=_integer(hf, "embedding_size") if hf.get("embedding_size") else _integer(hf, "vocab_size"),
        d_model=d_model,
        n_layers=_integer(hf, "n_layers"),
        n_heads=n_heads,
        n_kv_heads=_llada_kv_heads(hf, n_heads),
        d_ff=_llada_d_ff(hf, d_model),
        max_sequence_length=_integer(hf, "max_sequence_length"),
        rope_theta=_number(hf, "rope_theta", 10_000.0),
        rms_norm_eps=_number(hf, "rms_norm_eps", 1e-5),
        mask_id=_integer(hf, "mask_token_id"),
        eos_id=_integer(hf, "eos_token_id"),
        pad_id=_integer(hf, "pad_token_id"),
        weight_tying=_flag(hf, "weight_tying", True),
        scale_logits=_flag(hf, "scale_logits", False),
        input_emb_norm=_flag(hf, "input_emb_norm", False),
        qkv_bias=bias or _flag(hf, "include_qkv_bias", False),
        linear_bias=bias,
        norm_bias=_flag(hf, "bias_for_layer_norm", bias),
    )


def _llada_kv_heads(hf: Mapping[str, Any], n_heads: int) -> int:
    multi_query = hf.get("multi_query_attention")
    if hf.get("n_kv_heads") is None:
        return 1 if multi_query else n_heads
    heads = _integer(hf, "n_kv_heads")
    if multi_query is not None and (heads == 1) != bool(multi_query):
        raise ConfigError(f"config.json: n_kv_heads={heads} contradicts multi_query_attention={multi_query}")
    return heads


def _llada_d_ff(hf: Mapping[str, Any], d_model: int) -> int:
    if hf.get("mlp_hidden_size") is not None:
        return _integer(hf, "mlp_hidden_size")
    return int(_number(hf, "mlp_ratio", 4) * d_model)


_DREAM_INERT = frozenset("attention_dropout initializer_range max_window_layers sliding_window use_cache".split())
"""Training-time fields, and two that only ``use_sliding_window`` gives a meaning."""

_DREAM_ONLY = {"hidden_act": "silu", "rope_scaling": None, "use_mrope": False, "use_sliding_window": False}

_DREAM_HONOURED = frozenset(
    (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
        "max_position_embeddings rope_theta rms_norm_eps tie_word_embeddings mask_token_id eos_token_id pad_token_id"
    ).split()
)


def _dream_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Dream is Qwen2 without its causal mask: biases on q, k and v alone, which no field of the file says."""
    _check_fields(hf, "Dream", _DREAM_HONOURED | _DREAM_INERT, _DREAM_ONLY)
    d_model, n_heads = _integer(hf, "hidden_size"), _integer(hf, "num_attention_heads")
    if hf.get("head_dim") is not None and _integer(hf, "head_dim") * n_heads != d_model:
        raise ConfigError(
            f"config.json: head_dim={hf['head_dim']} is not supported for Dream; only hidden_size / "
            f"num_attention_heads = {d_model} / {n_heads} is"
        )
    return ModelConfig(
        family="dream",
        vocab_size=_integer(hf, "vocab_size"),
        d_model=d_model,
        n_layers=_integer(hf, "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_heads if hf.get("num_key_value_heads") is None else _integer(hf, "num_key_value_heads"),
        d_ff=_integer(hf, "intermediate_size"),
        max_sequence_length=_integer(hf, "max_position_embeddings"),
        rope_theta=_number(hf, "rope_theta", 10_000.0),
        rms_norm_eps=_number(hf, "rms_norm_eps", 1e-6),
        mask_id=_integer(hf, "mask_token_id"),
        eos_id=_integer(hf, "eos_token_id"),
        pad_id=_integer(hf, "pad_token_id"),
        weight_tying=_flag(hf, "tie_word_embeddings", False),
        qkv_bias=True,
        shifted_logits=True,
    )


def _check_fields(hf: Mapping[str, Any], family: str, known: frozenset[str], only: Mapping[str, Any]) -> None:
    """Refuse fields that nobody knows, and other values than the one supported of those in ``only``."""
    if unknown := sorted(hf.keys() - GENERIC_HF_FIELDS - known - only.keys()):
        raise ConfigError(f"config.json has fields that jdllm does not know for {family}: {', '.join(unknown)}")
    for name, value in only.items():
        if hf.get(name, value) != value:
            raise ConfigError(f"config.json: {name}={hf[name]!r} is not supported for {family}; only {value!r} is")


def _number(hf: Mapping[str, Any], name: str, default: float) -> float:
    value = hf.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {name}={value!r} must be a number above 0")
    return float(value)


def _flag(hf: Mapping[str, Any], name: str, default: bool) -> bool:
    value = hf.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config.json: {name}={value!r} must be true or false")
    return default if value is None else value


def _integer(hf: Mapping[str, Any], name: str) -> int:
    value = hf.get(name)
    if value is None:
        raise ConfigError(f"config.json has no {name}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"config.json: {name}={value!r} must be an integer")
    return value


_READERS = {"dream": _dream_config, "llada": _llada_config}

FAMILIES = tuple(_READERS)


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face ``config.json`` (already parsed).

    Raises:
        ConfigError: a field is missing, unknown, or set to something unsupported; the message names it.
    """
    family = str(hf.get("model_type", "")).lower()
    if family not in _READERS:
        raise ConfigError(f"model_type {hf.get('model_type')!r} is not supported; known: {', '.join(FAMILIES)}")
    return _READERS[family](hf)
