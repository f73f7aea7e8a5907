"""Requests through an engine in synchronized batches: all of one start together, the next starts when all have ended. A
batch of one is a request alone."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from jdllm.config import DecodeConfig
from jdllm.engine import Engine, Row
from jdllm.runtime import NOT_FINITE, UsageError

Progress = Callable[[int, int, str], None]
"""Told (done, total, of what)."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request's outcome.

    Attributes:
        ids: up to the first stop id, without it.
        nfe: its forward passes.
        blocks: blocks that it has on its canvas at the end, those behind the stop id included.
        written: blocks that the text reaches into, its stop id included: the answer's length.
        seconds: from the start of its batch to its end.
        truncated: max_tokens came before a stop id.
    """

    ids: list[int]
    nfe: int
    blocks: int
    written: int
    seconds: float
    truncated: bool


@dataclasses.dataclass(frozen=True)
class Batch:
    """``seconds`` until the last answer; ``steps`` denoising steps dispatched; positions ``computed`` in them, padding
    included, and ``needed``."""

    answers: list[Answer]
    seconds: float
    steps: int
    computed: int = 0
    needed: int = 0


def run_batch(engine: Engine, prompts: Sequence[Sequence[int]], decodes: Sequence[DecodeConfig]) -> Batch:
    """Decode some prompts together, each with its own settings, at most as many as there are slots, all free.

    Raises:
        UsageError: the model gives numbers that are not finite.
    """
    found: dict[int, Answer] = {}
    before, begin = dataclasses.replace(engine.counters), time.perf_counter()
    for slot, (prompt, decode) in enumerate(zip(prompts, decodes, strict=True)):
        engine.insert(slot, (slot, begin), prompt, decode)
    while len(found) < len(prompts):
        for row in engine.step():
            if not row.live:
                found[row.slot] = _answer(row, decodes[row.slot].block_size, time.perf_counter() - begin)
                engine.evict(row.slot)
    counted = [getattr(engine.counters, name) - getattr(before, name) for name in ("steps", "computed", "needed")]
    return Batch([found[slot] for slot in range(len(prompts))], time.perf_counter() - begin, *counted)


def _answer(row: Row, block_size: int, seconds: float) -> Answer:
    if row.failed:
        raise UsageError(f"--model: {NOT_FINITE}")
    stopped = row.stop >= 0
    length = len(row.ids) + stopped
    return Answer(
        ids=row.ids,
        nfe=row.nfe,
        blocks=-(-(row.length - row.prompt_length) // block_size),
        written=-(-length // block_size),
        seconds=seconds,
        truncated=not stopped,
    )


def run_batches(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    decode: DecodeConfig,
    size: int,
    progress: Progress,
    text: str,
    timed: bool = True,
) -> list[Batch]:
    """All prompts, ``size`` at a time, with the same settings. If they are timed, after a first batch that is thrown
    away: it meets every program for the first time."""
    together = lambda part: run_batch(engine, part, [decode] * len(part))
    if timed:
        together(prompts[:size])
    found = []
    for start in range(0, len(prompts), size):
        found.append(together(prompts[start : start + size]))
        progress(min(start + size, len(prompts)), len(prompts), text)
    return found


def answers(batches: Sequence[Batch]) -> list[Answer]:
    """Those of all batches, in order."""
    return [answer for batch in batches for answer in batch.answers]
