"""DiLaServe's rule: thresholds that follow the load."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.serving.schedulers import Deadline, Running, View, Waiting
from jdllm.serving.schedulers.deadline import MOST_PACES

STEP = 0.01
"""Seconds of a step, however wide."""


def flat(rows: int, positions: int) -> float:
    return STEP


def wide(rows: int, positions: int) -> float:
    return STEP * positions / 32


def row(slot: int, done: int = 0, slo: float = 1.0, threshold: float = 0.9, arrived: float = 0.0, **more) -> Running:
    request = Waiting(100 + slot, arrived, length=160, tokens=100, slo=slo, wanted=more.pop("wanted", 0.9))
    return Running(slot, request, done=done, width=32, block=32, threshold=threshold, **more)


def taught(speeds: dict[float, float], tokens: int = 100, **settings) -> Deadline:
    """A policy that has seen rows at these tokens a pass, and answers of that many tokens."""
    rule = Deadline(**settings)
    for threshold, speed in speeds.items():
        for turn in range(2):
            seen = row(0, done=round(100 * speed) * turn, passes=100 * turn, threshold=threshold, slo=math.inf)
            rule.decide(View([], 7, 8, running=[seen], seconds=flat), -100.0)
        rule.decide(View([], 8, 8, seconds=flat), -100.0)
    for key in range(8):
        ended = Running(0, Waiting(key, 0.0, tokens=tokens), done=tokens)
        rule.decide(View([], 8, 8, ended=[ended], seconds=flat), -100.0)
    return rule


SPEEDS = {0.9: 1.0, 0.8: 2.0, 0.7: 4.0}


def choices(rule: Deadline, rows: list[Running], now: float = 0.0, queue=(), seconds=flat) -> dict[int, float]:
    return dict(rule.decide(View(queue, 8 - len(rows), 8, running=rows, seconds=seconds), now).thresholds)


def test_it_learns_tokens_a_pass():
    rule = taught(SPEEDS)
    assert [rule.speed(c) for c in (0.9, 0.8, 0.7)] == pytest.approx([1.0, 2.0, 4.0], rel=0.01)
    assert rule.speed(0.75) == rule.speed(0.8) and rule.speed(0.6) == rule.speed(0.7)
    assert Deadline().speed(0.9) == 1.0


@pytest.mark.parametrize(
    ("slo", "chosen"),
    [(2.0, {}), (1.0, {}), (0.9, {0: 0.8}), (0.4, {0: 0.7}), (0.01, {0: 0.7}), (math.inf, {})],
)
def test_the_highest_threshold_that_is_in_time(slo, chosen):
    """100 tokens at one, two and four a pass of 10 ms: 1, 0.5 and 0.25 seconds."""
    assert choices(taught(SPEEDS), [row(0, slo=slo)]) == chosen


def test_a_margin_asks_for_more_time_than_is_expected():
    assert choices(taught(SPEEDS, margin=1.5), [row(0, slo=1.6)]) == {}
    assert choices(taught(SPEEDS, margin=1.5), [row(0, slo=1.4)]) == {0: 0.8}
    assert choices(taught(SPEEDS, margin=1.5), [row(0, slo=0.7)]) == {0: 0.7}


def test_time_that_has_passed_counts_and_so_does_what_is_done():
    rule = taught(SPEEDS)
    assert choices(rule, [row(0)], now=0.6) == {0: 0.7}
    assert choices(rule, [row(0, done=70)], now=0.6) == {}


def test_refreshes_are_counted_with_everyones_canvas():
    """Four refreshes of 160 positions (50 ms each) beside 96 passes of 32: the four cost as much as twenty."""
    rule, here = taught(SPEEDS), row(0, refreshes=True, blocks_left=4)
    rule.decide(View([], 7, 8, running=[here], seconds=wide), 0.0)
    assert rule.time(here, 0.9) == pytest.approx(4 * 5 * STEP + 96 * STEP, rel=0.01)
    rule.decide(View([], 6, 8, running=[here, row(1)], seconds=wide), 0.0)
    assert rule.time(here, 0.9) == pytest.approx(4 * 10 * STEP + 96 * 2 * STEP, rel=0.01)


def test_a_burst_lowers_thresholds_and_they_come_back():
    """Positions cost here: one row has time for the highest threshold, eight of them have not. Those that are furthest
    along keep what they asked for."""
    rule = taught(SPEEDS)
    calm = choices(rule, [row(0, slo=2.0)], now=0.0, seconds=wide)
    burst = choices(rule, [row(i, slo=2.0, done=10 * i) for i in range(8)], now=1.5, seconds=wide)
    after = choices(rule, [row(0, slo=2.0, threshold=0.7, arrived=3.0)], now=3.0, seconds=wide)
    assert calm == {} and burst[0] < 0.9 and after == {0: 0.9}


def test_load_control_favours_those_that_are_furthest_along():
    rule = taught(SPEEDS)
    rows = [row(i, slo=4.0, done=done) for i, done in enumerate((0, 30, 60, 90, 0, 0, 0, 0))]
    rule._price(View([], 0, 8, running=rows, seconds=wide))
    caps = rule._load_control(View([], 0, 8, running=rows, seconds=wide), 0.0)
    by_progress = [caps[100 + i] for i in (3, 2, 1, 0, 4, 5, 6, 7)]
    assert by_progress == sorted(by_progress, reverse=True) and by_progress[0] == 0.9 and by_progress[-1] == 0.7


def test_those_that_wait_weigh_on_those_that_run():
    """Eight rows have time enough for what they asked for; with a long queue behind them all together have not."""
    crowd = [row(i, slo=9.0) for i in range(8)]
    queue = [Waiting(200 + i, 0.0, length=160, tokens=100, slo=9.0, wanted=0.9) for i in range(30)]
    assert choices(taught(SPEEDS), crowd, seconds=wide) == {}
    assert set(choices(taught(SPEEDS), crowd, queue=queue, seconds=wide).values()) == {0.7}


def test_the_load_is_looked_at_from_time_to_time():
    rule, crowd = taught(SPEEDS, debounce=1.0), [row(i, slo=50.0) for i in range(8)]
    slow = lambda rows, positions: 100 * wide(rows, positions)
    choices(rule, crowd[:1], now=0.0)
    before = rule._caps
    choices(rule, crowd, now=0.5, seconds=slow)
    assert rule._caps is before
    choices(rule, crowd, now=1.0, seconds=slow)
    assert set(rule._caps.values()) == {0.7}


def test_those_that_cannot_be_saved_wait_behind_the_others_but_not_for_ever():
    rule = taught(SPEEDS, patience=10.0)
    late, good = (Waiting(i, at, tokens=100, slo=1.0, wanted=0.9) for i, at in ((1, 0.0), (2, 4.9)))
    ask = lambda now, **more: rule.decide(View([late, good], 1, 8, seconds=flat), now)
    assert ask(5.0).admit == [2]
    assert ask(11.0).admit == [1]
    full = taught(SPEEDS, shed=True).decide(View([late, good], 1, 8, seconds=flat), 5.0)
    assert full.shed == [1] and full.admit == [2]


def test_nobody_is_refused_while_a_slot_is_free():
    """Before anything was learned all requests seem too long; were they refused, nothing would ever be learned."""
    rule, request = Deadline(shed=True), Waiting(1, 0.0, tokens=512, slo=8.0, wanted=0.9)
    slow = lambda rows, positions: 0.024
    cold = rule.decide(View([request], 8, 8, seconds=slow), 0.0)
    assert (cold.admit, cold.shed) == ([1], [])
    assert rule.decide(View([request], 0, 8, seconds=slow), 0.0).shed == [1]


def test_decoders_without_a_threshold_have_a_pace_too():
    """Eight passes for 256 tokens: what such requests need is learned from them, not taken for a token a pass."""
    rule = Deadline()
    seen = row(0, done=256, passes=8, threshold=None, wanted=None)
    rule.decide(View([], 7, 8, running=[seen], seconds=flat), 0.0)
    rule.decide(View([], 8, 8, ended=[dataclasses.replace(seen, passes=9, done=288)], seconds=flat), 0.0)
    assert rule.speed(None) == pytest.approx(32, rel=0.01) and rule.speed(0.9) == 1.0
    request = Waiting(1, 0.0, tokens=256, slo=0.2, wanted=None)
    assert not rule._is_hopeless(request, View([request], 8, 8, seconds=flat), 0.0)


def test_what_clients_ask_for_does_not_pile_up():
    rule = taught(SPEEDS)
    for i in range(1000):
        seen = row(0, done=10, passes=10, threshold=0.9 + i / 20_000, slo=math.inf)
        rule.decide(View([], 7, 8, running=[seen], seconds=flat), 0.0)
        rule.decide(View([], 8, 8, seconds=flat), 0.0)
    assert len(rule._paces) <= MOST_PACES + len(rule.candidates)
    assert rule.speed(0.8) == pytest.approx(2.0, rel=0.01) and rule.speed(0.7) == pytest.approx(4.0, rel=0.01)


def test_rows_without_thresholds_or_targets_are_left_alone():
    other = row(0, slo=0.01, threshold=None, wanted=None)
    assert choices(taught(SPEEDS), [other, row(1, slo=math.inf)]) == {}


def test_short_answers_are_learned_from_their_ends():
    """A request that is over before it was ever seen in its slot: three passes, nothing settled before the last."""
    rule = Deadline(shed=True)
    for key in range(100):
        ended = Running(0, Waiting(key, 0.0, tokens=96, wanted=0.9), done=6, passes=3, threshold=0.9)
        rule.decide(View([], 8, 8, ended=[ended], seconds=flat), 0.0)
    assert rule.speed(0.9) == pytest.approx(2.0)
    newcomer = Waiting(1000, 0.0, tokens=100, slo=10.0, wanted=0.9)
    assert rule.decide(View([newcomer], 8, 8, seconds=flat), 0.0).admit == [1000]


def test_clients_that_leave_teach_nothing_about_lengths():
    rule = taught(SPEEDS, tokens=80)
    for key in range(60):
        rule.decide(View([], 7, 8, running=[row(key, done=4, passes=4)], seconds=flat), 0.0)
        rule.decide(View([], 8, 8, seconds=flat), 0.0)
    assert rule.passes(Waiting(0, 0.0, tokens=100), 0, 0.9) == pytest.approx(80, rel=0.01)


def test_an_answer_that_is_longer_than_usual_is_not_thought_to_be_at_its_end():
    rule = taught(SPEEDS, tokens=24)
    assert rule.passes(Waiting(0, 0.0, tokens=100), 20, 0.9) == pytest.approx(4, rel=0.01)
    assert rule.passes(Waiting(0, 0.0, tokens=100), 40, 0.9) == pytest.approx(30, rel=0.01)


def test_those_that_wait_are_judged_by_their_own_thresholds():
    """A row that asked for 0.5 beside a newcomer that asked for 0.9: with all the time of the world both get it."""
    rule = taught(SPEEDS, debounce=0.0)
    low, new = row(0, slo=60.0, threshold=0.5, wanted=0.5), Waiting(300, 0.0, 1, 160, 100, 60.0, wanted=0.9)
    rule.decide(View([new], 7, 8, running=[low], seconds=flat), 0.0)
    joined = Running(1, new, width=32, block=32, threshold=0.9)
    assert choices(rule, [low, joined]) == {}


def test_requests_that_say_nothing_get_the_policys_slo():
    assert choices(taught(SPEEDS, slo=0.4), [row(0, slo=math.inf)]) == {0: 0.7}


def test_own_thresholds_are_never_raised():
    asked = row(0, slo=9.0, threshold=0.75, wanted=0.75)
    assert choices(taught(SPEEDS), [asked]) == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"slo": -1}, "slo"),
        ({"thresholds": "low"}, "thresholds"),
        ({"thresholds": "0.8/1.5"}, "thresholds"),
        ({"debounce": True}, "debounce"),
        ({"shed": 1}, "shed"),
        ({"margin": 0.5}, "margin"),
    ],
)
def test_settings_out_of_range(settings, named):
    with pytest.raises(ValueError, match=named):
        Deadline(**settings)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.floats(0.001, 20), st.booleans()), max_size=8),
    st.lists(st.floats(0.001, 20), max_size=4),
    st.floats(0, 30),
)
def test_whatever_comes_thresholds_are_candidates_and_everyone_is_accounted_for(rows, queue, now):
    rule = taught(SPEEDS)
    live = [row(i, done=done, slo=slo, refreshes=refreshes) for i, (done, slo, refreshes) in enumerate(rows)]
    waiting = [Waiting(i, 0.0, tokens=100, slo=slo, wanted=0.9) for i, slo in enumerate(queue)]
    actions = rule.decide(View(waiting, 8 - len(live), 8, running=live, seconds=wide), now)
    assert set(actions.thresholds.values()) <= {0.8, 0.7} and set(actions.thresholds) <= {r.key for r in live}
    assert len(actions.admit) == min(len(waiting), 8 - len(live)) and not actions.shed
