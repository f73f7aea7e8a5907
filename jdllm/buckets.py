"""The list of compiled step sizes, and which of them the next call uses."""

from collections.abc import Sequence

import numpy as np

from jdllm.config import EngineConfig
from jdllm.denoise.window import Bucket


def make_buckets(config: EngineConfig) -> list[Bucket]:
    """The sizes to compile, few since each costs seconds: rows in powers of 16; packed positions two to the octave
    while they are few, since most steps are narrow and padding there is waste, and in octaves above (prompts)."""
    B, S = config.max_rows, config.max_length
    most = min(B * S, max(config.max_packed, 2 * S))  # two: a guided row and its shadow step together
    buckets = set()
    for rows in _powers(16, 1, B):
        largest = min(rows * S, most)
        narrow = min(largest, 32 * rows if rows > 1 else 64)
        for packed in (*_half_octaves(max(8, 2 * rows), narrow), *_powers(2, narrow, largest)):
            buckets.add(Bucket(rows, packed, config.steps_per_dispatch))
    return sorted(buckets)


def choose_bucket(buckets: Sequence[Bucket], widths: np.ndarray) -> Bucket | None:
    """The cheapest bucket in which every row with a window takes part; if the rows together are too wide for any, the
    widest, in which some of them wait.

    Args:
        widths: int [B], the next window of each slot, 0 where there is none.
    """
    if not widths.any():
        return None
    return smallest_bucket(buckets, int(np.flatnonzero(widths)[-1]) + 1, int(widths.sum()))


def smallest_bucket(buckets: Sequence[Bucket], rows: int, packed: int) -> Bucket:
    """The cheapest for so many slots and positions, else the widest."""
    fits = [b for b in buckets if b.rows >= rows and b.packed >= packed]
    return min(fits, key=lambda b: (b.packed, b.rows)) if fits else buckets[-1]


def _powers(base: int, low: int, high: int) -> list[int]:
    """low, low * base, ... below high, and high."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= base
    return [*sizes, high]


def _half_octaves(low: int, high: int) -> list[int]:
    """low, about 1.4 low, 2 low, ... up to high, in multiples of eight."""
    between = [-(-octave * 11 // 8 // 8) * 8 for octave in _powers(2, low, high)]
    return sorted({size for size in (*_powers(2, low, high), *between) if size <= high})
