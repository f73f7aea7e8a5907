"""Every LLaDA D2F trace of the official code, token for token and pass for pass: tokens, number of passes, the canvas
after every pass, cache lengths, positions written, masks left a block; alone and in one batch of unlike rows."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from jdllm.config import EngineConfig
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine

LENGTH = 160
MODELS = [("llada-tiny", "llada-tiny-d2f-lora"), ("llada-tiny", None), ("llada-tiny-gqa", "llada-tiny-gqa-lora")]
MODELS.append(("llada-tiny-gqa", None))


def engine_for(golden, model: str, adapter: str | None, rows: int, buckets: Sequence[Bucket] | None = None) -> Engine:
    engine = Engine(golden.params(model, adapter), golden.config(model), EngineConfig(max_rows=rows, max_length=LENGTH))
    engine.buckets = list(buckets or engine.buckets)
    engine.compile()
    return engine


def serve(engine: Engine, traces, slots: Sequence[int]) -> dict[str, list]:
    """Run the traces through the given slots, refilling them; for each trace the rows of its reports."""
    seen: dict[str, list] = {t.name: [] for t in traces}
    waiting, free = list(traces), list(slots)
    while waiting or len(free) < len(slots):
        while waiting and free:
            trace = waiting.pop(0)
            engine.insert(free.pop(0), trace.name, trace.prompt, trace.decode)
        for row in engine.step():
            seen[row.handle].append(row)
            if not row.live:
                engine.evict(row.slot)
                free.append(row.slot)
    return seen


def with_tokens(traces):
    """The trace in which no block fits makes no pass: nothing enters an engine."""
    return [t for t in traces if t.decode.max_tokens]


def check(trace, rows) -> None:
    a, P, B = trace.arrays, len(trace.prompt), trace.decode.block_size
    assert rows[-1].canvas_ids == trace.expected_ids
    assert rows[-1].nfe == trace.nfe
    waited = [row for row in rows if row.nfe]
    by_pass = {row.nfe: row for row in waited}
    for n in range(trace.nfe):
        row = by_pass[n + 1]
        end = int(a["input_start"][n] + a["input_length"][n])
        np.testing.assert_array_equal(row.tokens[:end], a["snapshots"][n][:end], err_msg=f"{trace.name} pass {n}")
        masks = [int((row.tokens[s : s + B] == 370).sum()) for s in range(P, end, B)]
        assert masks == a["block_masks_left"][n][1 : 1 + len(masks)].tolist()


@pytest.mark.parametrize(("model", "adapter"), MODELS)
def test_alone(golden, model, adapter):
    """One slot, one bucket; cache lengths are read from the state between passes."""
    traces = [t for t in with_tokens(golden.d2f()) if (t.model, t.adapter) == (model, adapter)]
    engine = engine_for(golden, model, adapter, 1, [Bucket(1, LENGTH)])
    assert traces
    for trace in traces:
        engine.insert(0, trace.name, trace.prompt, trace.decode)
        rows, a = [], trace.arrays
        for n in range(trace.nfe):
            cached, length, settled = (
                int(getattr(engine.state.rows, name)[0]) for name in ("start", "length", "settled")
            )
            assert (cached, length - cached, settled - cached) == (
                a["cache_length"][n],
                a["input_length"][n],
                a["kv_written"][n],
            )
            rows += engine.step()
        rows += engine.step()
        check(trace, rows)
        engine.evict(0)


@pytest.fixture(scope="session")
def full_engine(golden):
    """Sixteen slots with the buckets that a user gets."""
    return engine_for(golden, "llada-tiny", "llada-tiny-d2f-lora", 16)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_together(golden, full_engine, order):
    """All of a model's traces share sixteen slots, in several orders, with free slots between."""
    traces = [t for t in with_tokens(golden.d2f()) if t.adapter == "llada-tiny-d2f-lora"]
    shuffle = random.Random(order)
    slots = list(range(16)) if order == 0 else sorted(shuffle.sample(range(16), 5))
    if order:
        shuffle.shuffle(traces)
    compiles = full_engine.counters.compiles
    seen = serve(full_engine, traces, slots)
    for trace in traces:
        check(trace, seen[trace.name])
    assert full_engine.counters.compiles == compiles


def test_positions_computed_are_at_most_a_fifth_more_than_needed(golden, full_engine):
    """Sixteen unlike rows as one batch: packed windows waste little where a padded [B, T] would waste most."""
    traces = [t for t in with_tokens(golden.d2f()) if t.adapter == "llada-tiny-d2f-lora"][:16]
    before = (full_engine.counters.computed, full_engine.counters.needed)
    serve(full_engine, traces, range(16))
    computed, needed = full_engine.counters.computed - before[0], full_engine.counters.needed - before[1]
    assert needed == sum(int(t.arrays["input_length"].sum()) for t in traces)
    assert computed <= 1.2 * needed


def test_several_steps_a_dispatch(golden):
    traces = [t for t in with_tokens(golden.d2f()) if t.adapter == "llada-tiny-d2f-lora"]
    engine = engine_for(golden, "llada-tiny", "llada-tiny-d2f-lora", 4, [Bucket(4, 256, steps=4)])
    seen = serve(engine, traces, range(4))
    for trace in traces:
        assert (seen[trace.name][-1].canvas_ids, seen[trace.name][-1].nfe) == (trace.expected_ids, trace.nfe)
    assert engine.counters.calls < sum(t.nfe for t in traces) / 4
