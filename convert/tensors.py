"""Reading safetensors files a few rows at a time.

The files are read with ``pread`` into buffers of our own and not mapped: pages of a mapping count as resident memory of
the process for as long as the kernel keeps them.
"""

import dataclasses
import json
import math
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from jdllm.convert.errors import ConvertError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: dtype and shape as its file's header says, ``offset`` in bytes from the file's start."""

    name: str
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int = 0, stop: int | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Rows ``start:stop`` of the first axis, in the stored dtype: in ``out``, or in a fresh array."""
        stop = self.shape[0] if stop is None else stop
        array = np.empty((stop - start, *self.shape[1:]), self.dtype) if out is None else out
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        left, at = array.reshape(-1).view(np.uint8).data, self.offset + start * row
        with open(self.path, "rb", buffering=0) as file:
            while left:
                count = os.preadv(file.fileno(), [left], at)
                if not count:
                    raise ConvertError(f"{self.path} ends inside the tensor {self.name}")
                left, at = left[count:], at + count
        return array


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, by name.

    Raises:
        ConvertError: the file is not safetensors, is cut short, or holds a dtype that no weight has.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ConvertError(f"{path} is not a safetensors file, or is cut short")
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ConvertError(f"{path} is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ConvertError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _tensor(path: Path, name: str, entry: dict, data: int, size: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ConvertError(f"{path}: the header's entry for {name} is malformed")
    if dtype not in DTYPES:
        raise ConvertError(f"{path}: {name} has dtype {dtype}; weights must be {', '.join(DTYPES)}")
    tensor = Tensor(name, path, DTYPES[dtype], shape, data + begin)
    if tensor.nbytes != end - begin:
        raise ConvertError(f"{path}: {name} has {end - begin} bytes, but {dtype} {list(shape)} needs {tensor.nbytes}")
    if data + end > size:
        raise ConvertError(f"{path} is cut short: {name} ends at byte {data + end} of {size}")
    return tensor
