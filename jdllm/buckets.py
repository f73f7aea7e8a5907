"""The list of compiled step sizes, and which of them the next call uses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jdllm.denoise.window import Bucket

if TYPE_CHECKING:
    from jdllm.engine import EngineConfig


def make_buckets(config: "EngineConfig") -> list[Bucket]:
    """The sizes to compile, few since each costs seconds: rows in powers of 16; packed positions two to the octave while
    they are few (most steps are narrow, and padding there is waste), with a narrow and a wide window for each; past 32
    positions a row (prompts) in octaves and wide only."""
    B, S = config.max_rows, config.max_length
    most = min(B * S, max(config.max_packed, S))
    buckets = set()
    for rows in _powers(16, 1, B):
        for packed in _packed_sizes(rows, min(rows * S, most)):
            windows = {min(S, packed)}
            if packed <= 32 * rows:
                windows.add(min(S, packed, _power_of_two(max(16, 2 * packed // rows))))
            buckets |= {Bucket(rows, window, packed, config.steps_per_dispatch) for window in windows}
    return sorted(buckets)


def choose_bucket(buckets: Sequence[Bucket], widths: np.ndarray) -> Bucket | None:
    """The cheapest bucket in which every row with a window takes part; if the rows together are too wide for any, the
    widest, in which some of them wait.

    Args:
        widths: int [B], the next window of each slot, 0 where there is none.
    """
    if not widths.any():
        return None
    rows, window, packed = int(np.flatnonzero(widths)[-1]) + 1, int(widths.max()), int(widths.sum())
    fits = [b for b in buckets if b.rows >= rows and b.window >= window and b.packed >= packed]
    return min(fits, key=lambda b: (b.packed, b.rows * b.window)) if fits else buckets[-1]


def _powers(base: int, low: int, high: int) -> list[int]:
    sizes = [low]
    while sizes[-1] * base < high:
        sizes.append(sizes[-1] * base)
    return sizes if sizes[-1] == high else [*sizes, high]


def _packed_sizes(rows: int, largest: int) -> list[int]:
    sizes, octave = {largest}, max(8, 2 * rows)
    while octave < largest:
        sizes.add(octave)
        if octave < max(32 * rows, 256):
            sizes.add(min(largest, -(-octave * 11 // 8 // 8) * 8))
        octave *= 2
    return sorted(sizes)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
