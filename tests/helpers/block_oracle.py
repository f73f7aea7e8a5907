"""LLaDA's and Fast-dLLM's decoding in plain Python on lists, in the words of the references: one block after the other.

Two rules are the project's own and marked: the last block may be cut to ``max_tokens``, and ``early_stop``.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jdllm.config import DecodeConfig

Forward = Callable[[list[int], int], dict[int, tuple[int, float, float]]]
"""(whole sequence, forwards so far) -> position -> (token, probability, confidence)."""


@dataclasses.dataclass
class View:
    """What the loop holds just before a forward, and once more when it has ended (``live`` False)."""

    live: bool
    x: list[int]
    nfe: int
    start: int
    end: int


def decode(
    prompt: list[int], d: DecodeConfig, forward: Forward, mask_id: int, stop_ids: tuple[int, ...]
) -> Iterator[View]:
    P, L = len(prompt), len(prompt) + d.max_tokens
    x = prompt + [mask_id] * d.max_tokens
    nfe = 0
    starts = range(P, L, d.block_size)
    passes = None if d.steps is None else d.steps // len(starts)
    by_quota = d.factor is None and d.threshold is None and (d.decoder == "llada" or d.steps is not None)
    for start in starts:
        end = min(start + d.block_size, L)  # ours: the references have whole blocks only
        masks = end - start
        i = 0
        while True:
            cache = d.cache or ("none" if d.decoder == "llada" else "prefix")
            window = {"none": (0, L), "prefix": (start, L), "dual": (start, end)}[cache] if i else (0, L)
            yield View(True, list(x), nfe, *window)
            found = forward(x, nfe)
            nfe += 1
            here = sorted((p for p in range(start, end) if x[p] == mask_id), key=lambda p: (-found[p][2], p))
            for p in here[: count(d, here, found, masks, passes, i, by_quota)]:
                x[p] = found[p][0]
            i += 1
            stops = [p for p in range(P, L) if x[p] in stop_ids]
            if d.early_stop and stops and mask_id not in x[P : stops[0]]:  # ours
                yield View(False, x, nfe, 0, 0)
                return
            if d.decoder == "llada" and passes is not None:
                if i == passes:
                    break
            elif mask_id not in x[start:end]:
                break
    yield View(False, x, nfe, 0, 0)


def count(d: DecodeConfig, here: list[int], found, masks: int, passes: int | None, i: int, by_quota: bool) -> int:
    """How many of the sorted positions are committed."""
    if by_quota:
        if passes is None:
            return 1
        return masks // passes + (i < masks % passes)
    confidence = [np.float32(found[p][2]) for p in here]
    n = len(here)
    if d.factor is not None:
        failures = [m for m in range(1, n) if confidence[m] < np.float32(1) - np.float32(d.factor) / np.float32(m + 2)]
        return n if not failures or failures[0] == n - 1 else failures[0]
    threshold = np.float32(0.9 if d.threshold is None else d.threshold)
    return max(1, sum(c >= threshold for c in confidence))
