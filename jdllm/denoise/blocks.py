"""Block arithmetic: where the block of a position begins and ends, what is masked, how much of a block is decoded.

Decoded tokens are counted from the canvas, so no counter can drift from it. (The reference keeps a counter, which goes
wrong if the model emits the mask id; here the mask id is never a candidate.)
"""

import jax.numpy as jnp
from jax import Array

from jdllm.denoise.state import Rows


def block_end(rows: Rows, row: Array, position: Array) -> Array:
    """End (exclusive) of the block of each ``position`` [N] of each ``row`` [N]; the prompt is block 0."""
    size = jnp.maximum(rows.block_size, 1)[row]
    after = position - rows.prompt_length[row]
    return position + jnp.where(after < 0, -after, size - after % size)


def block_start(rows: Rows, position: Array) -> Array:
    """First position of the block of ``position`` [R] (at or after the prompt's end)."""
    size = jnp.maximum(rows.block_size, 1)
    return rows.prompt_length + (position - rows.prompt_length) // size * size


def masked(rows: Rows, tokens: Array, mask_id: int) -> Array:
    """bool [R, S]: generated positions still to be decoded. A mask id inside the prompt is ordinary input."""
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    generated = (position >= rows.prompt_length[:, None]) & (position < rows.length[:, None])
    return generated & (tokens == mask_id)


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
