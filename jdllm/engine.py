"""Slots of a compiled batch: insert, step, evict, report. Knows no HTTP, no queue, no tokenizer.

The host decides one thing between a row's insertion and its end: the bucket of the next call, from the window widths
that the last report names. Everything else happens in the compiled step.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdllm import decoders
from jdllm.adapters import Adapter, stack
from jdllm.buckets import choose_bucket, make_buckets, smallest_bucket
from jdllm.config import DecodeConfig, EngineConfig, ModelConfig
from jdllm.costs import CostTable
from jdllm.denoise.request import first_width, placed, request
from jdllm.denoise.state import (
    REPORT_FIELDS,
    Request,
    abstract_state,
    empty_state,
    evict,
    insert,
    read_alternatives,
    set_thresholds,
)
from jdllm.denoise.step import steps
from jdllm.denoise.window import Bucket
from jdllm.models.llada import Params


@dataclasses.dataclass(frozen=True)
class Row:
    """One occupied slot as of one report. Positions count from the first prompt token.

    Attributes:
        slot, handle: where the request sits and what ``insert`` was given for it.
        live: still decoding; False from the report on in which the row has ended, until it is evicted.
        failed: a pass committed nothing, which takes numbers that are not finite; the text is not to be trusted.
        prompt_length: positions of the prompt.
        length: end of the newest block (exclusive).
        prefix: end of the committed left-to-right text (exclusive): the first masked position, or ``length``.
        stop: position of the first stop id inside the prefix, or -1.
        nfe: forward passes of this row so far.
        width: positions of its next window; 0 once it is not live.
        tokens: int32 [S], the canvas; masked positions hold the mask id.
        logprobs: float32 [S], log-probability of each committed token in the pass that committed it.
        committed: int32 [S], the pass that committed each position, from 1; 0 where none has.
    """

    slot: int
    handle: Hashable
    live: bool
    failed: bool
    prompt_length: int
    length: int
    prefix: int
    stop: int
    nfe: int
    width: int
    tokens: np.ndarray
    _call: "_Call | None" = dataclasses.field(default=None, repr=False)

    @property
    def logprobs(self) -> np.ndarray:
        assert self._call is not None
        return np.asarray(self._call.logprobs)[self.slot]

    @property
    def committed(self) -> np.ndarray:
        assert self._call is not None
        return np.asarray(self._call.committed)[self.slot]

    @property
    def canvas_ids(self) -> list[int]:
        """Everything after the prompt, as the reference returns it; of a row that ``early_stop`` has ended, up to the
        first position that was left undecoded."""
        return self.tokens[self.prompt_length : self.length if self.live else self.prefix].tolist()

    @property
    def ids(self) -> list[int]:
        """The committed text: left to right, cut before the first stop id."""
        end = self.stop if self.stop >= 0 else self.prefix
        return self.tokens[self.prompt_length : end].tolist()

    @property
    def finish_reason(self) -> str | None:
        """None while the text is open; ``stop`` at a stop id, ``length`` at max_tokens, ``error`` if it failed."""
        if self.failed:
            return "error"
        if self.stop >= 0:
            return "stop"
        return None if self.live else "length"


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a row would do in the next call.

    Attributes:
        slot, handle: as in Row.
        width: positions of its window, its shadow's among them.
        refresh: the window is its whole canvas.
        nfe: forward passes that it has had.
        prefix: end of its committed left-to-right text (exclusive); 0 before its first report.
    """

    slot: int
    handle: Hashable
    width: int
    refresh: bool
    nfe: int
    prefix: int


@dataclasses.dataclass
class Counters:
    """What the engine has done since it was made.

    Attributes:
        calls, steps: dispatches, and denoising steps in them.
        computed: packed positions the programs ran on, padding included.
        needed: window positions of the rows that took part.
        refreshed: those of them in passes over a row's whole canvas: its first, and the refreshes of its cache.
        compiles: programs compiled.
    """

    calls: int = 0
    steps: int = 0
    computed: int = 0
    needed: int = 0
    refreshed: int = 0
    compiles: int = 0

    def wasted(self) -> float:
        """Share of the computed positions that were padding."""
        return 1 - self.needed / self.computed if self.computed else 0.0

    def refresh_share(self) -> float:
        """Share of the needed positions in passes over whole canvases."""
        return self.refreshed / self.needed if self.needed else 0.0


class Timing(NamedTuple):
    """A call of the compiled step: its bucket, seconds from its start to its report, and when that came
    (``time.perf_counter``)."""

    bucket: Bucket
    seconds: float
    ended: float


@dataclasses.dataclass(frozen=True)
class _Call:
    report: Array
    logprobs: Array
    committed: Array
    handles: tuple[Hashable | None, ...]
    bucket: Bucket
    begin: float | None


def _further(params: Params, adapters: Sequence[Adapter], unused_ids: Sequence[int]) -> Params:
    """Adapters, in the dtype of the weights and where they lie, and the mask of unused ids."""
    embed = params["embed"]
    arrays = stack(adapters)
    if len(unused_ids):
        arrays["unused"] = np.isin(np.arange(embed.shape[0]), unused_ids)
    cast = lambda x: x.astype(embed.dtype) if x.dtype == np.float32 else x
    return {name: jax.device_put(cast(array), embed.sharding) for name, array in arrays.items()}


_SHADOW = "shadow of a guided request"


class Engine:
    """One device-resident batch. Not thread-safe: one thread owns it. ``counters`` says what it has done, ``costs`` how
    long calls take, ``last_call`` how long the call took whose rows ``read`` returned last.

    Args:
        params: flat weights (jdllm.models.llada.Params) on one device; their dtype is the compute dtype.
        model: what the weights are.
        config: what is compiled.
        adapters: kept beside the weights; a request names one by its place, from 1 (DecodeConfig.adapter).
        unused_ids: ids that stand for no token, which are never sampled.

    Raises:
        ValueError: the weights lie on more than one device, which the state does not yet.
    """

    def __init__(
        self,
        params: Params,
        model: ModelConfig,
        config: EngineConfig | None = None,
        adapters: Sequence[Adapter] = (),
        unused_ids: Sequence[int] = (),
    ):
        self.model, self.config, self.adapters = model, config or EngineConfig(), tuple(a.name for a in adapters)
        self.params = {**params, **_further(params, adapters, unused_ids)}
        self.buckets = make_buckets(self.config)
        self.counters = Counters()
        self._dtype = params["embed"].dtype
        devices = {device for leaf in params.values() for device in leaf.devices()}
        if len(devices) != 1:
            raise ValueError(f"params: weights on {len(devices)} devices; an engine runs on one so far")
        self._inserted = 0
        self.last_call: Timing | None = None
        self.costs = CostTable()
        self._steps: dict[Bucket, jax.stages.Compiled] = {}
        self._insert: jax.stages.Compiled
        self._evict: jax.stages.Compiled
        self._alternatives: jax.stages.Compiled
        self._thresholds: jax.stages.Compiled
        self._nobody = jnp.zeros(self.config.max_rows, bool)
        self.reset()

    def reset(self) -> None:
        """Forget every request and start from an empty state (also after a failed call has lost the donated one)."""
        B = self.config.max_rows
        self._call: _Call | None = None
        self.__dict__.pop("state", None)  # the new one takes its memory
        self.state = empty_state(self.model, B, self.config.max_length, self._dtype)
        self._handles: list[Hashable | None] = [None] * B
        self._widths, self._lengths, self._nfes, self._prefixes = (np.zeros(B, np.int64) for _ in range(4))
        self._shadows = list(range(B))

    def compile(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every bucket; ``progress(done, total, text)`` after each. Nothing compiles afterwards."""
        state = abstract_state(self.model, self.config.max_rows, self.config.max_length, self._dtype)
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.params)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        any_request = request([0], DecodeConfig(), self.model, self.config.max_length)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), any_request)
        self._insert = jax.jit(insert, donate_argnums=0).lower(state, slot, shapes).compile()
        self._evict = jax.jit(evict, donate_argnums=0).lower(state, slot).compile()
        self._alternatives = jax.jit(read_alternatives).lower(state, slot).compile()
        above = jax.ShapeDtypeStruct((self.config.max_rows,), jnp.float32)
        self._thresholds = jax.jit(set_thresholds, donate_argnums=0).lower(state, above).compile()
        self.counters.compiles += 4

        def build(bucket: Bucket) -> tuple[Bucket, jax.stages.Compiled]:
            program = jax.jit(partial(steps, model=self.model, bucket=bucket), donate_argnums=1)
            return bucket, program.lower(params, state, self._nobody).compile()

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            waiting = [pool.submit(build, bucket) for bucket in self.buckets]
            for done, future in enumerate(as_completed(waiting), 1):
                bucket, self._steps[bucket] = future.result()
                self.counters.compiles += 1
                if progress:
                    text = f"{bucket.rows} rows, {bucket.packed} positions"
                    progress(done, len(self.buckets), text)

    def measure(self, calls: int = 3) -> None:
        """Fill ``costs``: run every bucket, full of rows whose first windows fill it, half of them masks (at most a
        block). The engine must be empty, and is empty afterwards."""
        for bucket in self.buckets:
            width = max(2, min(bucket.packed // bucket.rows, self.config.max_length))
            masks = min(width // 2, DecodeConfig.block_size)
            asked = partial(request, [0] * (width - masks), DecodeConfig(max_tokens=masks, stop_ids=()), self.model)
            seconds = []
            for _ in range(calls):
                row = asked(self.config.max_length)
                for slot in range(bucket.rows):
                    self.state = self._insert(self.state, np.int32(slot), placed(row, slot, slot, slot))
                jax.block_until_ready(self.state)
                begin = time.perf_counter()
                self.state, report = self._steps[bucket](self.params, self.state, self._nobody)
                jax.block_until_ready(report)
                seconds.append(time.perf_counter() - begin)
            self.costs.start(bucket, seconds)
            for slot in range(bucket.rows):
                self.state = self._evict(self.state, np.int32(slot))

    def check(self, prompt_ids: Sequence[int], decode: DecodeConfig) -> None:
        """Raise RequestError (naming the field) if ``insert`` would refuse this request."""
        config = self.config
        decoders.check_request(prompt_ids, decode, self.model, config.max_length, config.max_rows, len(self.adapters))

    def insert(
        self,
        slot: int,
        handle: Hashable,
        prompt_ids: Sequence[int],
        decode: DecodeConfig,
        shadow: int | None = None,
        packed: Request | None = None,
    ) -> None:
        """Put a request into a free slot; it takes part from the next ``step``. ``handle`` is not None, and no
        other request's, earlier or later: reports name the row by it. A request that needs two slots (``slots_needed``)
        takes ``shadow`` above it, by default the lowest free one there. ``packed``: what jdllm.denoise.request made of
        it once it had been checked, for who has time for that while the device works; else both is done here."""
        if packed is None:
            self.check(prompt_ids, decode)
            packed = request(prompt_ids, decode, self.model, self.config.max_length)
        if decoders.slots_needed(decode) == 1:
            shadow = slot
        elif shadow is None:
            shadow = next((other for other in self.free_slots if other > slot), None)
            if shadow is None:
                raise ValueError("guidance takes two slots, and none above this one is free")
        elif shadow <= slot:  # whichever slots take part in a call, a shadow's owner is among them
            raise ValueError("guidance takes two slots: shadow must be one above")
        for place in dict.fromkeys((slot, shadow)):
            if self._handles[place] is not None:
                raise ValueError(f"slot {place} is taken by {self._handles[place]!r}")
        asked, width = placed(packed, self._inserted, slot, shadow), first_width(packed)
        for place in dict.fromkeys((slot, shadow)):
            self.state = self._insert(self.state, np.int32(place), asked)
            self._handles[place] = handle if place == slot else _SHADOW
            self._widths[place] = self._lengths[place] = width
            self._nfes[place] = self._prefixes[place] = 0
        self._shadows[slot] = shadow
        self._inserted += 1

    def evict(self, slot: int) -> None:
        """Free a slot, finished or not, and its shadow's. Its rows no longer appear in reports."""
        if self._handles[slot] is _SHADOW:
            raise ValueError(f"slot {slot} shadows another; evict that one")
        for place in dict.fromkeys((slot, self._shadows[slot])):
            if self._widths[place] or self._shadows[slot] != slot:  # a row that has ended is no longer live anyhow
                self.state = self._evict(self.state, np.int32(place))
            self._handles[place] = None
            self._widths[place] = 0
        self._shadows[slot] = slot
        # With nobody left the report is not read soon, and its time says nothing.
        if self._call is not None and all(handle is None for handle in self._handles):
            self._call = dataclasses.replace(self._call, begin=None)

    def set_thresholds(self, above: Mapping[int, float]) -> None:
        """From the next call on these slots commit positions whose probability is strictly above this
        (jdllm.decoders.sure_above), as if they had asked for it."""
        values = np.full(self.config.max_rows, np.nan, np.float32)
        values[list(above)] = list(above.values())
        self.state = self._thresholds(self.state, values)

    def step_seconds(self, rows: int, positions: int) -> float:
        """What a denoising step of the first ``rows`` slots costs whose windows have so many positions together, as
        measured; 0 where nothing was."""
        bucket = smallest_bucket(self.buckets, rows, positions)
        return self.costs.of(bucket) / bucket.steps

    def alternatives(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """The most probable tokens, int32 [S, A], and their log-probabilities, float32 [S, A], at every position that
        the request in this slot has committed so far, in the pass that committed it, before temperature and filters;
        without the mask id and ids that stand for no token. For requests that ask for ``alternatives``. Waits for the
        call in flight."""
        ids, logprobs = self._alternatives(self.state, np.int32(slot))
        return np.asarray(ids), np.asarray(logprobs)

    def memory(self, bucket: Bucket) -> tuple[int, int]:
        """Bytes that the program of a bucket updates in place (donated), and bytes of its temporaries."""
        memory: Any = self._steps[bucket].memory_analysis()
        return memory.alias_size_in_bytes, memory.temp_size_in_bytes

    @property
    def free_slots(self) -> list[int]:
        """Slots without a request, lowest first: low slots keep the row bucket small."""
        return [slot for slot, handle in enumerate(self._handles) if handle is None]

    def step(self, hold: Callable[[list[Pass]], Collection[int]] | None = None) -> list[Row]:
        """``read`` and ``dispatch``: one call of the compiled step, and the rows of the call before it, which the
        caller uses while the device works. [] comes back once no row is live and every report has been read."""
        rows = self.read()
        self.dispatch(hold)
        return rows

    def dispatch(self, hold: Callable[[list[Pass]], Collection[int]] | None = None) -> bool:
        """Start one call of the compiled step, its bucket chosen by the last report; whether there is one, which takes
        a live row that is not held.

        Args:
            hold: told what each row would do in the new call, answers with the slots that take no part in it.
        """
        widths, held = self._widths, self._nobody
        if hold is not None and (slots := list(hold(self._passes()))):
            slots += [self._shadows[slot] for slot in slots]
            mask = np.zeros(self.config.max_rows, bool)
            mask[slots] = True
            widths, held = np.where(mask, 0, widths), jax.device_put(mask)
        bucket = choose_bucket(self.buckets, widths)
        if bucket is not None:
            self.state, (report, logprobs, committed) = self._steps[bucket](self.params, self.state, held)
            report.copy_to_host_async()
            self._call = _Call(report, logprobs, committed, tuple(self._handles), bucket, time.perf_counter())
            self.counters.calls += 1
            self.counters.steps += bucket.steps
            self.counters.computed += bucket.packed * bucket.steps
        return bucket is not None

    def _passes(self) -> list[Pass]:
        """The next pass of every row, shadows left out."""
        found = []
        for slot, handle in enumerate(self._handles):
            width, length, nfe = (int(numbers[slot]) for numbers in (self._widths, self._lengths, self._nfes))
            if width and handle is not _SHADOW:
                twice = 2 if self._shadows[slot] != slot else 1
                found.append(Pass(slot, handle, twice * width, width == length, nfe, int(self._prefixes[slot])))
        return found

    def read(self) -> list[Row]:
        """Wait for the call in flight and return its rows, those that are still what it ran; [] where there is none.
        Slots that have ended may be evicted and filled again before the next ``dispatch``."""
        call, self._call = self._call, None
        if call is None:
            return []
        rows, report = [], np.asarray(call.report)
        if call.begin is not None:
            now = time.perf_counter()
            self.last_call = Timing(call.bucket, now - call.begin, now)
            self.costs.observe(call.bucket, self.last_call.seconds)
        numbers, tokens = report[:, : len(REPORT_FIELDS)].tolist(), report[:, len(REPORT_FIELDS) :]
        for slot, values in enumerate(numbers):  # in the order of REPORT_FIELDS
            live, failed, prompt_length, length, prefix, stop, nfe, width, computed, refreshed = values
            self.counters.needed += computed
            self.counters.refreshed += refreshed
            handle = call.handles[slot]
            if handle is None or handle is _SHADOW or handle is not self._handles[slot]:
                continue
            self._widths[slot] = self._widths[self._shadows[slot]] = width
            self._lengths[slot], self._nfes[slot], self._prefixes[slot] = length, nfe, prefix
            of_row = (slot, handle, bool(live), bool(failed), prompt_length, length, prefix, stop, nfe, width)
            rows.append(Row(*of_row, tokens[slot], call))
        return rows
