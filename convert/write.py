"""Carrying out a plan: read some rows, merge, cast, transpose, write; two pieces at a time."""

import dataclasses
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from jdllm.checkpoint_format import RECORD, WEIGHTS
from jdllm.convert import orbax_format
from jdllm.convert.names import Weight
from jdllm.convert.plan import Plan

WORKERS = 2
"""Threads, so that one reads and writes while another transposes. Memory grows with each, speed hardly after two."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows start:stop of one weight: one chunk of the result."""

    weight: Weight
    start: int
    stop: int
    rows: int
    number: int


@dataclasses.dataclass
class Merged:
    """How large the merge was: the largest change of a weight, and the largest error of the one cast at the end."""

    weights: set[str] = dataclasses.field(default_factory=set)
    max_delta: float = 0.0
    max_rounding: float = 0.0

    def add(self, name: str, delta: float, rounding: float) -> None:
        self.weights.add(name)
        self.max_delta = max(self.max_delta, delta)
        self.max_rounding = max(self.max_rounding, rounding)


def write_checkpoint(plan: Plan, folder: Path, progress: Callable[[int], None] = lambda done: None) -> Merged:
    """Write weights, companions and, last, the record into an existing empty folder.

    Args:
        progress: called with the bytes of the result written so far.

    Raises:
        ConvertError: a source file ends early.
        OSError: reading or writing failed.
    """
    merged = Merged()
    tree = folder / WEIGHTS
    tree.mkdir()
    done = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = {pool.submit(_write_piece, plan, tree, piece): piece for piece in list(_pieces(plan, tree))}
        try:
            for future in as_completed(futures):
                piece, change = futures[future], future.result()
                if change is not None:
                    merged.add(piece.weight.name, *change)
                done += plan.nbytes(piece.weight) * (piece.stop - piece.start) // piece.weight.shape[0]
                progress(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    orbax_format.write_tree(tree, [(weight.name, weight.stored_shape) for weight in plan.source.weights])
    for path in plan.source.companions:
        shutil.copyfile(path, folder / path.name)
    unnamed = folder / f"{RECORD}.partial"
    unnamed.write_text(json.dumps(plan.record(), indent=2) + "\n", encoding="utf-8")
    unnamed.rename(folder / RECORD)
    return merged


def _pieces(plan: Plan, tree: Path) -> Iterator[Piece]:
    """Every chunk to write; makes the folders of the arrays on the way."""
    for weight in plan.source.weights:
        rows = orbax_format.chunk_rows(weight.shape, plan.dtype.itemsize)
        chunk = (rows, *weight.shape[1:])
        orbax_format.begin_array(
            tree / weight.name, weight.stored_shape, chunk[::-1] if weight.transposed else chunk, plan.dtype
        )
        for number, start in enumerate(range(0, weight.shape[0], rows)):
            yield Piece(weight, start, min(start + rows, weight.shape[0]), rows, number)


def _write_piece(plan: Plan, tree: Path, piece: Piece) -> tuple[float, float] | None:
    """Convert one piece; the largest change and the largest rounding error where an adapter was merged."""
    weight = piece.weight
    path = orbax_format.chunk_path(tree / weight.name, piece.number, len(weight.shape), weight.transposed)
    sizes = []
    # A transposed chunk needs all its rows at once, and a merge reads the adapter anew for each call; the others go
    # through a few rows at a time.
    row_bytes = math.prod(weight.shape[1:]) * plan.dtype.itemsize
    whole = weight.transposed or plan.change(weight) is not None
    step = piece.rows if whole else max(1, orbax_format.SLICE_BYTES // row_bytes)
    with open(path, "wb", buffering=0) as file:
        for start in range(piece.start, piece.stop, step):
            rows, merge = _converted(plan, weight, start, min(start + step, piece.stop))
            sizes += [merge] if merge else []
            if weight.transposed:
                size = orbax_format.scratch_bytes(piece.rows, plan.dtype.itemsize)
                scratch = _buffers.array("scratch", (size,), np.dtype(np.uint8))
                orbax_format.write_transposed(file, _padded(rows, piece.rows), scratch)
            else:
                orbax_format.write_all(file, rows)
        if not weight.transposed:
            file.truncate(piece.rows * row_bytes)  # the last chunk is as long as the others
    return (max(delta for delta, _ in sizes), max(rounding for _, rounding in sizes)) if sizes else None


def _converted(plan: Plan, weight: Weight, start: int, stop: int) -> tuple[np.ndarray, tuple[float, float] | None]:
    """Rows start:stop of a weight, merged and cast, in PyTorch's orientation, valid until the thread's next call; and
    the largest change and rounding error where an adapter was merged."""
    tensor, change = plan.tensor(weight), plan.change(weight)
    stored = _buffers.array("stored", (stop - start, *weight.shape[1:]), tensor.dtype)
    tensor.read(start, stop, out=stored)
    if change is None and tensor.dtype == plan.dtype:
        return stored, None
    rows = _buffers.array("rows", stored.shape, plan.dtype)
    if change is None:
        _cast(stored, rows)
        return rows, None
    exact = _buffers.array("exact", stored.shape, np.dtype(np.float32))
    change.delta(start, stop, out=exact)
    delta = _largest(exact)
    exact += stored
    rows[...] = exact
    exact -= rows
    return rows, (delta, _largest(exact))


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """``count`` rows, zeros behind."""
    if len(rows) == count:
        return rows
    padded = _buffers.array("padded", (count, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    padded[len(rows) :] = 0
    return padded


def _cast(values: np.ndarray, out: np.ndarray) -> None:
    if values.dtype.name == "bfloat16" and out.dtype == np.float32:
        np.left_shift(values.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)  # 5 times faster
    else:
        out[...] = values


def _largest(values: np.ndarray) -> float:
    return float(max(values.max(), -values.min()))


class _Buffers(threading.local):
    """Memory that a thread uses for piece after piece: fresh memory costs the kernel as much as the copy itself."""

    def __init__(self) -> None:
        self.memory: dict[str, np.ndarray] = {}

    def array(self, use: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        if use not in self.memory or self.memory[use].nbytes < size:
            self.memory[use] = np.empty(size, np.uint8)
        return self.memory[use][:size].view(dtype).reshape(shape)


_buffers = _Buffers()
