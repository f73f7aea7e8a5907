"""From a request's settings to what its slot holds at the start."""

from collections.abc import Sequence

import numpy as np

from jdllm.config import DecodeConfig, ModelConfig
from jdllm.decoders import row_numbers
from jdllm.denoise.state import PROGRESS, SETTINGS, Request, pack_row


def request(
    prompt: Sequence[int],
    decode: DecodeConfig,
    model: ModelConfig,
    canvas: int,
    *,
    arrival: int = 0,
    owner: int = 0,
    shadow: int = 0,
) -> Request:
    """What ``insert`` writes for a request, at its start. D2F's first block is added here: its prompt counts as a fully
    decoded block 0.

    Args:
        canvas: S.
        arrival: how many requests came before.
        owner, shadow: Rows' fields.
    """
    numbers, schedule = row_numbers(prompt, decode, model)
    numbers |= {"arrival": arrival % (1 << 31), "owner": owner, "shadow": shadow}
    tokens = np.full(canvas, model.mask_id, np.int32)
    tokens[: len(prompt)] = prompt
    counts = np.ones(canvas, np.int32)  # also behind a schedule: no pass that is due may stand still for ever
    counts[: len(schedule)] = schedule
    return Request(pack_row(PROGRESS, numbers), pack_row(SETTINGS, numbers), counts, tokens)


def first_width(request: Request) -> int:
    """Positions of the window of its first pass."""
    numbers = dict(zip(PROGRESS, request.progress.tolist(), strict=True))
    return numbers["end"] - numbers["start"]
