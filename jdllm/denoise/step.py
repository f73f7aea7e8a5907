"""The denoising step: plan, forward, unmask, advance, all rows at once, in one compiled function.

The block that the next step will need is added at the end of a step (and the first one at insertion), which is the
reference's order seen from the other side of the loop; so a report names the exact size of the next window.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jdllm.config import ModelConfig
from jdllm.denoise.blocks import block_start, first, masked, newest_block_decoded
from jdllm.denoise.state import REPORT_FIELDS, Rows, State
from jdllm.denoise.unmask import accepted, candidates
from jdllm.denoise.window import Bucket, Packing, pack, window_attention
from jdllm.models import llada
from jdllm.models.layers import rope_tables

Text = tuple[Array, Array]
"""int32 [R] each: first masked position of a row and its first stop id; its length and limit where there is none."""


def steps(params: llada.Params, state: State, *, model: ModelConfig, bucket: Bucket) -> tuple[State, Array]:
    """``bucket.steps`` denoising steps of slots [0, R); rows that end are frozen from then on.

    Returns:
        the new state (donate the old one) and the report, int32 [R, 9 + S] (state.REPORT_FIELDS).
    """
    R = bucket.rows

    def body(_: Array, carry: tuple[State, Text, Array]) -> tuple[State, Text, Array]:
        whole, _before, computed = carry
        progress, text, tokens, keys, values, width = _step(params, whole, model, bucket)
        changed = {name: _replace(getattr(whole.rows, name), part) for name, part in progress.items()}
        rows = dataclasses.replace(whole.rows, **changed)
        whole = State(rows=rows, tokens=_replace(whole.tokens, tokens), keys=keys, values=values)
        return whole, text, computed + width

    none = jnp.zeros(R, jnp.int32)
    carry = (state, (none, none), none)
    once = bucket.steps == 1
    state, text, computed = body(jnp.int32(0), carry) if once else jax.lax.fori_loop(0, bucket.steps, body, carry)
    return state, _report(_part(state.rows, R), state.tokens[:R], text, computed)


def _part(rows: Rows, count: int) -> Rows:
    return jax.tree.map(lambda x: x[:count], rows)


def _replace(whole: Array, part: Array) -> Array:
    """``whole`` [B, ...] with its first rows replaced by ``part`` [R, ...], in place where it is donated."""
    return part if part.shape == whole.shape else jax.lax.dynamic_update_slice(whole, part, (0,) * whole.ndim)


def _step(
    params: llada.Params, state: State, model: ModelConfig, bucket: Bucket
) -> tuple[dict[str, Array], Text, Array, tuple[Array, ...], tuple[Array, ...], Array]:
    rows, tokens = _part(state.rows, bucket.rows), state.tokens[: bucket.rows]
    packing = pack(rows, bucket, tokens.shape[1])
    hidden, keys, values = _forward(params, state, tokens, packing, model)
    tokens_before, tokens = tokens, _unmask(params, rows, tokens, packing, hidden, model)
    progress, text = _advance(rows, tokens_before, tokens, packing.width > 0, model)
    return progress, text, tokens, keys, values, packing.width


def _forward(
    params: llada.Params,
    state: State,
    tokens: Array,
    packing: Packing,
    model: ModelConfig,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """Run the windows through the layers: [N, D] before the final norm, and the caches with the windows' keys and
    values written. A block's entries are overwritten by every pass until the pass after its last mask is filled."""
    R = tokens.shape[0]
    rope = rope_tables(packing.position, model.head_dim, model.rope_theta)
    keys, values = list(state.keys), list(state.values)
    x = llada.embed(params, model, tokens[packing.row, packing.position])
    for i, p in enumerate(llada.layer_params(params, model)):

        def attend(q: Array, k: Array, v: Array, i: int = i) -> Array:
            keys[i] = packing.write_cache(keys[i], k)
            values[i] = packing.write_cache(values[i], v)
            return window_attention(q, keys[i][:R], values[i][:R], packing)

        x = llada.layer(p, model, x, rope, attend)
    return x, tuple(keys), tuple(values)


def _unmask(
    params: llada.Params, rows: Rows, tokens: Array, packing: Packing, hidden: Array, model: ModelConfig
) -> Array:
    """The canvases [R, S] with this step's commits."""
    row, position = packing.row, packing.position
    here = packing.valid & masked(rows, tokens, model.mask_id)[row, position]
    token, probability, confidence = _head(params, rows, packing, hidden, here, model)

    size = jnp.maximum(rows.block_size, 1)[row]
    start = position - (position - rows.prompt_length[row]) % size
    block = row * tokens.shape[1] + start
    accept = accepted(
        masked=here,
        block=block,
        previous=jnp.where(start == rows.prompt_length[row], -1, block - size),
        spare=size - rows.need_decoded[row],
        sure=probability > rows.skip_threshold[row],
        confidence=confidence,
        blocks=tokens.size,
    )
    return packing.write_tokens(tokens, token, accept)


MIN_HEAD = 16
"""The head runs on at least this many positions at a time."""


def _head(
    params: llada.Params, rows: Rows, packing: Packing, hidden: Array, here: Array, model: ModelConfig
) -> tuple[Array, Array, Array]:
    """Candidate, probability and confidence of every masked packed position, arrays [N] (rubbish elsewhere).

    The output head runs on the masked positions only, packed once more, a quarter of N at a time: as many times as the
    masks need, and never more than a quarter of the logits at once."""
    N = hidden.shape[0]
    M = min(N, max(MIN_HEAD, N // 4))
    rank = jnp.cumsum(here, dtype=jnp.int32)

    def some(i: Array, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        wanted = i * M + jnp.arange(1, M + 1, dtype=jnp.int32)
        source = jnp.minimum(jnp.searchsorted(rank, wanted, method="compare_all"), N - 1)
        logits = llada.head(params, model, hidden[source])
        new = candidates(logits, rows, packing.row[source], packing.position[source], model.mask_id)
        put = lambda x, y: jax.lax.dynamic_update_slice(x, y, (i * M,))
        return jax.tree.map(put, found, new)

    room = -(-N // M) * M
    found = (jnp.zeros(room, jnp.int32), jnp.zeros(room, jnp.float32), jnp.zeros(room, jnp.float32))
    found = some(jnp.int32(0), found) if N == M else jax.lax.fori_loop(0, -(-rank[-1] // M), some, found)
    return jax.tree.map(lambda x: x[jnp.maximum(rank - 1, 0)], found)


def _advance(rows: Rows, before: Array, tokens: Array, ran: Array, model: ModelConfig) -> tuple[dict[str, Array], Text]:
    """Counters, the cached prefix, the next block, and the end of a row, for the rows that ran: the fields of Rows that
    a step changes, and how far the text reaches. ``before`` and ``tokens`` are the canvases around the step.

    Every pass of a live row commits something, since its first unfinished block is fully activated; one that does not
    had confidences that are not numbers, and would go on for ever."""
    is_masked = masked(rows, tokens, model.mask_id)
    prefix = first(is_masked, rows.length)
    stop = first(_is_stop(rows, tokens), rows.limit)
    unfinished = prefix < rows.length
    stopped = rows.stopped | (stop < rows.limit)
    enough = newest_block_decoded(rows, is_masked) >= rows.need_add
    add = (rows.length < rows.limit) & ~stopped & enough
    failed = jnp.all(tokens == before, axis=1)
    new = {
        "live": (unfinished | add) & ~(rows.early_stop & (stop < prefix)) & ~failed,
        "failed": failed,
        "length": jnp.where(add, jnp.minimum(rows.length + rows.block_size, rows.limit), rows.length),
        "cached": rows.settled,
        "settled": jnp.where(unfinished, block_start(rows, prefix), rows.length),
        "nfe": rows.nfe + 1,
        "stopped": stopped,
    }
    return {name: jnp.where(ran, value, getattr(rows, name)) for name, value in new.items()}, (prefix, stop)


def _is_stop(rows: Rows, tokens: Array) -> Array:
    """bool [R, S]: generated positions that hold one of the row's stop ids."""
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    generated = (position >= rows.prompt_length[:, None]) & (position < rows.length[:, None])
    return generated & jnp.any(tokens[:, :, None] == rows.stop_ids[:, None, :], axis=2)


def _report(rows: Rows, tokens: Array, text: Text, computed: Array) -> Array:
    prefix, stop = text
    columns = {
        "live": rows.live,
        "failed": rows.failed,
        "prompt_length": rows.prompt_length,
        "length": rows.length,
        "prefix": prefix,
        "stop": jnp.where(stop < prefix, stop, -1),
        "nfe": rows.nfe,
        "width": jnp.where(rows.live, rows.length - rows.cached, 0),
        "computed": computed,
    }
    head = jnp.stack([columns[name].astype(jnp.int32) for name in REPORT_FIELDS], axis=1)
    return jnp.concatenate([head, tokens], axis=1)
