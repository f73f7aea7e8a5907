"""The capacity search against edges that are known, against chance, and against queueing theory."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.arrivals import poisson
from benchmarks.capacity import Capacity, largest_rate
from benchmarks.simulator import BatchMachine, simulate
from jdllm.serving.schedulers import Slot

rates = st.floats(1e-3, 1e6)


def test_doubling_then_bisection_step_by_step():
    lines = []
    found = largest_rate(lambda rate: rate <= 5.2, first=1.0, precision=0.1, log=lines.append)
    assert found.probes == ((1, True), (2, True), (4, True), (8, False), (6, False), (5, True), (5.5, False))
    assert found.rate == 5.0 and found.failed == 5.5
    assert lines[0] == "1 requests/s: holds" and lines[-1] == "5.5 requests/s: fails" and len(lines) == 7


def test_halving_when_the_first_fails():
    found = largest_rate(lambda rate: rate <= 0.3, first=1.0, precision=1.0)
    assert found == Capacity(0.25, ((1.0, False), (0.5, False), (0.25, True)))


@given(edge=rates, first=rates, precision=st.floats(1e-6, 1))
def test_the_edge_is_found_within_the_precision(edge, first, precision):
    found = largest_rate(lambda rate: rate <= edge, first, precision)
    assert found.rate <= edge
    if found.failed is None:
        assert found.rate == edge == 1e6
    else:
        assert edge < found.failed <= (1 + precision) * found.rate
    doublings = abs(math.log2(edge / first)) + 2
    assert len(found.probes) <= doublings + math.log2(1 / precision) + 1


@given(st.integers(0, 2**32), rates, st.floats(0, 1), st.floats(0.001, 1))
def test_chance_ends_too_and_keeps_what_held_below_what_failed(seed, first, luck, precision):
    rng = random.Random(seed)
    found = largest_rate(lambda rate: rng.random() < luck, first, precision)
    held = [rate for rate, held in found.probes if held]
    failed = [rate for rate, held in found.probes if not held]
    assert found.probes[0][0] == first and all(1e-3 <= rate <= 1e6 for rate, _ in found.probes)
    assert found.rate == max(held, default=0.0) and found.failed == min(failed, default=None)
    if held and failed:
        assert found.rate < found.failed <= (1 + precision) * found.rate
    else:
        assert found.rate in (0.0, 1e6)


def test_a_slope_is_answered_by_a_point_on_it():
    """Rates up to 8 always hold, from 12 on never do; a rate that failed by luck is not asked again."""
    for seed in range(50):
        rng = random.Random(seed)
        found = largest_rate(lambda rate, rng=rng: rng.random() < (12 - rate) / 4, first=1.0)
        assert 8 / 1.05 <= found.rate < 12


def test_the_ends_are_tried_themselves():
    assert largest_rate(lambda rate: True, first=3.0, most=10.0).probes == ((3, True), (6, True), (10, True))
    assert largest_rate(lambda rate: True, first=3.0, most=3.0) == Capacity(3.0, ((3.0, True),))
    none = largest_rate(lambda rate: False, first=3.0, least=1.0)
    assert none == Capacity(0.0, ((3.0, False), (1.5, False), (1.0, False))) and none.failed == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"first": 0.0},
        {"first": -1.0},
        {"first": math.nan},
        {"first": math.inf},
        {"first": 2.0, "most": 1.0},
        {"first": 2.0, "least": 3.0},
        {"first": 2.0, "least": 0.0},
        {"first": 2.0, "most": math.inf},
        *({"first": 2.0, "precision": precision} for precision in (0.0, -0.1, 1.5, math.nan)),
    ],
)
def test_what_cannot_be_searched_is_refused(settings):
    name = "precision" if "precision" in settings else "first"
    with pytest.raises(ValueError, match=f"{name}: .* must be"):
        largest_rate(lambda rate: pytest.fail("asked"), **settings)


def test_the_capacity_of_a_queue_is_the_theorys():
    """One server that takes a second: the mean latency is 1 + rate / 2 (1 - rate) (Pollaczek and Khinchine), which is
    at most 2 up to a rate of 2/3."""

    def holds(rate: float) -> bool:
        arrivals = poisson(np.random.default_rng(0), rate, 8000).tolist()
        served = simulate(arrivals, Slot(), BatchMachine(1, iter([1.0] * len(arrivals))))
        return float(np.mean([one.latency for one in served])) <= 2.0

    assert largest_rate(holds, first=0.1, precision=0.02).rate == pytest.approx(2 / 3, rel=0.05)
