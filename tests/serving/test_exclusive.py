"""Refreshes and decoding apart: who steps, and how many should gather."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.serving.schedulers.exclusive import Exclusive, best_share, gain
from jdllm.serving.schedulers.view import Pass, Running, View, Waiting


def rows(due: int, decoding: int) -> list[Pass]:
    return [Pass(key, 8, refresh=key < due) for key in range(due + decoding)]


def test_refreshes_gather_then_run_together():
    rule = Exclusive(0.5)
    assert rule.hold(rows(1, 3)) == [0]
    assert rule.hold(rows(2, 2)) == [2, 3]
    assert rule.hold(rows(3, 1)) == [0, 1, 2]  # those that decode come between
    assert rule.hold(rows(3, 1)) == [3]
    assert rule.hold(rows(0, 4)) == [] and not rule.refreshing
    assert rule.hold(rows(1, 3)) == [0]


def test_nobody_waits_for_others_that_are_not_there():
    assert Exclusive(1.0).hold(rows(2, 0)) == []
    assert Exclusive(0.0).hold(rows(1, 7)) == [1, 2, 3, 4, 5, 6, 7]


def test_rows_that_refresh_in_every_pass_keep_nobody_waiting():
    rule = Exclusive(0.3)
    assert sum(0 in rule.hold(rows(3, 1)[::-1]) for _ in range(20)) == 10
    decoded = sum(3 not in rule.hold(rows(3, 1)) for _ in range(20))
    assert decoded == 10


@given(st.floats(0, 1), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_the_two_never_share_a_step_and_somebody_steps(theta, states):
    rule = Exclusive(theta)
    for due, decoding in states:
        passes = rows(due, decoding)
        if passes:
            held = set(rule.hold(passes))
            stepping = [one for one in passes if one.key not in held]
            assert stepping and len({one.refresh for one in stepping}) == 1


@given(st.floats(0, 1), st.integers(1, 8), st.integers(1, 9))
def test_a_refresh_waits_no_longer_than_the_others_decode(theta, count, block):
    """No arrivals: when every row has decoded its block, all are due, and go."""
    rule, left = Exclusive(theta), [0, *([block] * (count - 1))]
    for _ in range(count * block + 1):
        passes = [Pass(key, 8, refresh=not steps) for key, steps in enumerate(left)]
        held = set(rule.hold(passes))
        if any(not steps and key not in held for key, steps in enumerate(left)):
            return
        left = [max(0, steps - (key not in held)) for key, steps in enumerate(left)]
    raise AssertionError("it never ran")


def test_the_best_share():
    assert best_share(1.0) == pytest.approx(0.68216, abs=1e-5)
    assert best_share(0.0) == pytest.approx(0.0, abs=1e-5)
    for cost in (0.01, 0.3, 2.0, 20.0):
        theta = best_share(cost)
        assert theta / (1 - theta) + math.log(1 - theta) == pytest.approx(cost, rel=1e-6)
    with pytest.raises(ValueError, match="cost"):
        best_share(-1)


def best_count(rows: int, p: float, refresh: float, step: float, per_row: float = 0.0) -> int:
    """The paper: how many of ``rows`` rows should gather: the least k with k tau(N - k) - sum of tau(j),
    j = N - k + 1..N, at least a_p, where tau(j) = (a_d + b_d j) / (1 - (1 - p)^j) is the time until one of j rows comes
    to its refresh. All, if none does.

    Args:
        p: probability of a row to come to its refresh in a step.
        refresh: a_p, seconds that a step of refreshes costs beside its positions.
        step, per_row: a_d and b_d, seconds of a decoding step.
    """
    until = lambda j: (step + per_row * j) / (1 - (1 - p) ** j)
    spent = 0.0
    for k in range(1, rows):
        spent += until(rows - k + 1)
        if k * until(rows - k) - spent >= refresh:
            return k
    return rows


@pytest.mark.parametrize("cost", [0.2, 1.0, 3.0])
def test_counting_rows_comes_to_the_same_share_when_there_are_many(cost):
    rows, p, step = 4000, 1e-5, 1.0  # so rare that rarely two come in one step
    refresh = cost * step / -math.log(1 - p)
    assert best_count(rows, p, refresh, step) / rows == pytest.approx(best_share(cost), abs=0.02)
    assert best_count(4, 0.1, 1e9, 1.0) == 4 and best_count(4, 0.1, 0.0, 1.0) == 1


def test_mixing_wins_unless_positions_cost_more_in_mixed_steps():
    """With one cost for all steps it is cheaper to wait for nobody; where mixed steps are dearer the gain turns."""
    numbers = {"rows": 16, "theta": 0.5, "step": 1e-3, "position": 1e-6, "wide": 200, "narrow": 8, "between": 9}
    assert gain(mixed=1e-6, **numbers) < 0 < gain(mixed=1e-4, **numbers)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("interference", "mixed"), [(0.0, True), (200.0, False)])
def test_auto_takes_what_costs_less(interference, mixed, before):
    rule = Exclusive(0.5, "auto", interference)
    rule.mixed = before
    view = View([], 0, 8, running=[Running(key, Waiting(key, 0.0, length=200)) for key in range(8)], seconds=cost)
    for step in range(300):
        rule.decide(view, float(step))
        rule.hold(rows(*((2, 6) if step % 5 == 0 else (0, 8))))
    assert rule.mixed is mixed


def test_theta_by_itself_follows_how_rare_refreshes_are():
    often, rarely = Exclusive("auto"), Exclusive("auto")
    for step in range(500):
        often.hold(rows(4, 4))
        rarely.hold(rows(*((8, 0) if step % 50 == 0 else (0, 8))))
    assert 0 < rarely._share() < often._share() < 1


def cost(rows: int, positions: int) -> float:
    return 1e-3 + 1e-6 * positions


@pytest.mark.parametrize(
    ("settings", "named"), [({"theta": 2}, "theta"), ({"mode": "both"}, "mode"), ({"interference": -1}, "interference")]
)
def test_settings_out_of_range(settings, named):
    with pytest.raises(ValueError, match=named):
        Exclusive(**settings)
