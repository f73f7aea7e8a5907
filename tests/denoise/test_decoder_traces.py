"""Every trace of every official decoder, token for token and pass for pass: alone, and all of a checkpoint's together
in one batch, shuffled, with free slots between."""

import random

import numpy as np
import pytest

from jdllm.config import EngineConfig
from jdllm.decoders import slots_needed
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine

LENGTH = 160
ALGORITHMS = ("d2f:llada", "llada_vanilla", "fast_dllm_llada", "d2f:dream", "dream_vanilla", "fast_dllm_dream")


def serve(engine: Engine, traces, slots) -> dict[str, list]:
    """Run the traces through the slots allowed, refilling them; for each trace the rows of its reports."""
    seen: dict[str, list] = {t.name: [] for t in traces}
    waiting, running = list(traces), 0
    while waiting or running:
        while waiting:
            free = [slot for slot in engine.free_slots if slot in slots]
            if len(free) < slots_needed(waiting[0].decode):
                break
            trace = waiting.pop(0)
            engine.insert(free[0], trace.name, trace.prompt, trace.decode)
            running += 1
        for row in engine.step():
            seen[row.handle].append(row)
            if not row.live:
                engine.evict(row.slot)
                running -= 1
    return seen


def check(trace, rows) -> None:
    assert not rows[-1].failed
    assert rows[-1].canvas_ids == trace.expected_ids, trace.name
    assert rows[-1].nfe == trace.nfe, trace.name
    by_pass = {row.nfe: row for row in rows if row.nfe}
    for n, snapshot in enumerate(trace.arrays["snapshots"]):
        wanted = snapshot[snapshot >= 0]
        np.testing.assert_array_equal(by_pass[n + 1].tokens[: len(wanted)], wanted, err_msg=f"{trace.name} pass {n}")


def traces_of(golden, model, adapter):
    traces = [t for algorithm in ALGORITHMS for t in golden.traces(algorithm) if t.decode.max_tokens]
    return [t for t in traces if (t.model, t.adapter) == (model, adapter)]


CHECKPOINTS = [
    ("llada-tiny", None),
    ("llada-tiny-gqa", None),
    ("llada-tiny", "llada-tiny-d2f-lora"),
    ("dream-tiny", None),
    ("dream-tiny", "dream-tiny-d2f-lora"),
]


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=lambda c: c[1] or c[0])
def served(request, golden):
    """An engine of eight slots, and the traces of its checkpoint."""
    model, adapter = request.param
    engine = Engine(golden.params(model, adapter), golden.config(model), EngineConfig(max_rows=8, max_length=LENGTH))
    engine.buckets = [Bucket(1, LENGTH), Bucket(8, 128), Bucket(8, 512)]
    engine.compile()
    return engine, traces_of(golden, model, adapter)


def test_alone(served):
    engine, traces = served
    for trace in traces:
        check(trace, serve(engine, [trace], range(8))[trace.name])


@pytest.mark.parametrize("order", [0, 1])
def test_together(served, order):
    engine, traces = served
    shuffle = random.Random(order)
    shuffle.shuffle(traces)
    slots = sorted(shuffle.sample(range(8), 5)) if order else range(8)
    compiles = engine.counters.compiles
    seen = serve(engine, traces, slots)
    for trace in traces:
        check(trace, seen[trace.name])
    assert engine.counters.compiles == compiles
