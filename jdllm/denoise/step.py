"""The denoising step: plan, forward, unmask, advance, all rows at once, in one compiled function.

What the next step will need, its window and the block that it adds, is settled at the end of a step (and at
insertion), which is the references' order seen from the other side of the loop; so a report names the exact size of the
next window.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jdllm.config import ModelConfig
from jdllm.denoise.blocks import block_start, decided_end, first, masked, newest_block_decoded
from jdllm.denoise.head import alternatives, decide
from jdllm.denoise.state import PROGRESS, REPORT_FIELDS, Rows, State, first_rows, pack_numbers, unpack_numbers
from jdllm.denoise.unmask import Found, accepted
from jdllm.denoise.window import Bucket, Packing, pack, window_attention
from jdllm.models import llada
from jdllm.models.layers import rope_tables

Text = tuple[Array, Array]
"""int32 [R] each: first masked position of a row and its first stop id; its length and limit where there is none."""

Work = tuple[Array, Array]
"""int32 [R] each: window positions computed, and those of them that belong to passes over the whole canvas."""

Report = tuple[Array, Array, Array]
"""int32 [R, 10 + S] (state.REPORT_FIELDS), and State's ``logprobs`` and ``committed`` of those rows [R, S]."""


def steps(
    params: llada.Params, state: State, held: Array, *, model: ModelConfig, bucket: Bucket
) -> tuple[State, Report]:
    """``bucket.steps`` denoising steps of slots [0, R); rows that end are frozen from then on.

    Args:
        held: bool [B], live rows that take no part in this call (a scheduler's decision); nothing of them changes.

    Returns:
        the new state (donate the old one) and the report.
    """
    R = bucket.rows

    def body(_: Array, carry: tuple[State, Text, Work]) -> tuple[State, Text, Work]:
        whole, _before, (computed, refreshed) = carry
        whole, text, (width, refresh) = _step(params, whole, held[:R], model, bucket)
        return whole, text, (computed + width, refreshed + refresh)

    none = jnp.zeros(R, jnp.int32)
    carry = (state, (none, none), (none, none))
    once = bucket.steps == 1
    state, text, work = body(jnp.int32(0), carry) if once else jax.lax.fori_loop(0, bucket.steps, body, carry)
    rows = unpack_numbers(state.progress[:R], state.settings[:R])
    return state, (_report(rows, state.tokens[:R], text, work), state.logprobs[:R], state.committed[:R])


def _step(
    params: llada.Params, state: State, held: Array, model: ModelConfig, bucket: Bucket
) -> tuple[State, Text, Work]:
    rows, before = first_rows(state, bucket.rows), state.tokens[: bucket.rows]
    packing = pack(rows, held, bucket, before.shape[1])
    hidden, keys, values = _forward(params, state, rows, packing, model)
    found, here = decide(params, state, rows, packing, hidden, model)
    accept = _accept(state, rows, packing, found, here)
    token, _, _, logprob = found
    tokens = packing.write(before, token, accept)
    others = alternatives(params, state, rows, packing, hidden, accept, model)
    progress, text = _advance(state, rows, before, tokens, packing.width > 0, model)
    part = lambda array: array[: bucket.rows]
    state = State(
        progress=_replace(state.progress, pack_numbers(PROGRESS, progress)),
        settings=state.settings,
        schedule=state.schedule,
        tokens=_replace(state.tokens, tokens),
        logprobs=_replace(state.logprobs, packing.write(part(state.logprobs), logprob, accept)),
        alternative_ids=others[0],
        alternative_logprobs=others[1],
        committed=_replace(state.committed, packing.write(part(state.committed), rows.nfe[packing.row] + 1, accept)),
        edge=None if state.edge is None else _replace(state.edge, _edge(state.edge, rows, packing, hidden)),
        keys=keys,
        values=values,
    )
    whole_canvas = (rows.start == 0) & (rows.end == rows.length)
    return state, text, (packing.width, jnp.where(whole_canvas, packing.width, 0))


def _replace(whole: Array, part: Array) -> Array:
    """``whole`` [B, ...] with its first rows replaced by ``part`` [R, ...], in place where it is donated."""
    return part if part.shape == whole.shape else jax.lax.dynamic_update_slice(whole, part, (0,) * whole.ndim)


def _forward(
    params: llada.Params, state: State, rows: Rows, packing: Packing, model: ModelConfig
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """Run the windows through the layers: [N, D] before the final norm, and the caches with the windows' keys and
    values written. Entries are overwritten by every pass whose window they lie in."""
    R = rows.live.shape[0]
    rope = rope_tables(packing.position, model.head_dim, model.rope_theta)
    keys, values = list(state.keys), list(state.values)
    x = llada.embed(params, model, _tokens(state, rows, packing, model))
    for i, p in enumerate(llada.layer_params(params, model)):

        def attend(q: Array, k: Array, v: Array, i: int = i) -> Array:
            keys[i] = packing.write_cache(keys[i], k)
            values[i] = packing.write_cache(values[i], v)
            return window_attention(q, keys[i][:R], values[i][:R], packing)

        x = llada.layer(p, model, x, rope, attend, rows.adapter[packing.row])
    return x, tuple(keys), tuple(values)


def _tokens(state: State, rows: Rows, packing: Packing, model: ModelConfig) -> Array:
    """int32 [N]: what the window positions hold; of a shadow, its owner's canvas with the prompt masked."""
    row, position = packing.row, packing.position
    if rows.live.shape[0] == 1:
        return state.tokens[row, position]
    source = rows.owner[row]
    hidden = (source != row) & (position < rows.prompt_length[row]) & (state.committed[source, position] == 0)
    return jnp.where(hidden, model.mask_id, state.tokens[source, position])


def _accept(state: State, rows: Rows, packing: Packing, found: Found, here: Array) -> Array:
    """bool [N]: the positions that this step commits."""
    row, position = packing.row, packing.position
    _, probability, confidence, _ = found
    S = state.tokens.shape[1]
    pipelined, size = rows.pipelined[row], jnp.maximum(rows.block_size, 1)[row]
    start = jnp.where(pipelined, block_start(rows, position, row), rows.block[row])
    here &= probability == probability  # what is not a number is not committed
    masks = jax.ops.segment_sum(here.astype(jnp.int32), row * S + start, rows.live.shape[0] * S)
    # A block is fully activated when its predecessor is decoded enough. (Sticky in the reference; here decoded
    # positions stay decoded, so the count says the same.) The prompt always is.
    previous = jnp.where(pipelined & (start > rows.prompt_length[row]), row * S + start - size, -1)
    activated = (previous < 0) | (masks[previous] <= size - rows.need_decoded[row])
    count = _scheduled(state, rows)
    chance = (confidence * 2.0**31).astype(jnp.float32) < count[row].astype(jnp.float32) + 1
    sure = jnp.where(rows.chance[row], chance, probability > rows.sure_above[row])
    return accepted(
        masked=here,
        block=row * S + start,
        activated=activated,
        sure=sure,
        confidence=confidence,
        count=jnp.where(rows.chance, 0, count)[row],
        factor=rows.factor[row],
        blocks=rows.live.shape[0] * S,
    )


def _scheduled(state: State, rows: Rows) -> Array:
    """int32 [R]: this pass's entry of each row's schedule."""
    place = jnp.minimum(rows.nfe, state.schedule.shape[1] - 1)
    return jnp.take_along_axis(state.schedule[: rows.live.shape[0]], place[:, None], axis=1)[:, 0]


def _edge(edge: Array, rows: Rows, packing: Packing, hidden: Array) -> Array:
    """[B, D]: ``edge`` with the last layer's output at the last position that this pass makes final."""
    R = rows.live.shape[0]
    final = rows.pipelined & (packing.width > 0) & (rows.settled > rows.start)
    last = jnp.clip(packing.first + rows.settled - 1 - rows.start, 0, hidden.shape[0] - 1)
    return jnp.where(final[:, None], hidden[last], edge[:R])


def _advance(
    state: State, rows: Rows, before: Array, tokens: Array, ran: Array, model: ModelConfig
) -> tuple[dict[str, Array], Text]:
    """What a step changes of Rows, for the rows that ran, and how far the text reaches. ``before`` and ``tokens`` are
    the canvases around the step."""
    is_masked = masked(rows, tokens, model.mask_id)
    prefix = first(is_masked, rows.length)
    stop = first(_is_stop(rows, tokens), rows.limit)
    settled_text = rows.early_stop & (stop < prefix)
    stopped = rows.stopped | (stop < rows.limit)
    failed = _stuck(state, rows, before, tokens, model)

    unfinished = prefix < rows.length
    enough = newest_block_decoded(rows, is_masked) >= rows.need_add
    add = rows.pipelined & (rows.length < rows.limit) & ~stopped & enough
    length = jnp.where(add, jnp.minimum(rows.length + rows.block_size, rows.limit), rows.length)
    settled = jnp.where(unfinished, block_start(rows, prefix), rows.length)

    passes = rows.passes + 1
    end_of_block = decided_end(rows)
    filled = (prefix >= end_of_block) & ((passes > 1) | ~rows.first_alone)
    done = jnp.where(rows.block_passes > 0, passes == rows.block_passes, filled)
    block = jnp.where(done, end_of_block, rows.block)
    passes = jnp.where(done, 0, passes)
    narrow = passes > 0  # else the whole canvas: a refresh
    block_ends = jnp.minimum(jnp.maximum(block, rows.prompt_length) + rows.block_size, rows.limit)

    piped = lambda a, b: jnp.where(rows.pipelined, a, b)
    going = piped(unfinished | add, block < rows.limit)
    failed |= ~going & ~settled_text & unfinished
    new = {
        "live": going & ~settled_text & ~failed,
        "failed": failed,
        "length": length,
        "start": piped(rows.settled, jnp.where(narrow & rows.keep_before, block, 0)),
        "end": piped(length, jnp.where(narrow & rows.keep_behind, block_ends, rows.length)),
        "settled": settled,
        "block": block,
        "passes": passes,
        "nfe": rows.nfe + 1,
        "stopped": stopped,
    }
    return {name: jnp.where(ran, value, getattr(rows, name)) for name, value in new.items()}, (prefix, stop)


def _stuck(state: State, rows: Rows, before: Array, tokens: Array, model: ModelConfig) -> Array:
    """bool [R]: the pass committed nothing where it had to. Only confidences that are not numbers do that, and such a
    row would go on for ever: the first unfinished block of a pipelined row is fully activated, any other pass has a
    count above 0 (or commits by chance, or has nothing left to decide)."""
    position = jnp.arange(before.shape[1], dtype=jnp.int32)[None, :]
    open_before = masked(rows, before, model.mask_id) & (position < decided_end(rows)[:, None])
    due = jnp.any(open_before, axis=1) & (rows.pipelined | ((_scheduled(state, rows) > 0) & ~rows.chance))
    return due & jnp.all(tokens == before, axis=1)


def _is_stop(rows: Rows, tokens: Array) -> Array:
    """bool [R, S]: generated positions that hold one of the row's stop ids."""
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    generated = (position >= rows.prompt_length[:, None]) & (position < rows.length[:, None])
    return generated & jnp.any(tokens[:, :, None] == rows.stop_ids[:, None, :], axis=2)


def _report(rows: Rows, tokens: Array, text: Text, work: Work) -> Array:
    (prefix, stop), (computed, refreshed) = text, work
    columns = {
        "live": rows.live,
        "failed": rows.failed,
        "prompt_length": rows.prompt_length,
        "length": rows.length,
        "prefix": prefix,
        "stop": jnp.where(stop < prefix, stop, -1),
        "nfe": rows.nfe,
        "width": jnp.where(rows.live, rows.end - rows.start, 0),
        "computed": computed,
        "refreshed": refreshed,
    }
    head = jnp.stack([columns[name].astype(jnp.int32) for name in REPORT_FIELDS], axis=1)
    return jnp.concatenate([head, tokens], axis=1)
