"""Loading a jdllm checkpoint (written by jdllm.convert) straight to the devices it will be used on.

Reads nothing but JSON and arrays: no code of a checkpoint ever runs.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jdllm.checkpoint_format import FORMAT_VERSION, RECORD, WEIGHTS
from jdllm.config import FAMILIES, ConfigError, ModelConfig
from jdllm.models.llada import abstract_params, weight_shapes
from jdllm.sharding import shardings


class CheckpointError(ValueError):
    """A folder is no checkpoint that this jdllm can load; the text says which file or weight is wrong, and how."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded model.

    Attributes:
        path: the folder, absolute; the tokenizer's files lie there too.
        config: the model's shape and arithmetic.
        params: flat weights (jdllm.models.llada.Params), on their devices.
        meta: jdllm.json as it is: decoder (``d2f`` or the family), dtype, source, adapter, versions.
    """

    path: Path
    config: ModelConfig
    params: dict[str, jax.Array]
    meta: dict[str, Any]


def load(
    path: str | Path,
    dtype: jnp.dtype | str | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Restore the weights, each device reading its own part; whatever number of devices saved them.

    Args:
        dtype: of the loaded weights; None keeps the stored one. Cast weight by weight.
        mesh: from jdllm.sharding.make_mesh; None puts everything on the default device.
        progress: called with (bytes loaded, bytes in all) after each layer.

    Raises:
        CheckpointError: not a checkpoint, an unfinished or damaged one, of a newer format or of another layout.
    """
    folder = Path(path).expanduser().resolve()
    meta, config = read_record(folder)
    tree = folder / WEIGHTS
    if not tree.is_dir():
        raise CheckpointError(f"{folder} has no {WEIGHTS} folder: the checkpoint is not complete")
    placed = _placed(config, dtype or _stored_dtype(meta, folder), mesh)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        _check_layout(_stored_shapes(orbax, tree), placed, tree)
        _check_chunks(tree, placed)
        params: dict[str, jax.Array] = {}
        total = sum(_nbytes(leaf) for leaf in placed.values())
        for group in _groups(placed):
            params |= _restore(orbax, tree, group)
            if progress is not None:
                progress(sum(_nbytes(leaf) for leaf in params.values()), total)
    return Checkpoint(folder, config, {name: params[name] for name in placed}, meta)


def read_record(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """jdllm.json and the model configuration in it, nothing else read.

    Raises:
        CheckpointError: the folder is not a checkpoint of a format that this version knows.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    if not (folder / RECORD).is_file():
        hint = ""
        if (folder / WEIGHTS).is_dir():
            hint = ": an unfinished conversion, or Orbax weights that jdllm did not write"
        elif (folder / "config.json").is_file():
            hint = f": a Hugging Face checkpoint? convert it with `python -m jdllm.convert {folder.name} DST`"
        raise CheckpointError(f"{folder} has no {RECORD}{hint}")
    try:
        meta = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / RECORD} is not valid JSON: {error}") from None
    version = meta.get("format") if isinstance(meta, dict) else None
    if isinstance(version, bool) or not isinstance(version, int):
        raise CheckpointError(f"{folder / RECORD} has no format number: jdllm did not write it")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format {version}, written by jdllm {meta.get('jdllm_version')}; this version reads up to "
            f"{FORMAT_VERSION}: update jdllm"
        )
    if meta.get("family") not in FAMILIES:
        raise CheckpointError(
            f"{folder / RECORD}: family {meta.get('family')!r} is not known; known: {', '.join(FAMILIES)}"
        )
    try:
        return meta, ModelConfig(**meta["model"])
    except (KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{folder / RECORD}: the model configuration is unusable: {error}") from None


def _stored_dtype(meta: Mapping[str, Any], folder: Path) -> jnp.dtype:
    try:
        return jnp.dtype(meta["dtype"])
    except (KeyError, TypeError):
        raise CheckpointError(f"{folder / RECORD}: dtype {meta.get('dtype')!r} is not known") from None


def _placed(config: ModelConfig, dtype: jnp.dtype | str, mesh: Mesh | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of every weight. The sharding is always given: what Orbax would otherwise take from
    the checkpoint names the devices that saved it."""
    abstract = abstract_params(config, jnp.dtype(dtype))
    where: Mapping[str, Sharding]
    if mesh is None:
        where = dict.fromkeys(weight_shapes(config), SingleDeviceSharding(jax.devices()[0]))
    else:
        where = shardings(config, mesh)
    return {
        name: jax.ShapeDtypeStruct(abstract[name].shape, abstract[name].dtype, sharding=place)
        for name, place in where.items()
    }


def _stored_shapes(orbax: ocp.Checkpointer, tree: Path) -> dict[str, tuple[int, ...]]:
    """Path of every stored leaf (joined by slashes) -> its shape."""
    try:
        stored = orbax.metadata(tree).item_metadata
        leaves = jax.tree_util.tree_flatten_with_path(stored.tree)[0]
        return {_joined(path): tuple(leaf.shape) for path, leaf in leaves}
    except Exception as error:  # Orbax raises a different one for each file that is missing or damaged
        raise CheckpointError(f"{tree} is not a complete Orbax checkpoint: {_first_line(error)}") from error


def _joined(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _check_layout(
    stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, jax.ShapeDtypeStruct], tree: Path
) -> None:
    """Refuse trees of another shape, such as ``params/params/...`` or ``.../value``, by the first difference."""
    for name, leaf in wanted.items():
        if name not in stored:
            other = next((path for path in stored if path not in wanted), None)
            there = f"; it has {other} instead" if other else ""
            raise CheckpointError(f"{tree} has no weight {name}{there}: not a layout of jdllm, or an incomplete one")
        if stored[name] != leaf.shape:
            raise CheckpointError(f"{tree}: {name} has shape {list(stored[name])}, expected {list(leaf.shape)}")
    if extra := next((path for path in stored if path not in wanted), None):
        raise CheckpointError(f"{tree} has {extra}, which this model does not have: not a layout of jdllm")


def _check_chunks(tree: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Find lost or cut files before they load: to Zarr a chunk that is not there is a chunk of zeros."""
    for name in wanted:
        if not (tree / name / ".zarray").is_file():
            continue  # Orbax's other layout, one database for all leaves, notices by itself
        array = json.loads((tree / name / ".zarray").read_text())
        grid = [math.ceil(size / chunk) for size, chunk in zip(array["shape"], array["chunks"], strict=True)]
        size = math.prod(array["chunks"]) * (2 if array["dtype"] == "bfloat16" else jnp.dtype(array["dtype"]).itemsize)
        for number in range(math.prod(grid)):
            index = [number // math.prod(grid[axis + 1 :]) % count for axis, count in enumerate(grid)]
            file = tree / name / ".".join(map(str, index))
            if not file.is_file():
                raise CheckpointError(f"{file} is missing: the checkpoint is damaged; convert it again")
            if array["compressor"] is None and file.stat().st_size != size:
                raise CheckpointError(f"{file} is cut short: the checkpoint is damaged; convert it again")


def _groups(placed: Mapping[str, jax.ShapeDtypeStruct]) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """The weights layer by layer, the others one by one."""
    groups: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for name, leaf in placed.items():
        groups.setdefault(name.rpartition(".")[0] or name, {})[name] = leaf
    return list(groups.values())


def _restore(orbax: ocp.Checkpointer, tree: Path, group: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    arguments = ocp.args.PyTreeRestore(
        item=group, restore_args=ocp.checkpoint_utils.construct_restore_args(group), partial_restore=True
    )
    try:
        return orbax.restore(tree, args=arguments)
    except Exception as error:
        raise CheckpointError(f"{tree} cannot be read at {next(iter(group))}: {_first_line(error)}") from error


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
