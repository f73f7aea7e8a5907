"""The output head, and what is read off the logits: a candidate for every position to be decided, and alternatives
beside a committed token. Logits are never held for all positions at once."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jdllm.config import ModelConfig
from jdllm.denoise.blocks import decided_end, masked
from jdllm.denoise.state import Rows, State, first_rows
from jdllm.denoise.unmask import Found, candidates, is_special, most_probable
from jdllm.denoise.window import Packing
from jdllm.models import llada

T = TypeVar("T")

HEAD = 16
"""The head runs on at least this many positions at a time; for what few rows ask for, on as many."""

MOST_LOGITS = 1 << 25
"""Logits (float32 numbers) held at once: 128 MB. The vocabulary of LLaDA-8B then takes 265 positions at a time."""


def decide(
    params: llada.Params, state: State, rows: Rows, packing: Packing, hidden: Array, model: ModelConfig
) -> tuple[Found, Array]:
    """Candidates of every position to be decided, arrays [N] (rubbish elsewhere), and which these are, bool [N].

    The output head runs on these positions only, packed once more, a quarter of N and no more than MOST_LOGITS at a
    time: as many times as they need. What special rows ask for is worked out a few positions at a time, in a second
    round of theirs alone: it takes several arrays of the size of the logits, and a plain row reads the same numbers
    whatever its neighbours ask for."""
    row, position = packing.row, packing.position
    here = packing.valid & masked(rows, state.tokens[: rows.live.shape[0]], model.mask_id)[row, position]
    here &= position < decided_end(rows)[row]
    here &= ~(rows.first_alone & (rows.passes == 0))[row] | (position == rows.block[row])
    here &= rows.owner[row] == row
    logits = lambda source: _logits(params, state, rows, packing, hidden, source, model)
    N, special = hidden.shape[0], is_special(rows)[row]
    M = min(N, max(HEAD, min(N // 4, MOST_LOGITS // model.vocab_size)))
    number = jnp.zeros(N, jnp.float32)
    found = (jnp.zeros(N, jnp.int32), number, number, number)

    def plain(source: Array) -> Found:
        return most_probable(logits(source), model.mask_id)

    def other() -> Found:
        again = first_rows(
            state, rows.live.shape[0]
        )  # unpacked where it is used: plain steps need few of these numbers

        def find(source: Array) -> Found:
            return candidates(logits(source), again, row[source], position[source], model.mask_id, params.get("unused"))

        return _packed(find, here & special, min(N, HEAD), found)

    found = _packed(plain, here & ~special, M, found)
    # Under a condition: XLA takes out of a loop whatever does not change in it, and would run that in every step.
    return jax.lax.cond(jnp.any(here & special), other, lambda: found), here


def _packed(find: Callable[[Array], T], where: Array, size: int, found: T) -> T:
    """``found`` (arrays [N, ...]) with what ``find`` says of the positions ``where`` bool [N], ``size`` at a time.

    Args:
        find: packed positions int32 [M] -> arrays [M, ...].
    """
    N = where.shape[0]
    rank = jnp.cumsum(where, dtype=jnp.int32)

    def some(i: Array, found: T) -> T:
        wanted = i * size + jnp.arange(1, size + 1, dtype=jnp.int32)
        source = jnp.searchsorted(rank, wanted, method="compare_all")  # N behind the last
        new = find(jnp.minimum(source, N - 1))
        return jax.tree.map(lambda x, y: x.at[source].set(y, mode="drop"), found, new)

    return jax.lax.fori_loop(0, -(-rank[-1] // size), some, found)


def _logits(
    params: llada.Params, state: State, rows: Rows, packing: Packing, hidden: Array, source: Array, model: ModelConfig
) -> Array:
    """float32 [M, V] for the packed positions ``source`` [M]; of guided rows u + (w + 1) (c - u), u being the logits
    without the prompt."""
    row, position = packing.row[source], packing.position[source]

    def predict(source: Array) -> Array:
        if state.edge is None:
            return llada.head(params, model, hidden[source])
        # The position before predicts; at the window's start the official loops keep the window's own first logits, but
        # D2F those of the last position that it made final.
        at_start = position == rows.start[row]
        x = hidden[jnp.where(at_start, source, source - 1)]
        known = at_start & rows.pipelined[row] & (position > 0)
        return llada.head(params, model, jnp.where(known[:, None], state.edge[row], x))

    logits = predict(source)
    if rows.live.shape[0] == 1:
        return logits
    scale = jnp.where(rows.shadow != jnp.arange(rows.live.shape[0]), rows.guidance, 0)

    def guided() -> Array:
        alone = predict(packing.first[rows.shadow[row]] + position - rows.start[row])
        return jnp.where(scale[row, None] > 0, alone + (scale[row, None] + 1) * (logits - alone), logits)

    return jax.lax.cond(jnp.any(rows.live & (scale > 0)), guided, lambda: logits)


def alternatives(
    params: llada.Params, state: State, rows: Rows, packing: Packing, hidden: Array, accept: Array, model: ModelConfig
) -> tuple[Array, Array]:
    """State's ``alternative_ids`` and ``alternative_logprobs``, with those of the positions that this pass commits in
    rows that ask for them. They get logits of their own, so that a row that asks decodes as one that does not."""
    A = state.alternative_ids.shape[2]
    never = (jnp.arange(model.vocab_size) == model.mask_id) | params.get("unused", False)

    def find(source: Array) -> tuple[Array, Array]:
        logits = _logits(params, state, rows, packing, hidden, source, model)
        values, ids = jax.lax.top_k(jnp.where(never, -jnp.inf, logits), A)
        return ids.astype(jnp.int32), values - jax.nn.logsumexp(logits, axis=1, keepdims=True)

    def write() -> tuple[Array, Array]:
        N, wanted = accept.shape[0], accept & (rows.alternatives > 0)[packing.row]
        none = (jnp.zeros((N, A), jnp.int32), jnp.zeros((N, A), jnp.float32))
        ids, logprobs = _packed(find, wanted, min(N, HEAD), none)
        place = jnp.where(wanted, packing.position, state.tokens.shape[1])
        at = lambda array, new: array.at[packing.row, place].set(new, mode="drop")
        return at(state.alternative_ids, ids), at(state.alternative_logprobs, logprobs)

    keep = lambda: (state.alternative_ids, state.alternative_logprobs)
    return jax.lax.cond(jnp.any(rows.live & (rows.alternatives > 0)), write, keep)
