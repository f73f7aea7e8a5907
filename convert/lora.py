"""Reading a PEFT LoRA adapter: which weights it changes, by how much. Anything that is not plain LoRA is refused.

The rules are PEFT's (src/peft/tuners/lora): scale = alpha / r, or alpha / sqrt(r) with ``use_rslora``; a target name
means every module whose path is that name or ends in ``.name``; the first matching pattern of ``rank_pattern`` and
``alpha_pattern`` wins.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jdllm.convert.errors import ConvertError, listed, read_json
from jdllm.convert.names import Weight
from jdllm.convert.tensors import Tensor, read_header

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_HONOURED = frozenset(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "bias",
        "fan_in_fan_out",
        "base_model_name_or_path",
    ]
)
_INERT = frozenset(
    [
        "auto_mapping",
        "corda_config",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "task_type",
    ]
)
"""Training-time fields, and settings of features that another field switches on."""

_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base weights as they are. PiSSA, OLoRA, CorDA and LoftQ change them, so that their
adapters do not belong to the checkpoint that they name."""


@dataclasses.dataclass(frozen=True)
class LowRank:
    """The change of one weight, in PyTorch's orientation: ``scale * left @ right``, left [out, r], right [r, in].

    ``embedding`` adapters are stored the other way round: left is A transposed, right is B transposed.
    """

    module: str
    a: Tensor
    b: Tensor
    rank: int
    alpha: float
    scale: float
    embedding: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight that it fits."""
        return (self.a.shape[1], self.b.shape[0]) if self.embedding else (self.b.shape[0], self.a.shape[1])

    def delta(self, start: int, stop: int, out: np.ndarray) -> None:
        """Rows start:stop of the change into ``out``, float32 [stop - start, in]."""
        if self.embedding:
            left, right = self.a.read()[:, start:stop].T, self.b.read().T
        else:
            left, right = self.b.read(start, stop), self.a.read()
        np.matmul(left.astype(np.float32), right.astype(np.float32), out=out)
        out *= np.float32(self.scale)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A checked adapter: ``changes`` by module path, ``config`` as in its file."""

    folder: Path
    config: dict[str, Any]
    changes: dict[str, LowRank]

    @property
    def base_model(self) -> str | None:
        """What it was trained on, as its configuration says: a name on a hub as it is, of a path the last part."""
        name = self.config.get("base_model_name_or_path")
        return (Path(name).name if name.startswith(("/", ".", "~")) else name) if isinstance(name, str) else None

    def record(self) -> dict[str, Any]:
        """What the converted checkpoint says about it."""
        targets = self.config["target_modules"]
        return {
            "source": self.folder.name,
            "type": "lora",
            "base_model": self.base_model,
            "r": self.config["r"],
            "alpha": self.config["lora_alpha"],
            "rslora": bool(self.config.get("use_rslora")),
            "rank_pattern": self.config.get("rank_pattern") or {},
            "alpha_pattern": self.config.get("alpha_pattern") or {},
            "targets": targets if isinstance(targets, str) else sorted(targets),
            "merged": len(self.changes),
        }


def open_adapter(folder: Path, weights: Iterable[Weight], tied: bool) -> Adapter:
    """Read and check an adapter against the weights of its base model; nothing but headers is read.

    Args:
        tied: the head is the embedding; an adapter on either would change both.

    Raises:
        ConvertError: the adapter uses something that jdllm does not merge, or its tensors are not exactly those that
            its configuration and the base model ask for.
    """
    if not folder.is_dir():
        raise ConvertError(f"--lora {folder} is not a folder" if folder.exists() else f"--lora {folder} does not exist")
    config = read_json(folder / CONFIG)
    _check_config(config, folder / CONFIG)
    if not (folder / TENSORS).is_file():
        pickle = " (adapter_model.bin is a pickle, which can run code)" * (folder / "adapter_model.bin").exists()
        raise ConvertError(f"{folder} has no {TENSORS}{pickle}: save the adapter with safe_serialization=True")
    modules = {w.module: w for w in weights if w.tensor.endswith(".weight") and len(w.shape) == 2}
    pairs = _pairs(read_header(folder / TENSORS), modules, folder / TENSORS)
    _check_targets(pairs.keys(), modules, config, folder)
    changes = {module: _change(module, pair, config, modules[module], folder) for module, pair in pairs.items()}
    if tied and (on := [module for module in changes if modules[module].name in ("embed", "head")]):
        raise ConvertError(f"{folder} adapts {listed(on)}, but weight_tying makes head and embedding one tensor")
    return Adapter(folder, config, changes)


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    def refuse(field: str, right: str) -> None:
        raise ConvertError(f"{path}: {field}={config.get(field)!r} is not supported; {right}")

    if config.get("peft_type") != "LORA":
        refuse("peft_type", "only 'LORA' can be merged")
    if config.get("bias", "none") != "none":
        refuse("bias", "only 'none' is: trained biases of the base are not merged")
    if config.get("fan_in_fan_out"):
        refuse("fan_in_fan_out", "the base has linear layers, stored [out, in]: it must be false")
    init = config.get("init_lora_weights", True)
    if init not in _HARMLESS_INITS:
        refuse("init_lora_weights", "it changes the base weights: convert the adapter to plain LoRA with PEFT first")
    for field in sorted(config.keys() - _HONOURED - _INERT):
        if config[field] not in (None, False, "", [], {}):
            refuse(field, "only plain LoRA is merged: use_dora, modules_to_save, lora_bias and the like must be unset")
    for field in ("target_modules", "exclude_modules"):
        names = config.get(field)
        if not isinstance(names, str | None) and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names)
        ):
            refuse(field, "it must be a list of module names, or one regular expression")
    for field in ("r", "lora_alpha"):
        _number(config.get(field), field, path)
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(field) or {}
        if not isinstance(pattern, dict):
            refuse(field, "it must map patterns to numbers")
        for key, value in pattern.items():
            _number(value, f"{field}[{key!r}]", path)
            _regex(key, field, path)


def _number(value: Any, field: str, path: Path) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConvertError(f"{path}: {field}={value!r} must be a positive number")


def _regex(pattern: str, field: str, path: Path) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConvertError(
            f"{path}: {field} has the pattern {pattern!r}, which is not a regular expression: {error}"
        ) from None


_KEY = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.(?P<adapter>(?!weight$)[^.]+))?(\.weight)?"
)


def _pairs(tensors: Mapping[str, Tensor], modules: Mapping[str, Weight], path: Path) -> dict[str, dict[str, Tensor]]:
    """Module path -> its tensors by side ("A", "B", or "embedding_A", ...)."""
    pairs: dict[str, dict[str, Tensor]] = {}
    adapters, unused = set(), []
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        module = _module(match["module"], modules) if match else None
        if match is None or module is None:
            unused.append(key)
            continue
        adapters.add(match["adapter"] or "default")
        side = (match["embedding"] or "") + match["side"]
        if side in pairs.setdefault(module, {}):
            raise ConvertError(f"{path} has two tensors for {side} of {module}: {pairs[module][side].name}, {key}")
        pairs[module][side] = tensor
    if unused:
        raise ConvertError(f"{path} has tensors that fit no module of the base model: {listed(unused)}")
    if len(adapters) > 1:
        raise ConvertError(f"{path} holds several adapters ({listed(adapters)}); it must hold one")
    lonely = [
        f"{next(iter(pair.values())).name} without its other half"
        for pair in pairs.values()
        if set(pair) not in ({"A", "B"}, {"embedding_A", "embedding_B"})
    ]
    if lonely:
        raise ConvertError(f"{path} is incomplete: {listed(lonely)}")
    if not pairs:
        raise ConvertError(f"{path} holds no LoRA tensors")
    return pairs


def _module(prefixed: str, modules: Mapping[str, Weight]) -> str | None:
    """The base model's module behind an adapter's key. PEFT puts ``base_model.model.`` in front, some tools once more
    or not at all, and a model wrapped without its ``model.`` level lacks that."""
    path = prefixed
    while path.startswith("base_model.model."):
        path = path.removeprefix("base_model.model.")
    return next((name for name in (path, f"model.{path}") if name in modules), None)


def _check_targets(
    found: Iterable[str], modules: Mapping[str, Weight], config: Mapping[str, Any], folder: Path
) -> None:
    wanted = {module for module, weight in modules.items() if _targeted(module, weight, config, folder / CONFIG)}
    if missing := wanted - set(found):
        raise ConvertError(f"{folder / TENSORS} has nothing for modules that {CONFIG} targets: {listed(missing)}")
    if extra := set(found) - wanted:
        raise ConvertError(f"{folder / TENSORS} has tensors for modules that {CONFIG} does not target: {listed(extra)}")


def _targeted(module: str, weight: Weight, config: Mapping[str, Any], path: Path) -> bool:
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if not targets:
        raise ConvertError(f"{path}: target_modules={targets!r} names no module")
    if excluded and _names(module, excluded, "exclude_modules", path):
        return False
    if targets == "all-linear":
        return weight.linear and weight.name != "head"
    if not _names(module, targets, "target_modules", path):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or isinstance(targets, str):
        return True
    index = re.search(r"\.(\d+)\.", module)
    return index is not None and int(index[1]) in ([layers] if isinstance(layers, int) else layers)


def _names(module: str, targets: str | list[str], field: str, path: Path) -> bool:
    if isinstance(targets, str):
        return _regex(targets, field, path).fullmatch(module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _change(
    module: str, pair: Mapping[str, Tensor], config: Mapping[str, Any], weight: Weight, folder: Path
) -> LowRank:
    embedding = "embedding_A" in pair
    a, b = (pair["embedding_A"], pair["embedding_B"]) if embedding else (pair["A"], pair["B"])
    rank = _of_pattern(config.get("rank_pattern") or {}, module, config["r"])
    alpha = _of_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    rows, columns = weight.shape
    want_a, want_b = ((rank, rows), (columns, rank)) if embedding else ((rank, columns), (rows, rank))
    for tensor, want in ((a, want_a), (b, want_b)):
        if tensor.shape != want:
            raise ConvertError(f"{folder / TENSORS}: {tensor.name} is {list(tensor.shape)}, expected {list(want)}")
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LowRank(module, a, b, rank, alpha, scale, embedding)


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
