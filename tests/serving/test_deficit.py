"""Sangam's rule: vectors of a re-implementation, and what must hold whatever comes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.serving.schedulers.deficit import ORDERS, PAGE, Deficit
from jdllm.serving.schedulers.view import Pass

BUDGET, BLOCK = 1024, 32


def queue(*widths: int) -> list[Pass]:
    return [Pass(key, width, refresh=True, arrived=key) for key, width in enumerate(widths)]


@pytest.mark.parametrize(
    ("rows", "lengths", "before", "pages", "admitted", "after"),
    [
        (0, [3000, 100], 0, math.inf, [0], 0),  # idle: an oversized one goes first, alone
        (20, [2000], 1920, math.inf, [0], 304),  # the sixth iteration of banking
        (20, [2000, 10], 0, math.inf, [], 384),  # a small one behind a big one waits
        (20, [], 1500, math.inf, [], 0),  # nobody waits: the credit is gone
        (40, [64], 500, math.inf, [0], 180),  # decoding is over the budget, the credit covers it
        (40, [64], 100, math.inf, [], 0),  # and drains
        (20, [2000], 1800, 100, [], 1800),  # short of memory: nothing spent, nothing saved
        (20, [2000, 100], 1800, 126, [0], 184),  # after spending
    ],
)
def test_vectors(rows, lengths, before, pages, admitted, after):
    rule = Deficit(BUDGET)
    rule.credit = before
    assert rule.collect(queue(*lengths), rows * BLOCK, pages) == admitted
    assert rule.credit == after


def test_credit_is_saved_until_the_head_can_pay():
    rule = Deficit(BUDGET)
    credits = []
    for _ in range(5):
        assert rule.collect(queue(2000), 20 * BLOCK, math.inf) == []
        credits.append(rule.credit)
    assert credits == [384, 768, 1152, 1536, 1920]
    assert rule.collect(queue(2000), 20 * BLOCK, math.inf) == [0]


@pytest.mark.parametrize(("rows", "iterations"), [(31, 64), (24, 8), (16, 4)])
def test_how_long_a_wide_refresh_waits_behind_decoding_rows(rows, iterations):
    rule, count = Deficit(BUDGET), 1
    while not rule.collect(queue(2048), rows * BLOCK, math.inf):
        count += 1
    assert count == iterations


def test_with_a_full_batch_nothing_is_admitted_until_rows_end():
    rule = Deficit(BUDGET)
    assert not any(rule.collect(queue(64), 32 * BLOCK, math.inf) for _ in range(1000))
    assert rule.credit == 0


def test_orders():
    old = Pass(7, 400, True, arrived=1.0, blocks_left=3)
    new = Pass(2, 400, True, arrived=2.0, blocks_left=1)
    assert Deficit(BUDGET).collect([new, old], 100, math.inf) == [7, 2]
    assert Deficit(BUDGET, "fewest_remaining_blocks").collect([old, new], 100, math.inf) == [2, 7]
    with pytest.raises(ValueError, match="order"):
        Deficit(BUDGET, "random")


refreshes = st.builds(
    Pass,
    key=st.integers(0, 10**6),
    width=st.integers(1, 4096),
    refresh=st.just(True),
    arrived=st.floats(0, 100, allow_nan=False),
    blocks_left=st.integers(1, 9),
)


@given(
    st.lists(
        st.tuples(
            st.lists(refreshes, max_size=6, unique_by=lambda r: r.key),
            st.integers(0, 60),
            st.one_of(st.just(math.inf), st.integers(0, 600)),
        ),
        max_size=12,
    ),
    st.sampled_from(sorted(ORDERS)),
)
def test_budget_order_and_memory_hold(iterations, order):
    """Over any stretch in which somebody waits, no more positions run than the budget gave, but for one refresh on an
    idle server; those admitted are the first of the queue; and they fit into the memory that was free."""
    rule = Deficit(BUDGET, order)
    allowed = 0.0
    for waiting, rows, pages in iterations:
        decoding = rows * BLOCK
        admitted = rule.collect(waiting, decoding, pages)
        assert rule.credit >= 0
        in_order = [r.key for r in sorted(waiting, key=ORDERS[order])]
        assert admitted == in_order[: len(admitted)]
        by_key = {r.key: r.width for r in waiting}
        spent = sum(by_key[key] for key in admitted)
        assert sum(-(-by_key[key] // PAGE) for key in admitted) <= pages
        allowed = max(allowed + BUDGET - decoding, 0.0) if waiting else 0.0
        if len(admitted) == 1 and not decoding:
            allowed = max(allowed - spent, 0.0)
            continue
        assert spent <= allowed
        allowed -= spent
        assert rule.credit <= allowed or not waiting


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 4000),
)
def test_decoding_rows_are_never_held_and_somebody_always_steps(rows, budget):
    """And every refresh goes in the end, when those that decode have ended."""
    rule = Deficit(budget)
    passes = [Pass(key, width, refresh, arrived=key) for key, (width, refresh) in enumerate(rows)]
    for _ in range(len(rows)):
        held = set(rule.hold(passes))
        assert held <= {one.key for one in passes if one.refresh} and len(held) < len(passes)
        if not any(one.refresh for one in passes):
            break
    while passes := [one for one in passes if one.refresh]:
        held = set(rule.hold(passes))
        assert len(held) < len(passes)
        passes = [one for one in passes if one.key in held]
