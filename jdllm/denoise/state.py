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

from jdllm.config import MAX_ALTERNATIVES, MAX_STOP_IDS, ModelConfig


def _column(kind: str = "int", *, changes: bool = False, width: int = 0) -> Any:
    """A number of Rows: its kind (int, bool, float, uint), whether steps change it, how many columns it has (0: one,
    without an axis of its own)."""
    return dataclasses.field(metadata={"kind": kind, "changes": changes, "width": width})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The numbers of each row, arrays [B] unless said otherwise; int32 unless said otherwise.

    What a step changes:

    Attributes:
        live: bool, the row is decoding; a row that is not takes part in nothing and nothing of it changes.
        failed: bool, a pass of the row committed nothing where it had to, which takes numbers that are not finite; it
            has ended.
        length: end of the canvas: of the newest block of a pipelined row, else ``limit`` from the start.
        start, end: the window of the next pass. Keys and values before and behind it are kept as they are.
        settled: of a pipelined row, end of the leading blocks without a mask; the next pass makes their keys and values
            final, and the window after it starts there.
        block: of a row that is not pipelined, start of the block being decoded.
        passes: forward passes of that block so far.
        nfe: forward passes so far.
        stopped: bool, a stop id was committed somewhere: no further block is added.

    What a request sets:

    Attributes:
        arrival: counts insertions; where not all rows fit into a step the older ones go first.
        owner, shadow: the row that this one repeats with its prompt masked (guidance), and the row that repeats this
            one; itself where there is none.
        adapter: which adapter's weights it sees, 0 for none.
        prompt_length: end of the prompt.
        fill_from: first position at which a mask is to be decoded: the end of the prompt, or earlier for infill.
        limit: end of the last block that may be added: prompt plus max_tokens.
        stop_from: first position whose candidate may be a stop id.
        block_size: positions a block.
        pipelined: bool, blocks are added and activated while earlier ones are decoded, and see no later ones (D2F);
            else one block after the other, and all see all.
        need_add: decoded tokens of the newest block at which the next is added.
        need_decoded: decoded tokens of a block at which its successor is fully activated.
        keep_before, keep_behind: bool, what a window that is no refresh leaves out: what lies before the block, and
            what lies behind it.
        block_passes: passes that each block gets, whatever it commits; 0: until it has no mask.
        first_alone: bool, a refresh decides the first position of its block alone (Fast-dLLM on Dream).
        sure_above: float32, a probability strictly above it commits a position.
        factor: float32, 0 for none (Fast-dLLM's factor rule).
        chance: bool, the schedule holds chances, in units of 2^-31, that a position is committed (Dream's origin).
        temperature, top_p: float32; top_k: int32; 0, 1 and 0 switch them off.
        confidence: index into jdllm.config.RANKINGS, ranks positions.
        confidence_temperature: float32, noise on the ranking (Dream's alg_temp); 0 for none.
        untempered: bool, probabilities are those before temperature and filters (LLaDA).
        guidance: float32 (LLaDA's cfg_scale); 0 for none.
        banned_id: never a candidate and of no probability (LLaDA's logits_eos_inf); -1 for none.
        demoted_ids: int32 [B, 2], candidates of no confidence, padded with -1 (LLaDA's confidence_eos_eot_inf).
        seed: uint32.
        early_stop: bool, end once the text up to the first stop id is settled.
        alternatives: how many of the most probable tokens the host wants to see beside each committed one.
        stop_ids: int32 [B, 4], padded with -1.
    """

    live: Array = _column("bool", changes=True)
    failed: Array = _column("bool", changes=True)
    length: Array = _column(changes=True)
    start: Array = _column(changes=True)
    end: Array = _column(changes=True)
    settled: Array = _column(changes=True)
    block: Array = _column(changes=True)
    passes: Array = _column(changes=True)
    nfe: Array = _column(changes=True)
    stopped: Array = _column("bool", changes=True)
    arrival: Array = _column()
    owner: Array = _column()
    shadow: Array = _column()
    adapter: Array = _column()
    prompt_length: Array = _column()
    fill_from: Array = _column()
    limit: Array = _column()
    stop_from: Array = _column()
    block_size: Array = _column()
    pipelined: Array = _column("bool")
    need_add: Array = _column()
    need_decoded: Array = _column()
    keep_before: Array = _column("bool")
    keep_behind: Array = _column("bool")
    block_passes: Array = _column()
    first_alone: Array = _column("bool")
    sure_above: Array = _column("float")
    factor: Array = _column("float")
    chance: Array = _column("bool")
    temperature: Array = _column("float")
    top_p: Array = _column("float")
    top_k: Array = _column()
    confidence: Array = _column()
    confidence_temperature: Array = _column("float")
    untempered: Array = _column("bool")
    guidance: Array = _column("float")
    banned_id: Array = _column()
    demoted_ids: Array = _column(width=2)
    seed: Array = _column("uint")
    early_stop: Array = _column("bool")
    alternatives: Array = _column()
    stop_ids: Array = _column(width=MAX_STOP_IDS)


_FIELDS = dataclasses.fields(Rows)
PROGRESS = tuple(f.name for f in _FIELDS if f.metadata["changes"])
SETTINGS = tuple(f.name for f in _FIELDS if not f.metadata["changes"])
_META = {f.name: f.metadata for f in _FIELDS}
_BITS = {"float": np.float32, "uint": np.uint32}


def _place(names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """First column and number of columns of each name."""
    places, at = {}, 0
    for name in names:
        width = max(1, _META[name]["width"])
        places[name] = (at, width)
        at += width
    return places


_PLACES = {**_place(PROGRESS), **_place(SETTINGS)}


def _row_type(names: tuple[str, ...]) -> np.dtype:
    """The columns of one row with the kinds of their fields."""
    return np.dtype([(name, _BITS.get(_META[name]["kind"], np.int32), _META[name]["width"] or ()) for name in names])


_ROW_TYPES = {names: _row_type(names) for names in (PROGRESS, SETTINGS)}


def column_of(name: str) -> int:
    """Where ``pack_numbers`` puts a field, in the array of its kind (PROGRESS or SETTINGS)."""
    return _PLACES[name][0]


def pack_numbers(names: tuple[str, ...], values: dict[str, Array]) -> Array:
    """Fields as one int32 array [..., columns], floats by their bits: every array of its own costs a call a
    microsecond."""
    columns = []
    for name in names:
        value, meta = values[name], _META[name]
        if meta["kind"] in _BITS:
            value = jax.lax.bitcast_convert_type(value, jnp.int32)
        columns.append(value.astype(jnp.int32)[..., None] if not meta["width"] else value)
    return jnp.concatenate(columns, axis=-1)


def pack_row(names: tuple[str, ...], values: dict[str, Any]) -> np.ndarray:
    """``pack_numbers`` of one row on the host."""
    return np.array([tuple(values[name] for name in names)], _ROW_TYPES[names]).view(np.int32)


def unpack_numbers(progress: Array, settings: Array) -> Rows:
    """The inverse of ``pack_numbers``, of both arrays."""
    values = {}
    for name, (at, width) in _PLACES.items():
        meta = _META[name]
        packed = progress if meta["changes"] else settings
        value = packed[..., at : at + width] if meta["width"] else packed[..., at]
        if meta["kind"] in _BITS:
            value = jax.lax.bitcast_convert_type(value, _BITS[meta["kind"]])
        values[name] = value != 0 if meta["kind"] == "bool" else value
    return Rows(**values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the compiled step reads and writes; donated to every call.

    Attributes:
        progress, settings: int32 [B, ...], the numbers of each row (Rows).
        schedule: int32 [B, S], how many positions each forward pass of a row commits by rank.
        tokens: int32 [B, S], the canvases; the mask id wherever nothing is committed.
        logprobs: float32 [B, S], log-probability of each committed token in the pass that committed it, before
            temperature and filters; 0 elsewhere.
        committed: int32 [B, S], the pass that committed each position, counted from 1; 0 elsewhere.
        alternative_ids: int32 [B, S, A], the most probable tokens at each committed position in that pass, in order,
            in rows that ask for ``alternatives``; of no meaning elsewhere.
        alternative_logprobs: float32 [B, S, A], theirs.
        edge: [B, D], output of the last layer at the last final position of a pipelined row, for models whose logits
            predict the next position; None for the others.
        keys, values: one array [B, K, S, H] a layer, indexed by position, keys after rotary embedding. (Heads before
            positions, as a batched matrix product wants them: no step transposes the cache.)
    """

    progress: Array
    settings: Array
    schedule: Array
    tokens: Array
    logprobs: Array
    committed: Array
    alternative_ids: Array
    alternative_logprobs: Array
    edge: Array | None
    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def rows(self) -> Rows:
        return unpack_numbers(self.progress, self.settings)


def first_rows(state: State, count: int) -> Rows:
    """The first ``count`` rows; a row that shadows another has that one's progress."""
    progress, settings = state.progress[:count], state.settings[:count]
    if count == 1:
        return unpack_numbers(progress, settings)
    return unpack_numbers(progress[unpack_numbers(progress, settings).owner], settings)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """What ``insert`` writes into a slot, NumPy arrays: one row of the arrays of State by the same names."""

    progress: np.ndarray
    settings: np.ndarray
    schedule: np.ndarray
    tokens: np.ndarray


def abstract_state(model: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> State:
    """Shapes and dtypes of a state of ``rows`` slots of ``length`` positions, nothing allocated."""
    return jax.eval_shape(lambda: empty_state(model, rows, length, dtype))


def empty_state(model: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> State:
    """A state whose slots are all free. Every leaf is a buffer of its own, as donation needs."""
    cache = (rows, model.n_kv_heads, length, model.head_dim)
    alternatives = (rows, length, min(MAX_ALTERNATIVES, model.vocab_size))
    columns = lambda names: sum(_PLACES[name][1] for name in names)
    settings = np.zeros((rows, columns(SETTINGS)), np.int32)
    settings[:, _PLACES["owner"][0]] = settings[:, _PLACES["shadow"][0]] = np.arange(rows)
    return State(
        progress=jnp.zeros((rows, columns(PROGRESS)), jnp.int32),
        settings=jnp.asarray(settings),
        schedule=jnp.zeros((rows, length), jnp.int32),
        tokens=jnp.full((rows, length), model.mask_id, jnp.int32),
        logprobs=jnp.zeros((rows, length), jnp.float32),
        committed=jnp.zeros((rows, length), jnp.int32),
        alternative_ids=jnp.zeros(alternatives, jnp.int32),
        alternative_logprobs=jnp.zeros(alternatives, jnp.float32),
        edge=jnp.zeros((rows, model.d_model), dtype) if model.shifted_logits else None,
        keys=tuple(jnp.zeros(cache, dtype) for _ in range(model.n_layers)),
        values=tuple(jnp.zeros(cache, dtype) for _ in range(model.n_layers)),
    )


def insert(state: State, slot: Array, request: Request) -> State:
    """Put a request into a slot. Its cache is cleared, since zero times a stale infinity would be NaN.

    Args:
        slot: int32 [].
    """
    return dataclasses.replace(
        state,
        **{f.name: getattr(state, f.name).at[slot].set(getattr(request, f.name)) for f in dataclasses.fields(request)},
        logprobs=state.logprobs.at[slot].set(0),
        committed=state.committed.at[slot].set(0),
        edge=None if state.edge is None else state.edge.at[slot].set(0),
        keys=tuple(cache.at[slot].set(0) for cache in state.keys),
        values=tuple(cache.at[slot].set(0) for cache in state.values),
    )


def read_alternatives(state: State, slot: Array) -> tuple[Array, Array]:
    """``alternative_ids`` and ``alternative_logprobs`` [S, A] of one slot; log-probabilities are -inf at positions that
    it has not committed, where the arrays hold what an earlier request left."""
    known = state.committed[slot][:, None] > 0
    return state.alternative_ids[slot], jnp.where(known, state.alternative_logprobs[slot], -jnp.inf)


def set_thresholds(state: State, above: Array) -> State:
    """Let rows commit at another probability from now on.

    Args:
        above: float32 [B], the new ``sure_above`` of each slot; NaN leaves a row as it is.
    """
    at = _PLACES["sure_above"][0]
    bits = jnp.where(jnp.isnan(above), state.settings[:, at], jax.lax.bitcast_convert_type(above, jnp.int32))
    return dataclasses.replace(state, settings=state.settings.at[:, at].set(bits))


def evict(state: State, slot: Array) -> State:
    """Free a slot."""
    itself = jnp.array([_PLACES["owner"][0], _PLACES["shadow"][0]])
    return dataclasses.replace(
        state,
        progress=state.progress.at[slot, _PLACES["live"][0]].set(0),
        settings=state.settings.at[slot, itself].set(slot),
    )


REPORT_FIELDS = ("live", "failed", "prompt_length", "length", "prefix", "stop", "nfe", "width", "computed", "refreshed")
"""Leading columns of a report, int32 [R, 10 + S]; the canvas follows.

``prefix``: first masked position, or the end of the canvas. ``stop``: position of the first stop id inside the prefix,
or -1. ``width``: positions of the next window, 0 for a row that is not live. ``computed``: window positions computed
for this row in this call; ``refreshed``: those of them in passes over its whole canvas, the first among them. The
others are as in Rows."""
