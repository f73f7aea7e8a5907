"""Writing weights in Orbax's on-disk format, a few megabytes at a time.

Orbax can only save arrays that are whole in memory, so the format is written here: with ``use_ocdbt=False`` an Orbax
tree is one Zarr v2 folder a leaf (zarr-specs, version 2: ``.zarray`` and one raw file a chunk) beside two small JSON
files. A test restores the result with plain orbax.checkpoint. Chunks are not compressed: weights hardly shrink, and
neither conversion nor start-up should wait for it.
"""

import io
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

CHUNK_BYTES = 1 << 23
"""Aim for a chunk. Small enough that a conversion's memory is small, large enough that files are few."""

SLICE_BYTES = 1 << 18
"""Read, transposed and written at once: what stays in a core's cache on its way (4 GB/s written, 1 beyond it)."""

_TILE = 16
"""Words transposed in one numpy call; see _transpose."""

_UNIT = 64
"""Rows of a chunk are a multiple of this where there are enough of them, so that _transpose has no rest."""


def chunk_rows(shape: tuple[int, ...], itemsize: int) -> int:
    """Rows of the first axis (PyTorch's) in a chunk: an even split into chunks of about CHUNK_BYTES, without a rest
    where there is such a split into not twice as many."""
    rows, row_bytes = shape[0], math.prod(shape[1:]) * itemsize
    fewest = -(-rows * row_bytes // CHUNK_BYTES)
    if fewest <= 1:
        return rows
    unit = _UNIT if _UNIT * row_bytes <= CHUNK_BYTES else 1
    units = -(-rows // unit)
    fewest = min(fewest, units)
    even = (n for n in range(fewest, 2 * fewest) if rows % (n * unit) == 0)
    return -(-units // next(even, fewest)) * unit


def begin_array(folder: Path, stored_shape: tuple[int, ...], chunk: tuple[int, ...], dtype: np.dtype) -> None:
    """Create the folder of one leaf."""
    folder.mkdir()
    described = {
        "zarr_format": 2,
        "shape": stored_shape,
        "chunks": chunk,
        "dtype": "bfloat16" if dtype.name == "bfloat16" else dtype.newbyteorder("<").str,
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "dimension_separator": ".",
    }
    (folder / ".zarray").write_text(json.dumps(described))


def chunk_path(folder: Path, number: int, dimensions: int, transposed: bool) -> Path:
    """The file of a chunk; the arrays are cut along one axis, PyTorch's first."""
    index = [0] * dimensions
    index[-1 if transposed else 0] = number
    return folder / ".".join(map(str, index))


def write_all(file: io.RawIOBase, data: np.ndarray) -> None:
    """Append a contiguous array to an unbuffered file."""
    left = data.reshape(-1).view(np.uint8).data
    while left:
        left = left[file.write(left) :]


def scratch_bytes(rows: int, itemsize: int) -> int:
    """Memory that write_transposed needs for a matrix of so many rows."""
    return 2 * max(SLICE_BYTES, rows * itemsize)


def write_transposed(file: io.RawIOBase, matrix: np.ndarray, scratch: np.ndarray) -> None:
    """Append the transpose of a matrix [rows, columns], a few columns at a time.

    Args:
        scratch: uint8 [scratch_bytes(rows, itemsize)], overwritten.
    """
    rows, columns = matrix.shape
    step = max(1, SLICE_BYTES // (rows * matrix.itemsize))
    for start in range(0, columns, step):
        part = matrix[:, start : start + step]
        out = scratch[: part.nbytes].view(matrix.dtype).reshape(part.shape[::-1])
        _transpose(part, out, scratch[len(scratch) // 2 :])
        write_all(file, out)


def _transpose(matrix: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    """Write the transpose of ``matrix`` to ``out``, using ``scratch`` (uint8, the size of the matrix or more).

    numpy transposes narrow elements slowly. So neighbours of a column (4 of bfloat16, 2 of float32) are first packed
    into words of 8 bytes, and the words transposed, a few rows of them in one call: ten times the speed of a plain
    ``matrix.T.copy()`` (measured 3.8 against 0.35 GB/s for bfloat16).
    """
    rows, columns = matrix.shape
    pack = 8 // matrix.itemsize
    whole = rows - rows % (pack * _TILE)
    if whole:
        packed = scratch[: whole * columns * matrix.itemsize].view(matrix.dtype).reshape(-1, columns, pack)
        for i in range(pack):
            packed[:, :, i] = matrix[i:whole:pack]
        tiles = packed.view(np.uint64).reshape(-1, _TILE, columns).transpose(0, 2, 1)
        targets = out[:, :whole].view(np.uint64).reshape(columns, -1, _TILE).transpose(1, 0, 2)
        for target, tile in zip(targets, tiles, strict=True):
            target[...] = tile
    out[:, whole:] = matrix[whole:].T


def write_tree(folder: Path, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """The two JSON files that make a folder of arrays an Orbax tree: a flat dict of these leaves."""
    tree = {
        str((name,)): {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": shape},
        }
        for name, shape in shapes
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / "_METADATA").write_text(json.dumps(metadata))
    now = time.time_ns()
    checkpoint = {
        "item_handlers": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(checkpoint))
