"""D2F decoding in plain Python on lists, in the words of the reference: one request, one loop iteration after another.

Written to be read beside the rules, not to be fast: blocks are objects with a state and a counter, nothing is derived.
Two rules are the project's own and marked: the last block may be cut to ``max_tokens``, and ``early_stop``.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from jdllm.config import DecodeConfig

Forward = Callable[[list[int], int], dict[int, tuple[int, float, float]]]
"""(whole sequence, forwards so far) -> position -> (token, probability, confidence for the fallback)."""


@dataclasses.dataclass
class Block:
    start: int
    size: int
    masks: int
    state: str = "active"
    complete: bool = False

    @property
    def ratio(self) -> float:
        return 1.0 if not self.size else (self.size - self.masks) / self.size


@dataclasses.dataclass
class View:
    """What the loop holds just before a forward, and once more when it has ended (``live`` False)."""

    live: bool
    x: list[int]
    nfe: int
    cache_length: int
    written: int
    blocks: list[Block]
    eos: bool


def decode(
    prompt: list[int], d: DecodeConfig, forward: Forward, mask_id: int, stop_ids: tuple[int, ...]
) -> Iterator[View]:
    P, B = len(prompt), d.block_size
    limit = P + d.max_tokens
    x = list(prompt)
    blocks = [Block(0, P, 0, state="to_cache", complete=True)]
    eos, cache_length, nfe = False, 0, 0
    skip = np.float32(d.skip_threshold)  # compared in the dtype of the probabilities

    def view(live: bool, written: int = 0) -> View:
        return View(live, list(x), nfe, cache_length, written, [dataclasses.replace(b) for b in blocks], eos)

    while True:
        # 1 ADD, at most one block
        if len(x) < limit and not eos and blocks[-1].ratio >= d.block_add_threshold:
            size = min(B, limit - len(x))  # ours: the reference has whole blocks only
            blocks.append(Block(len(x), size, size))
            x += [mask_id] * size
        # 2 ACTIVATE: sticky
        for before, after in itertools.pairwise(blocks):
            if before.ratio >= d.decoded_token_threshold:
                after.complete = True
        # 3 STOP
        if mask_id not in x[P:] and not any(b.state == "active" for b in blocks):
            yield view(live=False)
            return
        # 4 INPUT
        to_cache = [b for b in blocks if b.state == "to_cache"]
        written = sum(b.size for b in to_cache)
        yield view(live=True, written=written)
        # 5 FORWARD
        found = forward(x, nfe)
        nfe += 1
        for b in to_cache:
            b.state = "in_cache"
        cache_length += written
        # 6 UNMASK
        for b in blocks:
            if b.state != "active":
                continue
            here = [i for i in range(b.start, b.start + b.size) if x[i] == mask_id]
            chosen = [i for i in here if found[i][1] > skip]
            if not chosen and b.complete and here:
                chosen = [max(here, key=lambda i: (found[i][2], -i))]
            for i in chosen:
                x[i] = found[i][0]
                b.masks -= 1
                eos = eos or x[i] in stop_ids
        # 7 DEACTIVATE
        for b in blocks:
            if b.state == "active":
                if mask_id in x[b.start : b.start + b.size]:
                    break
                b.state = "to_cache"
        # ours: the text up to the first stop id is settled
        if d.early_stop:
            stops = [i for i in range(P, len(x)) if x[i] in stop_ids]
            if stops and mask_id not in x[P : stops[0]]:
                yield view(live=False)
                return
