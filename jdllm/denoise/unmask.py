"""Which masked positions a step commits, and to what: candidate and confidence from the logits, then the row's rule.

Confidences are float32 and over the whole vocabulary, as the reference computes them in float32. The mask id is never a
candidate (a deviation: the reference may write a mask over a mask). Ties go to the lowest token id and position.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jdllm.config import RANKINGS
from jdllm.denoise.state import Rows

Found = tuple[Array, Array, Array, Array]
"""Candidate token int32 [M], its probability, the confidence that ranks it, and its log-probability before temperature
and filters, float32 [M] each."""


def most_probable(logits: Array, mask_id: int) -> Found:
    """Candidates of plain rows: greedy, no filter, ranked by probability.

    Args:
        logits: float32 [M, V].
    """
    token = _first_highest(_without(logits, mask_id))
    logprob = _chosen(logits, token) - jax.nn.logsumexp(logits, axis=1)
    probability = jnp.exp(logprob)
    return token, probability, probability, logprob


def is_special(rows: Rows) -> Array:
    """bool [R]: rows with a temperature, a filter, a ban, or another ranking than by probability."""
    special = (rows.temperature > 0) | (rows.top_p < 1) | (rows.top_k > 0) | (rows.confidence > 0) | rows.chance
    special |= (rows.confidence_temperature > 0) | (rows.banned_id >= 0) | jnp.any(rows.demoted_ids >= 0, axis=1)
    return special | _keeps_stops_away(rows)


def _keeps_stops_away(rows: Rows) -> Array:
    """bool [R]: rows with a ``min_tokens``."""
    return rows.stop_from > rows.prompt_length


def candidates(
    logits: Array, rows: Rows, row: Array, position: Array, mask_id: int, unused: Array | None = None
) -> Found:
    """Candidates of any rows (reference: ``sample_tokens``, and LLaDA's generate.py).

    The order is temperature, top-p, top-k, softmax over the whole vocabulary; at temperature 0 the most probable token,
    else a sample whose random numbers depend on (seed, step, position) alone.

    Args:
        logits: float32 [M, V].
        row, position: int32 [M].
        unused: bool [V], ids that stand for no token, which are never sampled; None: all stand for one.
    """
    temperature, ids = rows.temperature[row], jnp.arange(logits.shape[1])
    total = jax.nn.logsumexp(logits, axis=1)
    # Shifted first: however small the temperature, the favourite stays at 0 and nothing becomes inf - inf.
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    early = (position < rows.stop_from[row]) & _keeps_stops_away(rows)[row]
    too_early = jnp.any(ids == rows.stop_ids[row][:, :, None], axis=1) & early[:, None]
    shifted = jnp.where((ids == rows.banned_id[row, None]) | too_early, -jnp.inf, shifted)
    tempered = shifted / jnp.where(temperature > 0, temperature, 1)[:, None]
    if unused is not None:
        tempered = jnp.where(unused & (temperature > 0)[:, None], -jnp.inf, tempered)
    best = _first_highest(_without(tempered, mask_id))
    filters = jnp.any((rows.top_p[row] < 1) | (rows.top_k[row] > 0))
    filtered = jax.lax.cond(
        filters, lambda: _filtered(tempered, rows.top_p[row], rows.top_k[row], best), lambda: tempered
    )
    allowed = _without(filtered, mask_id)
    sample = lambda: _first_highest(_noised(allowed, rows, row, position))
    token = jax.lax.cond(jnp.any(temperature > 0), sample, lambda: _first_highest(allowed))
    demoted = jnp.any(ids == rows.demoted_ids[row][:, :, None], axis=1)
    measured = jnp.where(demoted, -jnp.inf, jnp.where(rows.untempered[row, None], shifted, filtered))
    probability = jnp.exp(_chosen(measured, token) - jax.nn.logsumexp(measured, axis=1))
    confidence = _confidence(measured, probability, rows, row, position)
    return token, probability, confidence, _chosen(logits, token) - total


def _first_highest(x: Array) -> Array:
    """int32 [M]: index of the first maximum of each row. (``jnp.argmax`` is a scalar loop on a CPU.)"""
    size = x.shape[1]
    is_highest = x == jnp.max(x, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_highest, jnp.arange(size, dtype=jnp.int32), size - 1), axis=1)


def _chosen(x: Array, token: Array) -> Array:
    return jnp.take_along_axis(x, token[:, None], axis=1)[:, 0]


def _without(logits: Array, token: int) -> Array:
    return jnp.where(jnp.arange(logits.shape[1]) == token, -jnp.inf, logits)


def _filtered(logits: Array, top_p: Array, top_k: Array, always: Array) -> Array:
    """Logits outside top-p, then outside top-k of what is left, at -inf. The token that crosses top_p stays; ties with
    the k-th largest stay; token ``always`` [M] stays, so that a candidate is left when the mask id is the favourite."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    negative, order = jax.lax.sort((-logits, jnp.broadcast_to(ids, logits.shape)), num_keys=1)
    mass = jnp.cumsum(jax.nn.softmax(-negative, axis=1), axis=1)
    within = (mass[:, :-1] <= top_p[:, None]) | (top_p >= 1)[:, None]
    kept = 1 + jnp.sum(jnp.cumprod(within, axis=1), axis=1)  # how many of the descending logits
    at = lambda x, place: jnp.take_along_axis(x, place[:, None], axis=1)
    last, last_id = -at(negative, kept - 1), at(order, kept - 1)
    keep = (logits > last) | ((logits == last) & (ids <= last_id))
    limit = jnp.where((top_k > 0) & (top_k <= kept), top_k, kept)
    keep &= logits >= -at(negative, limit - 1)
    return jnp.where(keep | (ids == always[:, None]), logits, -jnp.inf)


def _keys(rows: Rows, row: Array, position: Array, stream: int) -> Array:
    """One threefry key a position, its two words made directly: two fold_in calls would double the compile time."""
    step_and_place = (rows.nfe[row].astype(jnp.uint32) << 16) ^ position.astype(jnp.uint32) ^ jnp.uint32(stream << 31)
    return jax.random.wrap_key_data(jnp.stack([rows.seed[row], step_and_place], axis=1))


def _noised(logits: Array, rows: Rows, row: Array, position: Array) -> Array:
    """Gumbel noise in log space on the rows that sample: the argmax is then a sample of the softmax."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(_keys(rows, row, position, 0))
    return logits + jnp.where((rows.temperature[row] > 0)[:, None], noise, 0)


def _confidence(logits: Array, probability: Array, rows: Rows, row: Array, position: Array) -> Array:
    p = jax.nn.softmax(logits, axis=1)
    first = _first_highest(p)
    second = jnp.max(jnp.where(jnp.arange(p.shape[1]) == first[:, None], 0, p), axis=1)
    neg_entropy = jnp.sum(p * jnp.log(p + 1e-10), axis=1)
    chance, noise = jax.vmap(lambda key: jax.random.uniform(key, (2,), minval=1e-7))(_keys(rows, row, position, 1)).T
    by_kind = {
        "probability": probability,
        "margin": _chosen(p, first) - second,
        "neg_entropy": neg_entropy,
        "random": chance,
    }
    confidence = jnp.choose(rows.confidence[row], [by_kind[name] for name in RANKINGS], mode="clip")
    # Dream draws the positions themselves, without putting any back, from the softmax of confidence / alg_temp.
    warmth = rows.confidence_temperature[row]
    drawn = confidence / jnp.where(warmth > 0, warmth, 1) - jnp.log(-jnp.log(noise))
    return jnp.where(warmth > 0, drawn, confidence)


def accepted(
    masked: Array,
    block: Array,
    activated: Array,
    sure: Array,
    confidence: Array,
    count: Array,
    factor: Array,
    blocks: int,
) -> Array:
    """The rule of every decoder: a block commits the positions that are sure; one that has none, if it is activated,
    commits its ``count`` most confident ones (or as many as Fast-dLLM's factor rule allows).

    D2F (semantics 1.2): sure is a probability above the threshold, count is 1. Fast-dLLM's threshold is the same, since
    the best position is sure if any is. A quota is a count, with nothing sure.

    Args:
        masked: bool [N], to be decided.
        block: int32 [N], below ``blocks``; two positions share it exactly if they are decided together.
        activated, sure: bool [N].
        confidence: float32 [N].
        count: int32 [N], the same for all positions of a block.
        factor: float32 [N], likewise; 0 for none.

    Returns:
        bool [N].
    """
    index = jnp.arange(masked.shape[0], dtype=jnp.int32)
    sure = sure & masked
    some_sure = jax.ops.segment_max(sure.astype(jnp.int32), block, blocks) > 0
    highest = jax.ops.segment_max(jnp.where(masked, confidence, -jnp.inf), block, blocks)
    among_highest = masked & (confidence == highest[block])
    best = jax.ops.segment_min(jnp.where(among_highest, index, masked.shape[0]), block, blocks)
    is_best = (index == best[block]) & (count == 1)
    several = (count > 1) | (factor > 0)
    ranked = lambda: _ranked(masked, block, confidence, count, factor, blocks)
    chosen = jax.lax.cond(jnp.any(several & masked), lambda: jnp.where(several, ranked(), is_best), lambda: is_best)
    return sure | (masked & activated & ~some_sure[block] & chosen)


def _ranked(masked: Array, block: Array, confidence: Array, count: Array, factor: Array, blocks: int) -> Array:
    """bool [N]: the ``count`` most confident masked positions of each block, ties by position.

    With a factor f the best position demands nothing and the m-th 1 - f / (m + 1); those before the first failure are
    taken. The published loop's quirk is kept: where only the last fails it is taken as well."""
    size = masked.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)
    group = jnp.where(masked, block, blocks)
    group, negative, order = jax.lax.sort((group, -confidence, index), num_keys=3)
    first = jax.ops.segment_min(index, group, blocks + 1)
    members = jax.ops.segment_sum(jnp.ones(size, jnp.int32), group, blocks + 1)[group]
    rank = index - first[group]
    demanded = 1 - factor[order] / (rank + 2)
    fails = (rank > 0) & (-negative < demanded)
    failure = jax.ops.segment_min(jnp.where(fails, rank, size), group, blocks + 1)[group]
    allowed = jnp.where(failure >= members - 1, members, failure)
    taken = rank < jnp.where(factor[order] > 0, allowed, count[order])
    return jnp.zeros(size, bool).at[order].set(taken)
