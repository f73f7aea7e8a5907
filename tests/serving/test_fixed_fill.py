"""When batches start, and what the timer must be."""

import math

import pytest

from jdllm.serving.schedulers import FixedFill, Slot, View, Waiting
from jdllm.serving.schedulers.fixed_fill import AUTO, cycle, shortest_timeout, timeout_for_stability

SERVICE, SIZE = 8.74, 8
MEASURED = 8.738207
RATES = {rho: rho * SIZE / SERVICE for rho in (0.3, 0.5, 0.7, 0.85, 0.95)}


def view(*arrived: float, free: int = 8, **numbers: float) -> View:
    return View([Waiting(i, at) for i, at in enumerate(arrived)], free, 8, **numbers)


@pytest.mark.parametrize(("rho", "printed"), [(0.3, 5.1), (0.5, 6.6), (0.7, 7.2), (0.85, 7.5), (0.95, 7.6)])
def test_the_papers_shortest_timeout(rho, printed):
    assert abs(shortest_timeout(SERVICE, RATES[rho]) - printed) <= 0.05
    assert shortest_timeout(1.0, 0.1) == 0.0


@pytest.mark.parametrize(
    ("rho", "stable", "relaxed"), [(0.3, 5.10, 5.56), (0.5, 6.59, 7.07), (0.7, 7.51, 8.12), (0.85, 8.57, 9.62)]
)
def test_what_stability_needs_is_more(rho, stable, relaxed):
    assert timeout_for_stability(SERVICE, SIZE, RATES[rho]) == pytest.approx(stable, abs=0.006)
    assert timeout_for_stability(SERVICE, SIZE, RATES[rho], 0.95) == pytest.approx(relaxed, abs=0.006)
    assert cycle(stable, SIZE, RATES[rho]) == pytest.approx(SERVICE, abs=0.01)


def test_no_timer_helps_a_server_that_is_too_busy():
    assert timeout_for_stability(SERVICE, SIZE, RATES[0.95]) == pytest.approx(10.38, abs=0.01)
    with pytest.raises(ValueError, match="rate"):
        timeout_for_stability(SERVICE, SIZE, RATES[0.95], 0.95)
    assert cycle(math.inf, SIZE, 2.0) == 4.0


def test_a_batch_starts_when_it_is_full_and_nothing_runs():
    policy = FixedFill(3, None)
    assert policy.decide(view(0, 1, 2, 3), 5.0).admit == [0, 1, 2]
    assert policy.decide(view(0, 1), 500.0).admit == () and policy.decide(view(0, 1), 500.0).wake == math.inf
    assert policy.decide(view(0, 1, 2, free=7), 5.0).admit == ()


def test_the_timer_starts_with_the_oldest():
    policy = FixedFill(3, 10.0)
    waits = policy.decide(view(2.0, 4.0), 11.0)
    assert waits.admit == () and waits.wake == 12.0
    assert policy.decide(view(2.0, 4.0), 12.0).admit == [0, 1]
    assert policy.decide(view(2.0, 4.0, free=1), 99.0).admit == ()


def test_sealed_batches_take_nobody_who_came_later():
    late = view(0.0, 3.0, 11.0)
    assert FixedFill(3, 10.0, sealed=True).decide(late, 20.0).admit == [0, 1]
    assert FixedFill(3, 10.0).decide(late, 20.0).admit == [0, 1, 2]


def test_the_timer_follows_what_is_measured():
    policy = FixedFill(4, AUTO)
    assert policy.decide(view(0.0, rate=0.5, batch=5.0), 1.0).wake == 3.0
    assert policy.decide(view(0.0), 0.0).admit == [0]  # nothing is known yet: nobody waits


@pytest.mark.parametrize("wrong", [dict(size=0), dict(size=1, timeout=-1.0), dict(size=1, timeout="soon")])
def test_bad_settings_are_named(wrong):
    with pytest.raises(ValueError, match="size" if wrong["size"] == 0 else "timeout"):
        FixedFill(**wrong)


def test_slots_are_filled_from_the_head_and_nobody_passes():
    waiting = [Waiting(5, 0.0), Waiting(6, 1.0, slots=2), Waiting(7, 2.0)]
    assert Slot().decide(View(waiting, 2, 4), 3.0).admit == [5]
    assert Slot().decide(View(waiting, 4, 4), 3.0).admit == [5, 6, 7]
    assert Slot().decide(View([Waiting(1, 0.0, slots=2)], 1, 1), 0.0).admit == [1]  # refused by name in the engine
