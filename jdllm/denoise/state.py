"""State: everything the device keeps between two denoising steps. Report: what the host learns of a step.

Positions count from the first prompt token of a row. A row's canvas is ``[0, length)``: the prompt, then blocks of
``block_size`` positions from the end of the prompt on, whatever its length (semantics: D2F section 1.1).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdllm.config import CONFIDENCES, MAX_STOP_IDS, DecodeConfig, ModelConfig, need


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The numbers of each row, arrays [B] unless said otherwise; int32 unless said otherwise.

    Attributes:
        live: bool, the row is decoding; a row that is not takes part in nothing and nothing of it changes.
        failed: bool, a pass of the row committed nothing, which takes numbers that are not finite; it has ended.
        arrival: counts insertions; where not all rows fit into a step the older ones go first.
        prompt_length: end of the prompt.
        length: end of the newest block.
        limit: end of the last block that may be added: prompt plus max_tokens.
        cached: end of the positions whose keys and values are final; the window is ``[cached, length)``.
        settled: end of the leading blocks without a mask; the next pass makes their keys and values final.
        nfe: forward passes so far.
        stopped: bool, a stop id was committed somewhere: no further block is added.
        block_size: positions a block.
        need_add: decoded tokens of the newest block at which the next is added.
        need_decoded: decoded tokens of a block at which its successor is fully activated.
        skip_threshold: float32, a probability strictly above it commits a position.
        temperature, top_p: float32; top_k: int32; 0, 1 and 0 switch them off.
        confidence: index into CONFIDENCES, picks the fallback token.
        seed: uint32.
        early_stop: bool, end once the text up to the first stop id is settled.
        stop_ids: int32 [B, 4], padded with -1.
    """

    live: Array
    failed: Array
    arrival: Array
    prompt_length: Array
    length: Array
    limit: Array
    cached: Array
    settled: Array
    nfe: Array
    stopped: Array
    block_size: Array
    need_add: Array
    need_decoded: Array
    skip_threshold: Array
    temperature: Array
    top_p: Array
    top_k: Array
    confidence: Array
    seed: Array
    early_stop: Array
    stop_ids: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the compiled step reads and writes; donated to every call.

    Attributes:
        rows: the numbers of each row.
        tokens: int32 [B, S], the canvases; the mask id wherever nothing is committed.
        keys, values: one array [B, K, S, H] a layer, indexed by position, keys after rotary embedding. (Heads before
            positions, as a batched matrix product wants them: no step transposes the cache.)
    """

    rows: Rows
    tokens: Array
    keys: tuple[Array, ...]
    values: tuple[Array, ...]


def abstract_state(model: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> State:
    """Shapes and dtypes of a state of ``rows`` slots of ``length`` positions, nothing allocated."""
    return jax.eval_shape(lambda: empty_state(model, rows, length, dtype))


def empty_state(model: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> State:
    """A state whose slots are all free. Every leaf is a buffer of its own, as donation needs."""
    blank = row_numbers(0, DecodeConfig(stop_ids=()), model)
    cache = (rows, model.n_kv_heads, length, model.head_dim)
    return State(
        rows=jax.tree.map(lambda x: jnp.zeros((rows, *np.shape(x)), np.asarray(x).dtype), blank),
        tokens=jnp.full((rows, length), model.mask_id, jnp.int32),
        keys=tuple(jnp.zeros(cache, dtype) for _ in range(model.n_layers)),
        values=tuple(jnp.zeros(cache, dtype) for _ in range(model.n_layers)),
    )


def row_numbers(prompt_length: int, decode: DecodeConfig, model: ModelConfig, arrival: int = 0) -> Rows:
    """The numbers of one request at its start (no leading axis), NumPy scalars. The first block is added here: the
    prompt counts as a fully decoded block 0."""
    i, f = np.int32, np.float32
    stop_ids = (model.eos_id,) if decode.stop_ids is None else decode.stop_ids
    limit = prompt_length + decode.max_tokens
    numbers: dict[str, Any] = {
        "live": np.bool_(True),
        "failed": np.bool_(False),
        "arrival": i(arrival % (1 << 31)),
        "prompt_length": i(prompt_length),
        "length": i(min(prompt_length + decode.block_size, limit)),
        "limit": i(limit),
        "cached": i(0),
        "settled": i(prompt_length),
        "nfe": i(0),
        "stopped": np.bool_(False),
        "block_size": i(decode.block_size),
        "need_add": i(need(decode.block_add_threshold, decode.block_size)),
        "need_decoded": i(need(decode.decoded_token_threshold, decode.block_size)),
        "skip_threshold": f(decode.skip_threshold),
        "temperature": f(decode.temperature),
        "top_p": f(decode.top_p),
        "top_k": i(decode.top_k),
        "confidence": i(CONFIDENCES.index(decode.confidence)),
        "seed": np.random.SeedSequence(decode.seed % (1 << 64)).generate_state(1)[0],
        "early_stop": np.bool_(decode.early_stop),
        "stop_ids": np.array([*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))], i),
    }
    return Rows(**numbers)


def insert(state: State, slot: Array, row: Rows, tokens: Array) -> State:
    """Put a request into a slot. Its cache is cleared, since zero times a stale infinity would be NaN.

    Args:
        slot: int32 [].
        row: from ``row_numbers``.
        tokens: int32 [S], the prompt and then mask ids.
    """
    return State(
        rows=jax.tree.map(lambda all_rows, one: all_rows.at[slot].set(one), state.rows, row),
        tokens=state.tokens.at[slot].set(tokens),
        keys=tuple(cache.at[slot].set(0) for cache in state.keys),
        values=tuple(cache.at[slot].set(0) for cache in state.values),
    )


def evict(state: State, slot: Array) -> State:
    """Free a slot."""
    rows = dataclasses.replace(state.rows, live=state.rows.live.at[slot].set(False))
    return dataclasses.replace(state, rows=rows)


REPORT_FIELDS = ("live", "failed", "prompt_length", "length", "prefix", "stop", "nfe", "width", "computed")
"""Leading columns of a report, int32 [R, 9 + S]; the canvas follows.

``prefix``: first masked position, or the end of the canvas. ``stop``: position of the first stop id inside the prefix,
or -1. ``width``: positions of the next window, 0 for a row that is not live. ``computed``: window positions computed
for this row in this call. The others are as in Rows."""
