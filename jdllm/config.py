"""How a request is decoded (DecodeConfig) and what is compiled (EngineConfig), plain data; and, from model_config.py,
what a model is (ModelConfig)."""

import dataclasses
import functools
import math
from typing import Any

from jdllm.model_config import FAMILIES, ConfigError, ModelConfig, model_config

__all__ = [
    "ALGS",
    "CACHES",
    "CONFIDENCES",
    "FAMILIES",
    "MAX_ALTERNATIVES",
    "MAX_STOP_IDS",
    "RANKINGS",
    "REMASKINGS",
    "ConfigError",
    "DecodeConfig",
    "EngineConfig",
    "ModelConfig",
    "RequestError",
    "model_config",
    "need",
]

CONFIDENCES = ("probability", "margin", "neg_entropy")
"""What ranks masked positions: top probability, top minus second probability, or sum of p log(p + 1e-10). In D2F it
picks the fallback token of a fully activated block, and the skip threshold always looks at the probability."""

RANKINGS = (*CONFIDENCES, "random")
"""The same, and what LLaDA's random remasking and Dream's origin rank by."""

CACHES = ("none", "prefix", "dual")
REMASKINGS = ("low_confidence", "random")
ALGS = ("origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold")

MAX_STOP_IDS = 4

MAX_ALTERNATIVES = 20
"""Most probable tokens of a position that can be seen beside the committed one (A), as many as OpenAI gives."""


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
    """How one request is decoded. Which decoder reads which setting: jdllm.decoders. Defaults of D2F are those of its
    scripts (semantics: D2F-eval).

    Attributes:
        decoder: a name in jdllm.decoders.TABLE.
        max_tokens: positions after the prompt, exactly (the last block is cut to fit). 0 generates nothing.
        block_size: positions a block.
        block_add_threshold: decoded share of the newest block at which the next is added, in [0, 1].
        decoded_token_threshold: decoded share of a block at which its successor is fully activated, in [0, 1].
        skip_threshold: a position is committed when its probability is strictly above this; at least 0, 1 disables it.
        confidence: one of CONFIDENCES (D2F; the others choose by ``remasking`` or ``alg``).
        steps: forward passes for all blocks together, a multiple of their number; None: one a token.
        cache: one of CACHES; None: prefix.
        threshold: a position is committed when its confidence is at least this, the best one always; None: 0.9 if
            neither ``steps`` nor ``factor`` is given, else by quota.
        factor: Fast-dLLM's rule instead of a threshold.
        remasking: one of REMASKINGS.
        cfg_scale: guidance by the same canvas with its prompt masked; 0 for none, else the request takes two slots.
        logits_eos_inf: end-of-text is never a candidate.
        confidence_eos_eot_inf: end-of-text and end-of-turn as candidates have no confidence, and are committed last.
        alg: one of ALGS; None: entropy, or confidence_threshold for fast-dllm.
        alg_temp: noise on Dream's ranking; 0 for none.
        eps: where Dream's time ends.
        temperature: 0 is greedy; otherwise logits are divided by it and the candidate is sampled.
        top_p, top_k: nucleus and top-k filters before the softmax; 1.0 and 0 switch them off.
        seed: random numbers depend on it, the step and the position alone.
        early_stop: end as soon as the text up to the first stop id is settled. False is the reference's behaviour:
            every existing block is decoded to its last mask.
        min_tokens: the first so many positions after the prompt never hold a stop id.
        infill: mask ids inside the prompt are filled in place; otherwise they are ordinary input.
        stop_ids: committing one of these ends the text there and adds no further block; None means the model's
            end-of-text id, () means none.
        eot_id: the model's end-of-turn id, for ``confidence_eos_eot_inf``; None where there is none.
        adapter: which of the engine's adapters, from 1; 0 for the model alone.
        alternatives: how many of the most probable tokens are kept for every position, for ``Engine.alternatives``.
    """

    decoder: str = "d2f"
    max_tokens: int = 128
    block_size: int = 32
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95
    skip_threshold: float = 0.9
    confidence: str = "probability"
    steps: int | None = None
    cache: str | None = None
    threshold: float | None = None
    factor: float | None = None
    remasking: str = "low_confidence"
    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    alg: str | None = None
    alg_temp: float = 0.0
    eps: float = 1e-3
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    early_stop: bool = True
    min_tokens: int = 0
    infill: bool = False
    stop_ids: tuple[int, ...] | None = None
    eot_id: int | None = None
    adapter: int = 0
    alternatives: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("confidence", CONFIDENCES),
            ("cache", CACHES),
            ("remasking", REMASKINGS),
            ("alg", ALGS),
        ):
            value = getattr(self, name)
            if not (value in known or (value is None and name in _OPTIONAL)):
                raise RequestError(name, f"{value!r} is not known; use one of {', '.join(known)}")
        for name, low, high in (
            ("max_tokens", 0, 1 << 20),
            ("min_tokens", 0, 1 << 20),
            ("block_size", 1, 1 << 20),
            ("steps", 1, 1 << 20),
            ("top_k", 0, 1 << 30),
            ("alternatives", 0, MAX_ALTERNATIVES),
            ("seed", *_SEEDS),
        ):
            value = getattr(self, name)
            if not (_is_whole(value, low, high) or (value is None and name in _OPTIONAL)):
                raise _not_whole(name, value, low, high)
        for name, low_f, high_f in (
            ("block_add_threshold", 0.0, 1.0),
            ("decoded_token_threshold", 0.0, 1.0),
            ("skip_threshold", 0.0, math.inf),
            ("threshold", 0.0, math.inf),
            ("factor", 0.0, math.inf),
            ("cfg_scale", 0.0, 100.0),
            ("alg_temp", 0.0, 100.0),
            ("eps", 0.0, 1.0),
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
            within = number and low_f <= value <= high_f
            if not (within or (value is None and name in _OPTIONAL)):
                raise RequestError(name, f"{value!r} must be a number from {low_f} to {high_f}")
        for name in ("logits_eos_inf", "confidence_eos_eot_inf", "early_stop", "infill"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(name, f"{value!r} must be true or false")
        for name in ("top_p", "factor", "eps"):
            if getattr(self, name) == 0:
                raise RequestError(name, "must be above 0")
        if self.stop_ids is not None:
            ok = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in self.stop_ids)
            if not ok or len(self.stop_ids) > MAX_STOP_IDS:
                raise RequestError("stop_ids", f"at most {MAX_STOP_IDS} token ids")

    def with_seed(self, seed: int) -> "DecodeConfig":
        """The same settings with another seed, for less than checking all of them again."""
        if not _is_whole(seed, *_SEEDS):
            raise _not_whole("seed", seed, *_SEEDS)
        other = object.__new__(DecodeConfig)
        other.__dict__.update(self.__dict__, seed=seed)
        return other


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _not_whole(name: str, value: Any, low: int, high: int) -> RequestError:
    return RequestError(name, f"{value!r} must be a whole number from {low} to {high}")


_SEEDS = (-(1 << 63), (1 << 64) - 1)

MAX_LENGTH = 1 << 15
"""Positions and passes have fifteen bits each in the key of a random number."""

_OPTIONAL = ("steps", "cache", "threshold", "factor", "alg")
"""Settings whose default hangs on others: None until a decoder reads them."""


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
        if self.max_length > MAX_LENGTH:
            raise ValueError(f"max_length: {self.max_length} must be at most {MAX_LENGTH}")


@functools.lru_cache(1024)
def need(threshold: float, block_size: int) -> int:
    """The fewest decoded tokens m of a block with ``m / block_size >= threshold``, in Python's float64 as the
    reference compares; ``block_size + 1`` where no m reaches it."""
    first = max(0, int(threshold * block_size) - 1)
    return next((m for m in range(first, block_size + 1) if m / block_size >= threshold), block_size + 1)
