"""Which positions a step computes: each row's window, laid end to end on one packed axis.

Rows have windows of very different widths (a prompt beside a block of four), so the dense layers run on packed
positions and only attention sees one row beside the other.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jdllm.denoise.blocks import block_index
from jdllm.denoise.state import Rows


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static sizes of one compiled step.

    Attributes:
        rows: slots [0, rows) take part (R).
        window: widest window of a row (T).
        packed: positions of all windows together (N).
        steps: denoising steps a call.

    A row whose window is wider than T, or that finds the N positions taken by the rows before it, waits: a bucket too
    small costs time and never changes a token.
    """

    rows: int
    window: int
    packed: int
    steps: int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each packed position comes from, and where each canvas position went.

    Attributes:
        width: int32 [R], window positions of each row in this step, 0 if it does not take part.
        row, position: int32 [N]; past the last one they repeat a valid place.
        valid: bool [N].
        to_window: int32 [R, T], packed index of each window position (any valid one past the width).
        to_canvas: int32 [R, S], packed index of each canvas position (any valid one outside the window).
        inside: bool [R, S], canvas position lies in the window.
    """

    width: Array
    row: Array
    position: Array
    valid: Array
    to_window: Array
    to_canvas: Array
    inside: Array

    def unpack(self, packed: Array, canvas: Array) -> Array:
        """``canvas`` [R, S, ...] with the window positions replaced from ``packed`` [N, ...]."""
        inside = self.inside.reshape(*self.inside.shape, *[1] * (canvas.ndim - 2))
        return jnp.where(inside, packed[self.to_canvas], canvas)


def pack(rows: Rows, bucket: Bucket, canvas: int) -> Packing:
    """Lay the windows of ``rows`` (leading axis R) on an axis of ``bucket.packed`` positions.

    Args:
        canvas: S.
    """
    N = bucket.packed
    width = jnp.where(rows.live, rows.length - rows.cached, 0)
    width = jnp.where(width <= bucket.window, width, 0)
    width = jnp.where(running_sum(width) <= N, width, 0)
    end = running_sum(width)
    start = end - width
    index = jnp.arange(N, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(index[:, None] >= end[None, :], axis=1, dtype=jnp.int32), bucket.rows - 1)
    from_cached = jnp.arange(canvas, dtype=jnp.int32)[None, :] - rows.cached[:, None]
    return Packing(
        width=width,
        row=row,
        position=jnp.clip(rows.cached[row] + index - start[row], 0, canvas - 1),
        valid=index < end[-1],
        to_window=jnp.clip(start[:, None] + jnp.arange(bucket.window, dtype=jnp.int32)[None, :], 0, N - 1),
        to_canvas=jnp.clip(start[:, None] + from_cached, 0, N - 1),
        inside=(from_cached >= 0) & (from_cached < width[:, None]),
    )


def visible(rows: Rows, window: int, canvas: int) -> Array:
    """The block-causal mask, bool [R, T, S]: a window position sees the canvas positions of its own block and of the
    blocks before it; the prompt is block 0 (semantics section 2). Positions past ``length`` are seen by nobody."""
    query = rows.cached[:, None] + jnp.arange(window, dtype=jnp.int32)[None, :]
    key = jnp.broadcast_to(jnp.arange(canvas, dtype=jnp.int32)[None, :], (rows.length.shape[0], canvas))
    seen = block_index(rows, key)[:, None, :] <= block_index(rows, query)[:, :, None]
    return seen & (key < rows.length[:, None])[:, None, :]


def running_sum(x: Array) -> Array:
    """Inclusive prefix sum of an int32 [n], n small: one fused reduction (``jnp.cumsum`` compiles to dozens)."""
    index = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], x[None, :], 0), axis=1)
