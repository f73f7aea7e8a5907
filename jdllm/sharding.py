"""Where each weight lies on a mesh: Megatron's split of a transformer, with Auto axes.

The first matrix of a pair (q, k, v; gate, up) is split by columns, the second (attn_out; down) by rows, so that a layer
needs two all-reduces. Heads are never cut: where a count does not divide by the axis, that weight is whole on every
device, which is always right and merely costs memory.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdllm.config import ModelConfig
from jdllm.models.llada import weight_shapes

DATA, MODEL = "data", "model"


def make_mesh(data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh (data, model) of all given devices (default: all there are).

    Raises:
        ValueError: the devices do not divide by ``data``.
    """
    devices = jax.devices() if devices is None else devices
    if data < 1 or len(devices) % data:
        raise ValueError(f"{len(devices)} devices cannot form {data} data rows")
    return Mesh(np.asarray(devices).reshape(data, -1), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def spec(name: str, cfg: ModelConfig, size: int) -> PartitionSpec:
    """The split of one weight over a model axis of ``size`` devices."""
    owner, bias = name.removesuffix("_bias").rpartition(".")[2], name.endswith("_bias")
    divides = {
        "embed": cfg.vocab_size,
        "q": cfg.n_heads,
        "k": cfg.n_kv_heads,
        "v": cfg.n_kv_heads,
        "attn_out": cfg.n_heads,
        "gate": cfg.d_ff,
        "up": cfg.d_ff,
        "down": cfg.d_ff,
        "head": cfg.vocab_size,
    }
    if owner not in divides or divides[owner] % size:
        return PartitionSpec()
    if owner in ("attn_out", "down"):
        return PartitionSpec() if bias else PartitionSpec(MODEL, None)
    if bias or owner == "embed":
        return PartitionSpec(MODEL)
    return PartitionSpec(None, MODEL)


def shardings(cfg: ModelConfig, mesh: Mesh) -> dict[str, NamedSharding]:
    """The sharding of every weight on a mesh with a ``model`` axis."""
    size = mesh.shape[MODEL]
    return {name: NamedSharding(mesh, spec(name, cfg, size)) for name in weight_shapes(cfg)}
