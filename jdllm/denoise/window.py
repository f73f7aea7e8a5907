"""Which positions a step computes: each row's window, laid end to end on one packed axis.

Rows have windows of very different widths (a prompt beside a block of four), so the dense layers run on packed
positions and only attention sees one row beside the other: in tiles of a few queries of one row each.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jdllm.denoise.blocks import block_end
from jdllm.denoise.state import Rows
from jdllm.models.layers import attention

NARROWEST_TILE = 16


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static sizes of one compiled step.

    Attributes:
        rows: slots [0, rows) take part (R).
        packed: positions of all windows together (N).
        steps: denoising steps a call.

    A row that finds the N positions taken by older rows waits: a bucket too small costs time and never changes a token.
    """

    rows: int
    packed: int
    steps: int = 1

    @property
    def tile(self) -> int:
        """Queries that attention takes at a time (T): the mean window, rounded up to a power of two."""
        mean = -(-self.packed // self.rows)
        return min(self.packed, max(NARROWEST_TILE, 1 << (mean - 1).bit_length()))

    @property
    def further_tiles(self) -> int:
        """The most tiles that windows can have beyond one each (G)."""
        return self.packed // self.tile if self.rows > 1 else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each packed position comes from, and how windows are cut into tiles.

    Tile r < R is the first of row r; the further tiles of all rows follow, G at most. What lies past a window's
    end, in a tile or on the packed axis, repeats a valid place and is read by nobody.

    Attributes:
        width: int32 [R], window positions of each row in this step, 0 if it does not take part.
        first: int32 [R], packed index of the first of them.
        row, position: int32 [N].
        valid: bool [N].
        tile_row: int32 [G], the row of each further tile.
        tile_query: int32 [R + G, T], packed index of the queries of each tile.
        tile_end: int32 [R + G, T], what each query sees (``visible_end``).
        further_tiles: int32 [], how many there are.
        place: int32 [N], where in the tiles each packed position lies: tile * T + query.
    """

    width: Array
    first: Array
    row: Array
    position: Array
    valid: Array
    tile_row: Array
    tile_query: Array
    tile_end: Array
    further_tiles: Array
    place: Array

    def write_cache(self, cache: Array, packed: Array) -> Array:
        """``cache`` [B, K, S, H] with every window position replaced from ``packed`` [N, K, H]; positions of the packed
        axis that hold nothing are dropped, never clamped."""
        place = jnp.where(self.valid, self.position, cache.shape[2])
        return cache.at[self.row, :, place].set(packed, mode="drop")

    def write(self, canvas: Array, packed: Array, where: Array) -> Array:
        """``canvas`` [R, S] with the positions for which ``where`` bool [N] holds replaced from ``packed`` [N]."""
        place = jnp.where(where, self.position, canvas.shape[1])
        return canvas.at[self.row, place].set(packed, mode="drop")


def pack(rows: Rows, held: Array, bucket: Bucket, canvas: int) -> Packing:
    """Lay the windows of ``rows`` (leading axis R) on an axis of ``bucket.packed`` positions, and cut them into tiles.

    Args:
        held: bool [R], rows that take no part.
        canvas: S.
    """
    N, T = bucket.packed, bucket.tile
    width = jnp.where(rows.live & ~held, rows.end - rows.start, 0)
    older = rows.arrival[None, :] <= rows.arrival[:, None]
    width = jnp.where(jnp.sum(jnp.where(older, width[None, :], 0), axis=1) <= N, width, 0)
    end = running_sum(width)
    start = end - width
    index = jnp.arange(N, dtype=jnp.int32)
    row = _owner(end, index)
    offset = index - start[row]
    position = jnp.clip(rows.start[row] + offset, 0, canvas - 1)

    further = jnp.maximum(-(-width // T) - 1, 0)
    further_end = running_sum(further)
    further_start = further_end - further
    tile = jnp.arange(bucket.further_tiles, dtype=jnp.int32)
    tile_row = _owner(further_end, tile)
    first_query = jnp.concatenate([start, start[tile_row] + (1 + tile - further_start[tile_row]) * T])
    tile_query = jnp.clip(first_query[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :], 0, N - 1)
    number = offset // T  # of the tile in its row
    slot = jnp.where(number > 0, bucket.rows + further_start[row] + number - 1, row)
    return Packing(
        width=width,
        first=start,
        row=row,
        position=position,
        valid=index < end[-1],
        tile_row=tile_row,
        tile_query=tile_query,
        tile_end=visible_end(rows, row, position)[tile_query],
        further_tiles=further_end[-1],
        place=jnp.clip(slot * T + offset % T, 0, (bucket.rows + bucket.further_tiles) * T - 1),
    )


def _owner(end: Array, index: Array) -> Array:
    """int32 [n]: the row whose share of an axis, up to ``end`` [R], holds each ``index`` [n]; the last past all."""
    return jnp.minimum(jnp.sum(index[:, None] >= end[None, :], axis=1, dtype=jnp.int32), end.shape[0] - 1)


def visible_end(rows: Rows, row: Array, position: Array) -> Array:
    """The attention mask as one number a position, int32 [N]: it sees the canvas positions below its end. Of a
    pipelined row these are its own block and the blocks before it, the prompt being block 0 (semantics section 2);
    otherwise the whole canvas. Positions past ``length`` are seen by nobody.

    Args:
        row, position: int32 [N].
    """
    end = jnp.where(rows.pipelined[row], block_end(rows, position, row), rows.length[row])
    return jnp.minimum(end, rows.length[row])


MOST_SCORES = 1 << 26
"""Attention scores (float32 numbers) held at once: 256 MB."""


def window_attention(q: Array, k: Array, v: Array, packing: Packing) -> Array:
    """``attention`` of windows over their canvases.

    The first tile of every row meets its keys where they lie. The further tiles of wide windows, which are few, go
    through a loop, each with a copy of its row's keys. Either way as many tiles at once as MOST_SCORES allows (at least
    one): all scores of a wide bucket would be several times the state.

    Args:
        q: [N, Q, H]; k, v: [R, K, S, H].

    Returns:
        [N, Q, H].
    """
    (_, heads, size), (R, _, S, _) = q.shape, k.shape
    tiles, T = packing.tile_query.shape
    at_once = max(1, MOST_SCORES // (T * S * heads))

    def tile(query: Array, end: Array, k: Array, v: Array) -> Array:
        return attention(q[query], k, v, jnp.arange(S, dtype=jnp.int32) < end[:, :, None])

    out = _map_tiles(tile, (packing.tile_query[:R], packing.tile_end[:R], k, v), at_once)
    if tiles > R:
        G = min(at_once, max(1, R // 4), tiles - R)

        def some(i: Array, out: Array) -> Array:
            # The last group starts early enough to fit: it then repeats tiles, which changes nothing.
            first = jnp.minimum(i * G, tiles - R - G)
            part = partial(jax.lax.dynamic_slice_in_dim, slice_size=G)
            row = part(packing.tile_row, first)
            query, end = part(packing.tile_query, R + first), part(packing.tile_end, R + first)
            return jax.lax.dynamic_update_slice_in_dim(out, tile(query, end, k[row], v[row]), R + first, 0)

        out = jnp.concatenate([out, jnp.zeros((tiles - R, *out.shape[1:]), out.dtype)])
        out = jax.lax.fori_loop(0, -(-packing.further_tiles // G), some, out)
    return out.reshape(-1, heads, size)[packing.place]


def _map_tiles(tile, arguments: tuple[Array, ...], at_once: int) -> Array:
    """``tile`` on all its arguments' leading axis, at most ``at_once`` at a time."""
    if at_once >= arguments[0].shape[0]:
        return tile(*arguments)
    one = lambda each: tile(*(x[None] for x in each))[0]
    return jax.lax.map(one, arguments, batch_size=at_once)


def running_sum(x: Array) -> Array:
    """Inclusive prefix sum of an int32 [n], n small: one fused reduction (``jnp.cumsum`` compiles to dozens)."""
    index = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], x[None, :], 0), axis=1)
