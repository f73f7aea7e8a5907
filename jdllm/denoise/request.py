"""From a request's settings to what its slot holds at the start."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jdllm.config import DecodeConfig, ModelConfig
from jdllm.decoders import row_numbers, seed_number
from jdllm.denoise.state import PROGRESS, SETTINGS, Request, column_of, pack_row

PLACEMENT = ("arrival", "owner", "shadow")
"""Numbers that are known once a request gets its slot."""

_SEED = column_of("seed")
_PLACED = [column_of(name) for name in PLACEMENT]

_POSITIONS = ("length", "end", "settled", "block", "prompt_length", "fill_from", "limit", "stop_from")
"""Numbers that count from the first prompt token, of a request's start: ``start`` alone is there itself."""

_MOVED = {names: pack_row(names, {name: int(name in _POSITIONS) for name in names}) for names in (PROGRESS, SETTINGS)}


def request(prompt: Sequence[int], decode: DecodeConfig, model: ModelConfig, canvas: int) -> Request:
    """What ``insert`` writes for a request, at its start, the first in slot 0 (``placed``: in another). D2F's first
    block is added here: its prompt counts as a fully decoded block 0. Reads its arguments alone, on any thread.

    Args:
        canvas: S.
    """
    numbers, schedule = row_numbers(prompt, decode, model)
    numbers |= dict.fromkeys(PLACEMENT, 0)
    tokens = np.full(canvas, model.mask_id, np.int32)
    tokens[: len(prompt)] = prompt
    counts = np.ones(canvas, np.int32)  # also behind a schedule: no pass that is due may stand still for ever
    counts[: len(schedule)] = schedule
    return Request(pack_row(PROGRESS, numbers), pack_row(SETTINGS, numbers), counts, tokens)


def behind(packed: Request, prompt: Sequence[int], seed: int) -> Request:
    """``request`` for a prompt, from its result for an empty one and the same settings but for the seed, for less than
    making it: all that it names lies behind the prompt. (Not for infill, which fills the prompt itself.)"""
    P, tokens = len(prompt), packed.tokens.copy()
    tokens[:P] = prompt
    settings = packed.settings + P * _MOVED[SETTINGS]
    _write_seed(settings, seed)
    return Request(packed.progress + P * _MOVED[PROGRESS], settings, packed.schedule, tokens)


def with_seed(request: Request, seed: int) -> Request:
    """The same request with another seed (DecodeConfig's), for less than making it again."""
    settings = request.settings.copy()
    _write_seed(settings, seed)
    return dataclasses.replace(request, settings=settings)


def _write_seed(settings: np.ndarray, seed: int) -> None:
    settings.view(np.uint32)[_SEED] = seed_number(seed)


def placed(request: Request, arrival: int, owner: int, shadow: int) -> Request:
    """The request in its slot.

    Args:
        arrival: how many requests came before.
        owner, shadow: Rows' fields.
    """
    settings = request.settings.copy()
    settings[_PLACED] = arrival % (1 << 31), owner, shadow
    return dataclasses.replace(request, settings=settings)


def first_width(request: Request) -> int:
    """Positions of the window of its first pass."""
    numbers = dict(zip(PROGRESS, request.progress.tolist(), strict=True))
    return numbers["end"] - numbers["start"]
