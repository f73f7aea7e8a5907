"""LoRA adapters beside the weights, chosen per row: several, and none, in one batch.

A weight W that adapters change becomes W plus a low-rank product in which each adapter owns some of the rank's columns:
``x @ W + ((x @ a) * (column belongs to the row's adapter)) @ b``. One product for all adapters costs the sum of their
ranks, a few hundredths of the weight itself.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One adapter as it is applied.

    Attributes:
        pairs: weight name -> (a [in, r], b [r, out]), float32, b times the adapter's scale.
    """

    name: str
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]


def stack(adapters: Sequence[Adapter]) -> dict[str, np.ndarray]:
    """The adapters as further weights: for a weight ``w`` that any of them changes ``w_lora_a`` [in, ranks],
    ``w_lora_b`` [ranks, out], float32, and ``w_lora_of`` int32 [ranks], which adapter (from 1) owns each column."""
    names = dict.fromkeys(name for adapter in adapters for name in adapter.pairs)
    found: dict[str, np.ndarray] = {}
    for name in names:
        parts = [(i, *adapter.pairs[name]) for i, adapter in enumerate(adapters, 1) if name in adapter.pairs]
        found[f"{name}_lora_a"] = np.concatenate([a for _, a, _ in parts], axis=1)
        found[f"{name}_lora_b"] = np.concatenate([b for _, _, b in parts], axis=0)
        found[f"{name}_lora_of"] = np.concatenate([np.full(a.shape[1], i, np.int32) for i, a, _ in parts])
    return found
