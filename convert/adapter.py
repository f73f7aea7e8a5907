"""A PEFT adapter read for use beside its base model, unmerged."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jdllm.adapters import Adapter
from jdllm.config import ModelConfig
from jdllm.convert import names
from jdllm.convert.errors import ConvertError
from jdllm.convert.lora import open_adapter
from jdllm.runtime import UsageError


def read_adapters(folders: Mapping[str, Path], model: ModelConfig) -> list[Adapter]:
    """The adapters of ``--adapter NAME=DIR``, in order.

    Raises:
        UsageError: one cannot be used; the text says why.
    """
    try:
        return [read_adapter(name, folder, model) for name, folder in folders.items()]
    except ConvertError as error:
        raise UsageError(f"--adapter: {error}") from None


def read_adapter(name: str, folder: Path, model: ModelConfig) -> Adapter:
    """The adapter in ``folder`` for a base model.

    Raises:
        ConvertError: it is not plain LoRA, does not fit the model, or changes the embedding or the head.
    """
    by_module = {weight.module: weight for weight in names.weights(model) if weight.tensor.endswith(".weight")}
    opened = open_adapter(folder, by_module.values(), model.weight_tying)
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for module, change in opened.changes.items():
        weight = by_module[module]
        if not weight.name.startswith("layers."):
            raise ConvertError(f"{folder} adapts {module}; beside its base model only layers can be adapted: merge it")
        b = change.b.read().astype(np.float32) * np.float32(change.scale)
        a = change.a.read().astype(np.float32)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ConvertError(f"{folder} has numbers that are not finite for {module}")
        pairs[weight.name] = (a.T, b.T)
    return Adapter(name, pairs)
