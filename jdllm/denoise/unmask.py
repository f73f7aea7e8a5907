"""Which masked positions a step commits, and to what: candidate and confidence from the logits, then D2F's rule.

Confidences are float32 and over the whole vocabulary, as the reference computes them in float32. The mask id is never a
candidate (a deviation: the reference may write a mask over a mask). Ties go to the lowest token id and position.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jdllm.config import CONFIDENCES
from jdllm.denoise.state import Rows


def candidates(logits: Array, rows: Rows, row: Array, position: Array, mask_id: int) -> tuple[Array, Array, Array]:
    """Candidate token, its probability, and the confidence that picks a fallback (reference: ``sample_tokens``).

    The order is temperature, top-p, top-k, softmax over the whole vocabulary; at temperature 0 the most probable token,
    else a sample whose random numbers depend on (seed, step, position) alone.

    Args:
        logits: float32 [M, V].
        row, position: int32 [M].

    Returns:
        int32 [M], float32 [M], float32 [M].
    """
    token = _first_highest(_without(logits, mask_id))
    probability = _probability(logits, token)
    plain = (token, probability, probability)
    special = (rows.temperature > 0) | (rows.top_p < 1) | (rows.top_k > 0) | (rows.confidence > 0)
    # A plain row reads the values above whatever its neighbours ask for, so they cannot change a bit of it.
    other = jax.lax.cond(
        jnp.any(rows.live & special), lambda: _special(logits, rows, row, position, mask_id), lambda: plain
    )
    return jax.tree.map(lambda a, b: jnp.where(special[row], a, b), other, plain)


def _special(logits: Array, rows: Rows, row: Array, position: Array, mask_id: int) -> tuple[Array, Array, Array]:
    """``candidates`` for rows with a temperature, a filter or another confidence."""
    temperature = rows.temperature[row]
    # Shifted first: however small the temperature, the favourite stays at 0 and nothing becomes inf - inf.
    logits = logits - jnp.max(logits, axis=1, keepdims=True)
    logits = logits / jnp.where(temperature > 0, temperature, 1)[:, None]
    best = _first_highest(_without(logits, mask_id))
    logits = _filtered(logits, rows.top_p[row], rows.top_k[row], best)
    token = _first_highest(_noised(_without(logits, mask_id), rows, row, position))
    probability = _probability(logits, token)
    return token, probability, _confidence(logits, probability, rows.confidence[row])


def _first_highest(x: Array) -> Array:
    """int32 [M]: index of the first maximum of each row. (``jnp.argmax`` is a scalar loop on a CPU.)"""
    size = x.shape[1]
    is_highest = x == jnp.max(x, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_highest, jnp.arange(size, dtype=jnp.int32), size - 1), axis=1)


def _probability(logits: Array, token: Array) -> Array:
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=1))


def _without(logits: Array, token: int) -> Array:
    return jnp.where(jnp.arange(logits.shape[1]) == token, -jnp.inf, logits)


def _filtered(logits: Array, top_p: Array, top_k: Array, always: Array) -> Array:
    """Logits outside top-p, then outside top-k of what is left, at -inf. The token that crosses top_p stays; ties with
    the k-th largest stay; token ``always`` [M] stays, so that a candidate is left when the mask id is the favourite."""
    best = jnp.arange(logits.shape[1]) == always[:, None]
    vocabulary = logits.shape[1]
    order = jnp.argsort(-logits, axis=1, stable=True)
    descending = jnp.take_along_axis(logits, order, axis=1)
    mass = jnp.cumsum(jax.nn.softmax(descending, axis=1), axis=1)
    unfiltered = logits
    kept = jnp.pad(mass[:, :-1] <= top_p[:, None], ((0, 0), (1, 0)), constant_values=True) | (top_p >= 1)[:, None]
    rank = jnp.argsort(order, axis=1)
    logits = jnp.where(jnp.take_along_axis(kept, rank, axis=1), logits, -jnp.inf)
    descending = jnp.where(kept, descending, -jnp.inf)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary) - 1
    logits = jnp.where(logits < jnp.take_along_axis(descending, last[:, None], axis=1), -jnp.inf, logits)
    return jnp.where(best, unfiltered, logits)


def _noised(logits: Array, rows: Rows, row: Array, position: Array) -> Array:
    """Gumbel noise in log space on the rows that sample: the argmax is then a sample of the softmax."""

    # One threefry key a position, its two words made directly: two fold_in calls more would double the compile time.
    step_and_place = (rows.nfe[row].astype(jnp.uint32) << 16) ^ position.astype(jnp.uint32)
    keys = jax.random.wrap_key_data(jnp.stack([rows.seed[row], step_and_place], axis=1))
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return logits + jnp.where((rows.temperature[row] > 0)[:, None], noise, 0)


def _confidence(logits: Array, probability: Array, kind: Array) -> Array:
    p = jax.nn.softmax(logits, axis=1)
    top = jax.lax.top_k(p, 2)[0]
    neg_entropy = jnp.sum(p * jnp.log(p + 1e-10), axis=1)
    by_kind = {"probability": probability, "margin": top[:, 0] - top[:, 1], "neg_entropy": neg_entropy}
    return jnp.choose(kind, [by_kind[name] for name in CONFIDENCES], mode="clip")


def accepted(
    masked: Array, block: Array, previous: Array, spare: Array, sure: Array, confidence: Array, blocks: int
) -> Array:
    """D2F's rule (semantics 1.2, ACTIVATE and UNMASK): a block commits every position that is sure; a fully activated
    block that has none commits its most confident position; any other block commits nothing. A block is fully
    activated when its predecessor is decoded enough. (Sticky in the reference; here decoded positions stay decoded, so
    the count says the same.)

    Args:
        masked: bool [N], to be decided.
        block: int32 [N], below ``blocks``; two positions share it exactly if they lie in one block of one row.
        previous: int32 [N], that number for the block before, or -1 where that is the prompt.
        spare: int32 [N], the most masks that the predecessor may still have.
        sure: bool [N], probability strictly above the skip threshold.
        confidence: float32 [N].

    Returns:
        bool [N].
    """
    index = jnp.arange(masked.shape[0], dtype=jnp.int32)
    sure = sure & masked
    some_sure = jax.ops.segment_max(sure.astype(jnp.int32), block, blocks) > 0
    highest = jax.ops.segment_max(jnp.where(masked, confidence, -jnp.inf), block, blocks)
    among_highest = masked & (confidence == highest[block])
    best = jax.ops.segment_min(jnp.where(among_highest, index, masked.shape[0]), block, blocks)
    masks = jax.ops.segment_sum(masked.astype(jnp.int32), block, blocks)
    activated = (previous < 0) | (masks[previous] <= spare)
    return sure | (masked & activated & ~some_sure[block] & (index == best[block]))
