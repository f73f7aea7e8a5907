"""The generator's answers, recomputed from its messages by other means, and its splits."""

import itertools
import random
import re

from hypothesis import given
from hypothesis import strategies as st

from jdllm.train import tasks

ITEM = re.compile(
    rf"(\d+) (?:({'|'.join(tasks.UNITS)}) (?:of )?)?({'|'.join(tasks.ITEMS)})\b(?: (?:at|for) (\d+)(?: each)?)?"
)


def read_message(message: str) -> str:
    """An order sheet from a message, by searching it for words."""

    def found(words: list[str]) -> str | None:
        return next((word for word in words if re.search(rf"\b{word}\b", message)), None)

    city, day = found(tasks.CITIES), found(tasks.DAYS)
    lines = [f"name: {found(tasks.NAMES)}"]
    lines += [f"city: {city}"] if city else []
    lines += [f"day: {day}"] if day else []
    lines.append("items:")
    items = ITEM.findall(message)
    for number, (quantity, unit, name, price) in enumerate(items, 1):
        line = " ".join(word for word in (f"{number}.", quantity, unit, name) if word)
        lines.append(line + (f" at {price} = {int(quantity) * int(price)}" if price else ""))
    return "\n".join([*lines, f"lines: {len(items)}"])


@given(st.integers(0, 1 << 30), st.integers(1, tasks.MAX_LINES))
def test_the_answer_follows_from_the_message(seed, lines):
    task = tasks.order(random.Random(seed), lines)
    assert task.answer == read_message(task.message)
    assert f"\n{lines}. " in task.answer and f"\n{lines + 1}. " not in task.answer and task.lines == lines


@given(st.integers(0, 1 << 30))
def test_a_drill_repeats(seed):
    task = tasks.drill(random.Random(seed))
    assert task.answer.removeprefix("list: ") == task.message.removeprefix("Repeat: ")


def test_splits_are_disjoint_and_the_same_every_time():
    seen = {}
    for split in ("train", "validation", "test"):
        stream = list(itertools.islice(tasks.tasks(split, 3), 300))
        assert stream == list(itertools.islice(tasks.tasks(split, 3), 300))
        assert all(tasks.split_of(task.message) == split for task in stream)
        seen[split] = {task.message for task in stream}
    assert not seen["train"] & seen["test"] and not seen["validation"] & seen["test"]
    held_out = tasks.held_out("test", 48)
    assert all(tasks.split_of(task.message) == "test" for task in held_out)
    assert [task.lines for task in held_out[:12]] == list(range(1, 13))
