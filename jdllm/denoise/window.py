"""Which positions a step computes: each row's window, laid end to end on one packed axis.

Rows have windows of very different widths (a prompt beside a block of four), so the dense layers run on packed
positions and only attention sees one row beside the other.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jdllm.denoise.blocks import block_end
from jdllm.denoise.state import Rows
from jdllm.models.layers import attention


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static sizes of one compiled step.

    Attributes:
        rows: slots [0, rows) take part (R).
        window: widest window of a row (T).
        packed: positions of all windows together (N).
        steps: denoising steps a call.

    A row whose window is wider than T, or that finds the N positions taken by older rows, waits: a bucket too small
    costs time and never changes a token.
    """

    rows: int
    window: int
    packed: int
    steps: int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each packed position comes from.

    Attributes:
        width: int32 [R], window positions of each row in this step, 0 if it does not take part.
        row, position: int32 [N]; past the last one they repeat a valid place.
        valid: bool [N].
        to_window: int32 [R, T], packed index of each window position (any valid one past the width).
    """

    width: Array
    row: Array
    position: Array
    valid: Array
    to_window: Array

    def write_cache(self, cache: Array, packed: Array) -> Array:
        """``cache`` [B, K, S, H] with every window position replaced from ``packed`` [N, K, H]; positions of the packed
        axis that hold nothing are dropped, never clamped."""
        place = jnp.where(self.valid, self.position, cache.shape[2])
        return cache.at[self.row, :, place].set(packed, mode="drop")

    def write_tokens(self, tokens: Array, packed: Array, where: Array) -> Array:
        """``tokens`` [R, S] with the positions for which ``where`` bool [N] holds replaced from ``packed`` [N]."""
        place = jnp.where(where, self.position, tokens.shape[1])
        return tokens.at[self.row, place].set(packed, mode="drop")


def pack(rows: Rows, bucket: Bucket, canvas: int) -> Packing:
    """Lay the windows of ``rows`` (leading axis R) on an axis of ``bucket.packed`` positions.

    Args:
        canvas: S.
    """
    N = bucket.packed
    width = jnp.where(rows.live, rows.length - rows.cached, 0)
    width = jnp.where(width <= bucket.window, width, 0)
    older = rows.arrival[None, :] <= rows.arrival[:, None]
    width = jnp.where(jnp.sum(jnp.where(older, width[None, :], 0), axis=1) <= N, width, 0)
    end = running_sum(width)
    start = end - width
    index = jnp.arange(N, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(index[:, None] >= end[None, :], axis=1, dtype=jnp.int32), bucket.rows - 1)
    return Packing(
        width=width,
        row=row,
        position=jnp.clip(rows.cached[row] + index - start[row], 0, canvas - 1),
        valid=index < end[-1],
        to_window=jnp.clip(start[:, None] + jnp.arange(bucket.window, dtype=jnp.int32)[None, :], 0, N - 1),
    )


def visible_end(rows: Rows, window: int) -> Array:
    """The block-causal mask as one number a window position, int32 [R, T]: it sees the canvas positions below its end,
    which are those of its own block and of the blocks before it; the prompt is block 0 (semantics section 2). Positions
    past ``length`` are seen by nobody."""
    query = rows.cached[:, None] + jnp.arange(window, dtype=jnp.int32)[None, :]
    return jnp.minimum(block_end(rows, query), rows.length[:, None])


MOST_SCORES = 1 << 26
"""Attention scores (float32 numbers) held at once: 256 MB."""


def window_attention(q: Array, k: Array, v: Array, end: Array) -> Array:
    """``attention`` of windows over their canvases, as many rows at once as MOST_SCORES allows (at least one): the
    scores of all rows of a wide bucket would be several times the state.

    Args:
        q: [R, T, Q, H]; k, v: [R, K, S, H]; end: from ``visible_end``.

    Returns:
        [R, T, Q, H].
    """
    R, T, heads, _ = q.shape
    S = k.shape[2]

    def rows(q: Array, k: Array, v: Array, end: Array) -> Array:
        return attention(q, k, v, jnp.arange(S, dtype=jnp.int32) < end[:, :, None])

    at_once = max(1, MOST_SCORES // (T * S * heads))
    if at_once >= R:
        return rows(q, k, v, end)
    one = lambda row: rows(*(x[None] for x in row))[0]
    return jax.lax.map(one, (q, k, v, end), batch_size=at_once)


def running_sum(x: Array) -> Array:
    """Inclusive prefix sum of an int32 [n], n small: one fused reduction (``jnp.cumsum`` compiles to dozens)."""
    index = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], x[None, :], 0), axis=1)
