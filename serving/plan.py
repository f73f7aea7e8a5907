"""What the settings of a request come to, worked out once for all requests that give the same ones."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jdllm.config import DecodeConfig
from jdllm.decoders import check_request, threshold
from jdllm.serving.schemas import ChatRequest, CompletionRequest

if TYPE_CHECKING:  # it imports JAX
    from jdllm.denoise.state import Request
    from jdllm.serving.model import ServedModel

MOST_PLANS = 64
"""That are kept; each has two arrays of a canvas's length."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings of a kind of request.

    Attributes:
        decode: with seed 0.
        threshold: the probability at which positions are committed, or None.
    """

    model: "ServedModel"
    decode: DecodeConfig
    threshold: float | None

    def pack(self, prompt: Sequence[int], seed: int) -> "Request":
        """What the engine writes for such a request without infill.

        Args:
            prompt: ids of the model, at least one, that leave room for ``max_tokens``.

        Raises:
            RequestError: the engine cannot serve these settings.
        """
        from jdllm.denoise.request import behind

        return behind(self._alone, prompt, seed)

    @functools.cached_property
    def _alone(self) -> "Request":
        """For an empty prompt."""
        model = self.model
        check_request([0], self.decode, model.config, model.max_length, model.max_rows, len(model.adapters))
        return model.pack((), self.decode)


class Plans:
    """The plans of one model that were asked for lately. For one thread."""

    def __init__(self, model: "ServedModel"):
        self._model = model
        self._known: dict[tuple[object, ...], Plan] = {}

    def of(self, request: ChatRequest | CompletionRequest, name: str, max_tokens: int, alternatives: int) -> Plan:
        """The plan of a request to the adapter ``name``, or to the model alone.

        Raises:
            RequestError: a setting is out of range, or not the decoder's.
        """
        key = (name, max_tokens, alternatives, *request.settings())
        plan = self._known.get(key)
        if plan is None:
            plan = self._make(request, name, max_tokens, alternatives)  # first: a refusal takes nothing from others
            if len(self._known) == MOST_PLANS:
                self._known.clear()
            self._known[key] = plan
        return plan

    def _make(self, request: ChatRequest | CompletionRequest, name: str, max_tokens: int, alternatives: int) -> Plan:
        model = self._model
        ours = {"max_tokens": max_tokens, "adapter": model.adapter_number(name), "alternatives": alternatives}
        decode = request.decode(model.config.family, model.defaults_of(name), model.tokenizer, ours)
        return Plan(model, decode, threshold(decode, model.config))
