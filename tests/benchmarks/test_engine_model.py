"""The simulated engine: what a request gets, and what every policy must keep whatever comes."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.arrivals import burst
from benchmarks.engine_model import Machine, Step, StuckError, Work, simulate
from jdllm.serving.schedulers import Slot, parse

STEP = 0.01
POLICIES = (
    "slot",
    "per-request",
    "fixed-fill,size=3,timeout=1",
    "fixed-fill,size=3,timeout=1,sealed=true",
    "block",
    "block,budget=64,patience=2",
    "block,sort=false",
    "deficit,budget=40",
    "deficit,budget=40,order=fewest_remaining_blocks",
    "deadline,slo=0.3,thresholds=0.6/0.3,debounce=0.05,patience=0.05",
    "exclusive,theta=0.5",
    "exclusive,theta=auto,mode=auto",
    "exclusive,mode=mixed",
)


def flat(rows: int, positions: int) -> float:
    return STEP


def work(passes: int, block: int = 4, prompt: int = 8, dual: bool = True) -> Work:
    """A token a pass; with ``dual``, blocks that begin with a refresh and go on in a window of their own. At lower
    thresholds two and four tokens a pass."""
    tokens = passes

    def trace(speed: int) -> list[Step]:
        steps = []
        for done in range(0, tokens, speed):
            begins = done // block != (done - speed) // block
            width = prompt + tokens if begins else block
            steps.append(Step(width if dual else prompt + tokens, begins if dual else True, min(tokens, done + speed)))
        return steps

    return Work(prompt + tokens, tokens, block, {0.9: trace(1), 0.6: trace(2), 0.3: trace(4)}, dual)


def test_a_request_alone_takes_its_passes():
    [one] = simulate([1.0], [work(5)], Slot(), Machine(2, flat, gap=0.001, outside=0.01))
    assert one.latency == pytest.approx(0.01 + 5 * (STEP + 0.001)) and one.passes == 5 and one.done == 5
    assert one.first == pytest.approx(1.005 + STEP + 0.001)


def test_rows_share_steps_and_slots_are_filled_at_once():
    """Three requests, two slots: 4 and 6 passes together, then the third joins in the fifth step."""
    out = simulate([0.0] * 3, [work(4), work(6), work(3)], Slot(), Machine(2, flat))
    assert [one.ended for one in out] == pytest.approx([4 * STEP, 6 * STEP, 7 * STEP])


def test_steps_cost_what_their_positions_cost():
    machine = Machine(4, lambda rows, positions: positions * 1e-3)
    [one] = simulate([0.0], [work(4, block=4, prompt=8)], Slot(), machine)
    assert one.latency == pytest.approx((12 + 3 * 4) * 1e-3)


def test_one_row_a_step():
    out = simulate([0.0] * 3, [work(4)] * 3, parse("per-request"), Machine(4, flat))
    assert max(one.ended for one in out) == pytest.approx(12 * STEP)


def test_batches_wait_for_their_longest():
    out = simulate(
        [0.0] * 4, [work(2), work(9), work(2), work(2)], parse("fixed-fill,size=2,timeout=0"), Machine(4, flat)
    )
    assert [one.started for one in out] == pytest.approx([0, 0, 9 * STEP, 9 * STEP])


def test_block_cycles_refill_while_others_go_on():
    """The same four: the third joins after the first block of the second, not after its last."""
    out = simulate([0.0] * 4, [work(2), work(9), work(2), work(2)], parse("block,sort=false"), Machine(2, flat))
    assert [one.started for one in out] == pytest.approx([0, 0, 4 * STEP, 8 * STEP])


def test_a_deadline_makes_rows_quick_and_only_then():
    tight, loose = (dataclasses.replace(work(40), slo=slo) for slo in (0.2, 9.0))
    rule = "deadline,thresholds=0.6/0.3"
    [quick] = simulate([0.0], [tight], parse(rule), Machine(2, flat))
    [slow] = simulate([0.0], [loose], parse(rule), Machine(2, flat))
    assert quick.latency <= 0.2 + 1e-9 and slow.passes == 40 and quick.done == slow.done == 40


def test_a_burst_keeps_more_requests_in_time_and_everything_goes_back():
    """papers.md 5: twice the load for a while. Thresholds that follow it keep more requests within their SLO than the
    fixed one, and those that come when it is over decode as they asked."""
    slots, passes, count = 8, 24, 240
    rate = 0.7 * slots / (passes * STEP)
    length = count / rate
    times = burst(np.random.default_rng(0), rate, 2.0, length / 4, length / 2, count)
    works = [dataclasses.replace(work(passes), slo=2.5 * passes * STEP)] * count
    machine = Machine(slots, flat)
    fixed = simulate(times, works, Slot(), machine)
    follows = simulate(times, works, parse("deadline,thresholds=0.6/0.3,debounce=0.05"), machine)
    within = lambda out: sum(one.latency <= works[0].slo + 1e-9 for one in out) / count
    assert within(follows) > within(fixed) + 0.15 and within(follows) > 0.95
    quick = [one for one in follows if one.passes < passes]
    after = [one for one in follows if one.arrived > 0.75 * length]
    assert len(quick) > count / 10 and all(one.passes == passes for one in after[len(after) // 2 :])


def test_block_cycles_fill_the_box_that_synchronized_batches_leave_empty():
    """papers.md 2: with and without refill at the same slots, answers of unlike lengths."""
    rng = np.random.default_rng(1)
    works = [work(int(n)) for n in rng.choice([4, 8, 64], 64, p=[0.4, 0.4, 0.2])]
    machine = Machine(8, flat)
    most = lambda text: max(one.ended for one in simulate([0.0] * 64, works, parse(text), machine))
    useful = sum(one.tokens for one in works) / 8 * STEP  # every slot busy in every step
    assert most("fixed-fill,size=8,timeout=0") > 1.9 * most("block") and most("block") < 2 * useful


def test_no_policy_gives_up_on_a_wait_without_end():
    with pytest.raises(StuckError):
        simulate([0.0], [work(2)], parse("fixed-fill,size=2,timeout=none"), Machine(2, flat))


def test_decoding_rows_never_stall_longer_than_the_budget_allows():
    """Under Sangam's rule no step in which a row decodes has more positions than the budget and the credit saved."""
    widths = []
    rule = parse("deficit,budget=24")

    def seconds(rows: int, positions: int) -> float:
        widths.append((positions, credit[0]))
        return STEP

    credit, hold = [0], rule.hold

    def watched(passes):
        credit[0] = rule.credit
        going = [one for one in passes if not one.refresh]
        held = hold(passes)
        decoding.append(bool(going))
        return held

    decoding: list[bool] = []
    rule.hold = watched
    simulate([0.0] * 12, [work(9, prompt=n) for n in range(4, 16)], rule, Machine(4, seconds))
    stalls = [(wide, saved) for (wide, saved), some in zip(widths, decoding, strict=True) if some]
    assert stalls and all(wide <= max(24 + saved, 16) for wide, saved in stalls)


requests = st.lists(
    st.tuples(
        st.floats(0, 0.5),  # seconds after the one before
        st.integers(1, 12),  # passes
        st.integers(1, 20),  # prompt
        st.one_of(st.just(math.inf), st.floats(0.001, 2)),  # SLO
        st.booleans(),  # refreshes
        st.one_of(st.none(), st.floats(0, 1)),  # the client leaves so much later
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("text", POLICIES)
@settings(max_examples=60, deadline=None)
@given(requests, st.integers(1, 5), st.one_of(st.just(math.inf), st.integers(30, 90)))
def test_whatever_comes(text, asked, slots, room):
    """Each request that stays is served once, with all its tokens; slots and memory are never exceeded, but by one
    that is too large for any server; nothing moves before it came; and the policy never stops the server."""
    arrivals = np.cumsum([one[0] for one in asked]).tolist()
    works = [
        dataclasses.replace(work(passes, prompt=prompt, dual=dual), slo=slo)
        for _, passes, prompt, slo, dual, _ in asked
    ]
    leaving = {i: arrivals[i] + one[5] for i, one in enumerate(asked) if one[5] is not None}
    out = simulate(arrivals, works, parse(text), Machine(slots, flat, room=room), leaving)
    served = {one.key: one for one in out}
    assert len(served) == len(out) and served.keys() | leaving.keys() == set(range(len(asked)))
    for key, one in served.items():
        assert one.arrived <= one.started < one.first <= one.ended and one.done == works[key].tokens
        assert one.passes <= works[key].tokens
    for moment in {one.started for one in out}:
        inside = [one for one in out if one.started <= moment < one.ended - 1e-12]
        assert len(inside) <= slots
        assert sum(works[one.key].length for one in inside) <= room or len(inside) == 1


@pytest.mark.parametrize("text", POLICIES)
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 6), min_size=80, max_size=80), st.integers(1, 3))
def test_nobody_waits_while_others_pass_for_ever(text, passes, others, slots):
    """A long request behind a queue of short ones, of which more keep coming than the slots can take: the number of
    those that came later and ended earlier has a bound."""
    arrivals = [*(0.0 for _ in range(10)), 0.001, *(0.004 * i for i in range(1, 71))]
    short = [work(n, prompt=1) for n in others]
    works = [*short[:10], dataclasses.replace(work(passes, prompt=30), slo=0.01), *short[10:]]
    out = {one.key: one for one in simulate(arrivals, works, parse(text), Machine(slots, flat))}
    passed = sum(one.ended < out[10].ended for key, one in out.items() if key > 10)
    # While it runs others may come and go in the slots beside it. In the queue, block lets 16 cycles pass (2 in one
    # case), deadline five passes, in which a slot ends a request a pass at most; the others nobody.
    beside = (slots - 1) * 12 * passes
    allowed = 17 * slots if text.startswith("block") else 6 * slots if text.startswith("deadline") else 0
    assert passed <= beside + allowed and out[10].done == passes
    if slots == 1 and not text.startswith(("block", "deadline")):
        assert passed == 0


def test_an_answer_may_be_shorter_at_a_lower_threshold():
    """A row that is further than the whole answer would have been at the threshold that it gets now."""
    long, brief = ([Step(4, False, i) for i in range(1, n + 1)] for n in (20, 5))
    works = [Work(24, 20, 4, {0.9: long, 0.5: brief}, slo=0.15)] * 4
    out = simulate([0.0] * 4, works, parse("deadline,thresholds=0.5,debounce=0"), Machine(2, flat))
    assert len(out) == 4 and all(one.passes <= 20 for one in out)
