"""The requests that are understood, field by field, and what is made of the fields that are not.

null is the same as leaving a field out, everywhere.
"""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, StrictFloat, StrictInt, StrictStr

from jdllm.config import MAX_ALTERNATIVES, DecodeConfig, RequestError
from jdllm.decoders import decode_config
from jdllm.tokenizer import Tokenizer

MAX_STOPS = 16
"""OpenAI has four; evaluations in common use send more."""
MOST_MILLISECONDS = 86_400_000

ANY = object()
NEUTRAL: Mapping[str, Sequence[Any] | object] = {
    # Without effect on the answer, whatever the value.
    "user": ANY,
    "metadata": ANY,
    "store": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "service_tier": ANY,
    "verbosity": ANY,
    "parallel_tool_calls": ANY,
    "reasoning_effort": ANY,
    # Not supported; accepted with the values that ask for nothing.
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "prompt_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "min_p": (0,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Known fields that are not implemented -> the values that are accepted and ignored."""


class StreamOptions(BaseModel):
    """``stream_options``: what a stream says besides text."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class _Request(BaseModel):
    """What chat and text completions have in common. The second group are DecodeConfig's fields, by their names."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    n: StrictInt | None = None
    stop: Any = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool | None = None
    canvas: StrictBool | None = None
    min_tokens: StrictInt | None = None
    deadline_ms: StrictFloat | None = None
    slo_ms: StrictFloat | None = None
    priority: StrictInt | None = None

    max_tokens: StrictInt | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    seed: StrictInt | None = None
    decoder: StrictStr | None = None
    block_size: StrictInt | None = None
    block_length: StrictInt | None = None
    steps: StrictInt | None = None
    cache: StrictStr | None = None
    threshold: StrictFloat | None = None
    factor: StrictFloat | None = None
    remasking: StrictStr | None = None
    cfg_scale: StrictFloat | None = None
    logits_eos_inf: StrictBool | None = None
    confidence_eos_eot_inf: StrictBool | None = None
    alg: StrictStr | None = None
    alg_temp: StrictFloat | None = None
    eps: StrictFloat | None = None
    block_add_threshold: StrictFloat | None = None
    decoded_token_threshold: StrictFloat | None = None
    skip_threshold: StrictFloat | None = None
    confidence: StrictStr | None = None
    early_stop: StrictBool | None = None
    infill: StrictBool | None = None

    def stop_strings(self) -> list[str]:
        """At most MAX_STOPS; empty ones say nothing and are dropped."""
        stops = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise RequestError("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
        if len(stops) > MAX_STOPS:
            raise RequestError("stop", f"{len(stops)} strings; at most {MAX_STOPS} are possible")
        return [s for s in stops if s]

    def timing(self) -> tuple[float | None, float | None, int]:
        """Seconds that the request has before it is ended, and in which it wants to have ended, by default the same;
        and its priority."""
        for name in ("deadline_ms", "slo_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST_MILLISECONDS:
                raise RequestError(name, f"{value!r} must be above 0, at most {MOST_MILLISECONDS}")
        priority = self.priority or 0
        if abs(priority) > 1 << 30:
            raise RequestError("priority", f"{priority} must be from {-(1 << 30)} to {1 << 30}")
        deadline, slo = (None if ms is None else ms / 1000 for ms in (self.deadline_ms, self.slo_ms))
        return deadline, deadline if slo is None else slo, priority

    def decode(
        self, family: str, defaults: Mapping[str, Any], words: Tokenizer, ours: Mapping[str, Any]
    ) -> DecodeConfig:
        """The decode settings: this request's and ``ours``, else the checkpoint's, else DecodeConfig's. The tokenizer's
        stop ids hold with ``early_stop`` only: without it the model's end of text is the one stop, as in the
        reference."""
        given = {name: getattr(self, name) for name in _DECODE_FIELDS if getattr(self, name) is not None}
        length = self.block_length  # the official code's name
        if length is not None and given.setdefault("block_size", length) != length:
            raise RequestError("block_length", f"is block_size, which is {self.block_size}; give one of them")
        if given.get("top_k") == -1:  # how vLLM's clients switch it off
            given["top_k"] = 0
        if not 0 <= given.get("temperature", 0) <= 2:
            raise RequestError("temperature", f"{self.temperature!r} must be a number from 0 to 2")
        least = self.min_tokens or 0
        if not 0 <= least <= ours["max_tokens"]:
            raise RequestError("min_tokens", f"{least} must be from 0 to max_tokens, here {ours['max_tokens']}")
        early_stop = given.get("early_stop", defaults.get("early_stop", DecodeConfig.early_stop))
        stop_ids = () if self.ignore_eos else words.stop_ids if early_stop else None
        given |= {"stop_ids": stop_ids, "eot_id": words.eot_id, "min_tokens": least}
        return decode_config({**given, **ours}, family, defaults)

    def settings(self) -> tuple[Any, ...]:
        """All that ``decode`` reads of it, in a fixed order."""
        return _SETTINGS(self)

    def unknown_fields(self) -> list[str]:
        """Fields that nobody knows.

        Raises:
            RequestError: a field that is known, not supported, and asks for something.
        """
        unknown, extra = [], self.model_extra or {}
        for name, value in extra.items():
            accepted = NEUTRAL.get(name)
            if name == "tools" and extra.get("tool_choice") == "none":
                accepted = ANY
            if accepted is None:
                unknown.append(name)
            elif value is not None and accepted is not ANY and not any(_same(value, a) for a in accepted):  # type: ignore[attr-defined]
                raise RequestError(name, "is not supported by this server; leave it out")
        return unknown


_SET_APART = ("max_tokens", "min_tokens", "seed", "stop_ids", "eot_id", "adapter", "alternatives")
_DECODE_FIELDS = tuple(f.name for f in dataclasses.fields(DecodeConfig) if f.name not in _SET_APART)
_SETTINGS = operator.attrgetter(*_DECODE_FIELDS, "block_length", "min_tokens", "ignore_eos")


def _alternatives(field: str, asked: int | None) -> int:
    if asked is not None and not 0 <= asked <= MAX_ALTERNATIVES:
        raise RequestError(field, f"{asked} must be from 0 to {MAX_ALTERNATIVES}")
    return asked or 0


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None

    def wanted_logprobs(self) -> tuple[bool, int]:
        """Whether those of the tokens are asked for, and of how many alternatives beside each."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", "needs logprobs: true")
        return bool(self.logprobs), _alternatives("top_logprobs", self.top_logprobs)


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Any = None
    suffix: StrictStr | None = None
    echo: StrictBool | None = None
    logprobs: StrictInt | None = None

    def wanted_logprobs(self) -> tuple[bool, int]:
        """As in ChatRequest."""
        if self.logprobs is not None and self.echo:
            raise RequestError("logprobs", "is not possible with echo: a masked model gives a prompt no probabilities")
        return self.logprobs is not None, _alternatives("logprobs", self.logprobs)


class TokenizeRequest(BaseModel):
    """POST /tokenize: a raw prompt or a chat."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Any = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None


class AbortRequest(BaseModel):
    """POST /v1/abort: the ``X-Request-ID`` of running calls."""

    request_id: StrictStr


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: list[StrictInt]


def prompts(prompt: Any) -> list[str] | list[list[int]]:
    """The four forms of ``prompt``, as a list of texts or a list of id lists."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(p, str) for p in prompt):
            return prompt
        if all(map(_is_id, prompt)):
            return [prompt]
        if all(isinstance(p, list) and p and all(map(_is_id, p)) for p in prompt):
            return prompt
    raise RequestError(
        "prompt", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids; not empty"
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _same(value: Any, accepted: Any) -> bool:
    """Equal, where true is not 1 and false is not 0."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
