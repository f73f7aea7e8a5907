"""Slots of a compiled batch: insert, step, evict, report. Knows no HTTP, no queue, no tokenizer.

(interface first; the body follows)
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from jdllm.config import DecodeConfig, ModelConfig
from jdllm.models.llada import Params


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """max_rows: slots (B). max_length: canvas positions a row (S), prompt and answer together."""

    max_rows: int = 16
    max_length: int = 1024
    steps_per_dispatch: int = 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One occupied slot as of one report. Positions count from the first prompt token.

    Attributes:
        slot, handle: where the request sits and what ``insert`` was given for it.
        live: still decoding; False once, in the report in which the row has ended.
        prompt_length: positions of the prompt.
        length: end of the newest block (exclusive).
        prefix: end of the committed left-to-right text (exclusive): the first masked position, or ``length``.
        stop: position of the first stop id inside the prefix, or -1.
        nfe: forward passes of this row so far.
        tokens: int32 [S], the canvas; masked positions hold the mask id.
    """

    slot: int
    handle: Hashable
    live: bool
    prompt_length: int
    length: int
    prefix: int
    stop: int
    nfe: int
    tokens: np.ndarray

    @property
    def canvas_ids(self) -> list[int]:
        """Everything after the prompt, as the reference returns it."""
        return self.tokens[self.prompt_length : self.length].tolist()

    @property
    def ids(self) -> list[int]:
        """The committed text: left to right, cut before the first stop id."""
        end = self.stop if self.stop >= 0 else self.prefix
        return self.tokens[self.prompt_length : end].tolist()

    @property
    def finish_reason(self) -> str | None:
        """None while the text is open; ``stop`` at a stop id, ``length`` at max_tokens."""
        if self.stop >= 0:
            return "stop"
        return None if self.live else "length"


class Engine:
    """One device-resident batch. Not thread-safe: one thread owns it.

    Args:
        params: flat weights (jdllm.models.llada.Params), their dtype is the compute dtype.
    """

    def __init__(self, params: Params, model: ModelConfig, config: EngineConfig = EngineConfig()):
        raise NotImplementedError

    def compile(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every bucket; ``progress(done, total, text)`` after each. Nothing compiles afterwards."""

    def check(self, prompt_ids: Sequence[int], decode: DecodeConfig) -> None:
        """Raise RequestError (naming the field) if ``insert`` would refuse this request."""

    def insert(self, slot: int, handle: Hashable, prompt_ids: Sequence[int], decode: DecodeConfig) -> None:
        """Put a request into a free slot; it takes part from the next ``step``."""

    def evict(self, slot: int) -> None:
        """Free a slot, finished or not. Its rows no longer appear in reports."""

    def step(self) -> list[Row]:
        """Dispatch one call of the compiled step; return the rows of the call before it, whose sizes chose this
        call's bucket. The device works on the new call while the caller uses the rows. When no row is live nothing is
        dispatched, and [] comes back once every report has been read."""
        raise NotImplementedError
