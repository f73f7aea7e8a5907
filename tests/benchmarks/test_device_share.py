"""Interval unions, and that both profilers are read at all."""

import jax
import jax.numpy as jnp
import pytest
import torch

from benchmarks import tables
from benchmarks.device_share import (
    _torch_intervals,
    busy_share,
    jax_busy_seconds,
    torch_busy_seconds,
    trace_jax,
    union,
)


@pytest.mark.parametrize(
    "intervals, length",
    [
        ([], 0),
        ([(2, 5)], 3),
        ([(0, 1), (3, 4)], 2),
        ([(3, 6), (0, 4)], 6),  # overlapping, out of order
        ([(0, 10), (2, 3), (4, 12)], 12),  # nested
        ([(0, 1), (1, 2), (0, 1)], 2),  # touching, repeated
    ],
)
def test_union(intervals, length):
    assert union(intervals) == length


def test_operations_are_found():
    x = jnp.ones((64, 64))
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    assert jax_busy_seconds(lambda: multiply(x, x).block_until_ready()) > 0
    assert torch_busy_seconds(lambda: torch.ones(64, 64) @ torch.ones(64, 64)) > 0


def test_of_pytorch_operators_those_that_compute_count():
    class Event:
        def __init__(self, name: str, start: float, end: float, own: float):
            self.name, self.time_range, self.self_cpu_time_total = (
                name,
                torch.autograd.profiler_util.Interval(start, end),
                own,
            )

    events = [
        Event("aten::linear", 0, 100, 3),  # waits for mm
        Event("aten::t", 0, 2, 2),
        Event("aten::mm", 10, 90, 79),
        Event("aten::resolve_conj", 10, 11, 1),
        Event("aten::add", 110, 112, 2),
    ]
    assert list(_torch_intervals(events)) == [(10, 90), (110, 112)]


def test_a_loop_is_counted_by_what_runs_inside_it():
    run = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y @ x, x))
    x = jnp.ones((64, 64))
    run(x).block_until_ready()
    assert jax_busy_seconds(lambda: run(x).block_until_ready()) > 0


def test_launches_are_counted_one_by_one():
    step, x = jax.jit(lambda x: jnp.sin(x) @ x), jnp.ones((8, 8))
    run = lambda: [step(step(x)).block_until_ready(), (x + 1).block_until_ready()]
    run()
    assert trace_jax(run).launched == 3


def test_a_share_is_of_the_middle_run_and_may_be_too_much():
    seconds = iter([0.5, 9.0, 1.2])
    share = busy_share(lambda: next(seconds), wall=1.0)
    assert share == 1.2 and tables.busy(share) == "100 %" and tables.busy(None) is None
    assert busy_share(lambda: 0.0, wall=1.0) is None
