"""What a conversion will do, settled before anything is written."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import jdllm
from jdllm.checkpoint_format import FORMAT_VERSION
from jdllm.convert.lora import Adapter, LowRank, open_adapter
from jdllm.convert.names import Weight
from jdllm.convert.source import Source, open_source
from jdllm.convert.tensors import Tensor

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked source, a checked adapter or None, and the dtype of the result."""

    source: Source
    adapter: Adapter | None
    dtype: np.dtype
    notes: list[str]

    def tensor(self, weight: Weight) -> Tensor:
        return self.source.tensors[weight.tensor]

    def change(self, weight: Weight) -> LowRank | None:
        """The adapter's change of this weight, if any."""
        if self.adapter is None or not weight.tensor.endswith(".weight"):
            return None
        return self.adapter.changes.get(weight.module)

    def nbytes(self, weight: Weight) -> int:
        """Of the result."""
        return math.prod(weight.shape) * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes(weight) for weight in self.source.weights)

    @property
    def group_bytes(self) -> dict[str, int]:
        """Bytes as stored in the source, by tensor group."""
        groups: dict[str, int] = {}
        for weight in self.source.weights:
            groups[weight.group] = groups.get(weight.group, 0) + self.tensor(weight).nbytes
        return groups

    @property
    def rounds(self) -> bool:
        """The result cannot hold every value exactly: after a merge, or where the source is wider."""
        if self.dtype == np.float32:
            return False
        return self.adapter is not None or any(
            self.tensor(weight).dtype != self.dtype for weight in self.source.weights
        )

    def record(self) -> dict[str, Any]:
        """The contents of jdllm.json."""
        return {
            "format": FORMAT_VERSION,
            "jdllm_version": jdllm.__version__,
            "family": self.source.config.family,
            "decoder": self.source.config.family if self.adapter is None else "d2f",
            "dtype": self.dtype.name,
            "source": self.source.folder.name,
            "adapter": self.adapter and self.adapter.record(),
            "model": dataclasses.asdict(self.source.config),
            "weights": {"tensors": len(self.source.weights), "bytes": self.total_bytes},
        }

    def describe(self) -> str:
        groups = self.group_bytes
        largest = max(groups, key=lambda name: groups[name])
        sources = sorted({str(tensor.dtype) for tensor in self.source.tensors.values()})
        files = len({tensor.path for tensor in self.source.tensors.values()})
        lines = [
            f"source    {self.source.folder} ({self.source.config.family}, {files} file{'s' * (files != 1)}, "
            f"{' and '.join(sources)})",
            f"tensors   {len(self.source.weights)} in {len(groups)} groups, "
            f"largest {largest} ({mega(groups[largest])})",
            f"result    {self.dtype.name}, {mega(self.total_bytes)}",
        ]
        if self.adapter:
            record = self.adapter.record()
            lines.append(
                f"adapter   {self.adapter.folder} (r {record['r']}, alpha {record['alpha']}"
                f"{', rslora' if record['rslora'] else ''}; {record['merged']} weights; merged in float32)"
            )
        return "\n".join(lines)


def mega(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"


def make_plan(source_folder: Path, adapter_folder: Path | None, dtype: str | None) -> Plan:
    """Read and check everything but the weights.

    Args:
        dtype: a key of DTYPES, or None for the one that is exact: float32 with an adapter (the merged sum does not fit
            into bfloat16, and threshold decoding then takes other tokens), else the stored one.

    Raises:
        ConvertError, ConfigError: see open_source and open_adapter.
    """
    source = open_source(source_folder)
    notes = list(source.notes)
    adapter = None
    if adapter_folder is not None:
        adapter = open_adapter(adapter_folder, source.weights, source.config.weight_tying)
        base = adapter.base_model
        if base and Path(base).name != source_folder.name:
            notes.append(f"the adapter was trained on {base}; SRC is {source_folder.name}")
    stored = {tensor.dtype for tensor in source.tensors.values()}
    if dtype is not None:
        target = DTYPES[dtype]
    elif adapter is not None:
        target = np.dtype(np.float32)
        if stored != {target}:
            notes.append(
                "the merged result is float32 (exact); --dtype bfloat16 halves it and rounds the merged weights"
            )
    elif len(stored) == 1:
        target = next(iter(stored))
    else:
        target = np.dtype(np.float32)
        notes.append(f"tensors are stored in {' and '.join(sorted(map(str, stored)))}; the result is float32 (exact)")
    return Plan(source, adapter, target, notes)
