"""What a model is (ModelConfig), how a request is decoded (DecodeConfig), what is compiled (EngineConfig). Plain data.

ModelConfig is read from a Hugging Face ``config.json``. Every field of such a file is honoured, known to be without
effect on inference, or refused by name: a checkpoint never loads with a setting that is silently ignored.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

GENERIC_HF_FIELDS = frozenset(
    (
        "_name_or_path architectures auto_map bos_token_id dtype model_type tokenizer_class torch_dtype "
        "transformers_version"
    ).split()
)
"""Fields that Hugging Face writes into any config.json and that do not change the forward pass."""


class ConfigError(ValueError):
    """A configuration field is missing, unknown or has a value that jdllm does not support; the text names it."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape and arithmetic of one masked diffusion transformer.

    Attributes:
        family: which model file describes it (``llada``).
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


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face ``config.json`` (already parsed).

    Raises:
        ConfigError: a field is missing, unknown, or set to something unsupported; the message names it.
    """
    readers = {"llada": _llada_config}
    family = str(hf.get("model_type", "")).lower()
    if family not in readers:
        raise ConfigError(f"model_type {hf.get('model_type')!r} is not supported; known: {', '.join(sorted(readers))}")
    return readers[family](hf)


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
    unknown = sorted(set(hf) - GENERIC_HF_FIELDS - _LLADA_INERT - set(_LLADA_ONLY) - _LLADA_HONOURED)
    if unknown:
        raise ConfigError(f"config.json has fields that jdllm does not know for LLaDA: {', '.join(unknown)}")
    for name, only in _LLADA_ONLY.items():
        if hf.get(name, only) != only:
            raise ConfigError(f"config.json: {name}={hf[name]!r} is not supported for LLaDA; only {only!r} is")
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


CONFIDENCES = ("probability", "margin", "neg_entropy")
"""Which confidence picks the fallback token of a fully activated block: top probability, top minus second
probability, or sum of p log(p + 1e-10). The skip threshold always looks at the probability."""

MAX_STOP_IDS = 4


class RequestError(ValueError):
    """A request's field has a value that cannot be served.

    Attributes:
        field: the name of the offending field, as the user wrote it.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How one request is decoded. Defaults are those of the D2F scripts (semantics: D2F-eval).

    Attributes:
        decoder: the published algorithm; ``d2f`` is the only one so far.
        max_tokens: positions after the prompt, exactly (the last block is cut to fit). 0 generates nothing.
        block_size: positions a block.
        block_add_threshold: decoded share of the newest block at which the next is added, in [0, 1].
        decoded_token_threshold: decoded share of a block at which its successor is fully activated, in [0, 1].
        skip_threshold: a position is committed when its probability is strictly above this; at least 0, 1 disables it.
        temperature: 0 is greedy; otherwise logits are divided by it and the candidate is sampled.
        top_p, top_k: nucleus and top-k filters before the softmax; 1.0 and 0 switch them off.
        seed: random numbers depend on it, the step and the position alone.
        confidence: one of CONFIDENCES.
        early_stop: end as soon as the text up to the first stop id is settled. False is the reference's behaviour:
            every existing block is decoded to its last mask.
        stop_ids: committing one of these ends the text there and adds no further block; None means the model's
            end-of-text id, () means none.
    """

    decoder: str = "d2f"
    max_tokens: int = 128
    block_size: int = 32
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95
    skip_threshold: float = 0.9
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    confidence: str = "probability"
    early_stop: bool = True
    stop_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check = _check_field
        check(self.decoder == "d2f", "decoder", f"{self.decoder!r} is not known; use 'd2f'")
        for name, low, high in (
            ("max_tokens", 0, 1 << 20),
            ("block_size", 1, 1 << 20),
            ("top_k", 0, 1 << 30),
            ("seed", -(1 << 63), (1 << 64) - 1),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            check(whole and low <= value <= high, name, f"{value!r} must be a whole number from {low} to {high}")
        for name, low_f, high_f in (
            ("block_add_threshold", 0.0, 1.0),
            ("decoded_token_threshold", 0.0, 1.0),
            ("skip_threshold", 0.0, math.inf),
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
            check(number and low_f <= value <= high_f, name, f"{value!r} must be a number from {low_f} to {high_f}")
        check(self.top_p > 0, "top_p", "must be above 0")
        check(self.confidence in CONFIDENCES, "confidence", f"{self.confidence!r} must be one of {CONFIDENCES}")
        check(isinstance(self.early_stop, bool), "early_stop", f"{self.early_stop!r} must be true or false")
        if self.stop_ids is not None:
            ok = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in self.stop_ids)
            check(ok and len(self.stop_ids) <= MAX_STOP_IDS, "stop_ids", f"at most {MAX_STOP_IDS} token ids")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What is compiled.

    Attributes:
        max_rows: slots (B).
        max_length: canvas positions a row (S), prompt and answer together.
        steps_per_dispatch: denoising steps a call; rows that end inside a call are frozen to its end.
        max_packed: most window positions of all rows together in one step; a row beyond them waits for the next.
    """

    max_rows: int = 16
    max_length: int = 1024
    steps_per_dispatch: int = 1
    max_packed: int = 8192

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_length", "steps_per_dispatch", "max_packed"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")


def _check_field(ok: bool, field: str, message: str) -> None:
    if not ok:
        raise RequestError(field, message)


def need(threshold: float, block_size: int) -> int:
    """The fewest decoded tokens m of a block with ``m / block_size >= threshold``, in Python's float64 as the
    reference compares; ``block_size + 1`` where no m reaches it."""
    first = max(0, int(threshold * block_size) - 1)
    return next((m for m in range(first, block_size + 1) if m / block_size >= threshold), block_size + 1)
