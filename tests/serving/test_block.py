"""BlockServe's rule: cycles, the padded box, the order of the queue."""

import pytest

from jdllm.serving.schedulers import Block, Pass, Running, View, Waiting


def waiting(*lengths: int) -> list[Waiting]:
    return [Waiting(key, float(key), length=length) for key, length in enumerate(lengths)]


def running(*lengths: int) -> list[Running]:
    return [Running(slot, Waiting(100 + slot, 0.0, length=length)) for slot, length in enumerate(lengths)]


def rows(*blocks_left: int) -> list[Pass]:
    return [Pass(slot, 8, blocks_left=left) for slot, left in enumerate(blocks_left)]


def admitted(rule: Block, queue, free=8, slots=8, now=0.0, busy=()) -> list[int]:
    return list(rule.decide(View(queue, free, slots, running=busy), now).admit)


def test_rows_wait_for_the_last_to_have_its_block_and_are_refilled_then():
    rule = Block()
    assert admitted(rule, waiting(40, 40)) == [0, 1]
    assert rule.hold(rows(3, 2)) == []
    newcomer = waiting(40)
    assert admitted(rule, newcomer, free=6, busy=running(40, 40)) == []
    assert rule.hold(rows(2, 2)) == [0]  # slot 0 has its block
    assert admitted(rule, newcomer, free=6, busy=running(40, 40)) == []
    assert rule.hold(rows(2, 1)) == [0, 1]  # everyone, so that others can join
    assert admitted(rule, newcomer, free=6, busy=running(40, 40)) == [0]
    assert rule.hold(rows(2, 1, 3)) == []
    assert rule.hold(rows(2, 0, 2)) == [1, 2]


def test_where_nobody_waits_the_next_cycle_begins_at_once():
    rule = Block()
    admitted(rule, waiting(40))
    assert rule.hold(rows(3)) == []
    admitted(rule, [], free=7, busy=running(40))
    assert rule.hold(rows(2)) == []


def test_a_row_that_ends_inside_a_cycle_ends_it_for_nobody_else():
    rule = Block()
    admitted(rule, waiting(40, 40))
    rule.hold(rows(1, 3))
    assert rule.hold([Pass(1, 8, blocks_left=3)]) == []


def test_shortest_first_within_the_padded_box():
    queue = waiting(100, 30, 60, 20)
    assert admitted(Block(), queue) == [3, 1, 2, 0]
    assert admitted(Block(sort=False), queue) == [0, 1, 2, 3]
    # Two rows of 30 are a box of 60, three of 60 one of 180.
    assert admitted(Block(budget=100), queue) == [3, 1]
    assert admitted(Block(budget=400), queue) == [3, 1, 2, 0]
    # What runs belongs to the box.
    assert admitted(Block(budget=100), queue, free=7, busy=running(50)) == [3]
    # One that is larger than the budget goes alone.
    assert admitted(Block(budget=10), waiting(100)) == [0]


def test_who_has_been_passed_often_enough_goes_first():
    rule = Block(patience=3)
    long = Waiting(0, 0.0, length=90)
    for turn in range(3):
        short = Waiting(turn + 1, 1.0, length=10)
        assert admitted(rule, [long, short], free=1, slots=1) == [short.key]
        rule.hold(rows(1))
    assert admitted(rule, [long, Waiting(9, 1.0, length=10)], free=1, slots=1) == [0]


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"budget": 0}, "budget"), ({"budget": 1.5}, "budget"), ({"sort": 1}, "sort"), ({"patience": 0}, "patience")],
)
def test_settings_out_of_range(settings, named):
    with pytest.raises(ValueError, match=named):
        Block(**settings)
