"""Block arithmetic: where the block of a position begins and ends, what is masked, how much of a block is decoded.

Decoded tokens are counted from the canvas, so no counter can drift from it. (The reference keeps a counter, which goes
wrong if the model emits the mask id; here the mask id is never a candidate.)
"""

import jax
import jax.numpy as jnp
from jax import Array

from jdllm.denoise.state import Rows


def block_start(rows: Rows, position: Array, row: Array | None = None) -> Array:
    """First position of the block of each ``position`` [R], or [N] of each ``row`` [N]; the prompt is block 0."""
    P, size = rows.prompt_length, jnp.maximum(rows.block_size, 1)
    P, size = (P, size) if row is None else (P[row], size[row])
    after = position - P
    return jnp.where(after < 0, 0, position - jax.lax.rem(after, size))


def block_end(rows: Rows, position: Array, row: Array | None = None) -> Array:
    """End (exclusive) of those blocks, which may lie behind the canvas."""
    P, size = rows.prompt_length, jnp.maximum(rows.block_size, 1)
    P, size = (P, size) if row is None else (P[row], size[row])
    after = position - P
    return jnp.where(after < 0, P, position - jax.lax.rem(after, size) + size)


def decided_end(rows: Rows) -> Array:
    """int32 [R]: positions before it may be decided in this pass: the whole canvas of a pipelined row, else up to the
    end of the block being decoded. (That of a prompt with masks to fill is the first block behind it.)"""
    current = jnp.maximum(rows.block, rows.prompt_length) + rows.block_size
    return jnp.where(rows.pipelined, rows.length, jnp.minimum(current, rows.limit))


def masked(rows: Rows, tokens: Array, mask_id: int) -> Array:
    """bool [R, S]: positions still to be decoded. A mask id before ``fill_from`` is ordinary input."""
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    return (position >= rows.fill_from[:, None]) & (position < rows.length[:, None]) & (tokens == mask_id)


def first(where: Array, otherwise: Array) -> Array:
    """int32 [R]: index of the first True of each row of ``where`` [R, S], or ``otherwise`` [R], which lies behind every
    True, in a row without one."""
    index = jnp.arange(where.shape[1], dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(where, index, otherwise[:, None]), axis=1)


def newest_block_decoded(rows: Rows, is_masked: Array) -> Array:
    """int32 [R]: decoded tokens of the newest block; meaningful while it has its full size."""
    start = block_start(rows, rows.length - 1)
    position = jnp.arange(is_masked.shape[1], dtype=jnp.int32)[None, :]
    masks = jnp.sum(is_masked & (position >= start[:, None]), axis=1, dtype=jnp.int32)
    return rows.length - start - masks
