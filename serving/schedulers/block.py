"""Block cycles (BlockServe, 2607.08930): rows decode a block together, then leave and are refilled together.

The quantum is one cycle, in which every row decodes one block; a row that has its block sits out until all have
theirs. Between two cycles finished rows leave and waiting ones join, shortest canvas first within a priority, as long
as the padded box of the batch, rows times the longest canvas, stays within a budget. (The paper sorts an offline list
by prompt length, all answers having the same room, and fills a dense tensor of that box; here rows are packed, and
the box only says how unlike the rows of a batch may be.) A list that is sorted once starves nobody; a queue would, so
a request that has been passed ``patience`` times goes first, and nobody passes it again.
"""

import math
from collections.abc import Sequence

from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Actions, Pass, View, Waiting, first_that_fit


class Block(Slot):
    """The rule, and where in its cycle each row stands.

    Args:
        budget: positions of the padded box, rows times the longest canvas; None: no bound but the slots.
        sort: shortest canvas first; otherwise in order of arrival.
        patience: how many cycles others may begin before a request that waits.
    """

    holds = True
    steers = True

    def __init__(self, budget: int | None = None, sort: bool = True, patience: int = 16):
        if budget is not None and (not isinstance(budget, int) or budget < 1):
            raise ValueError(f"budget: {budget!r} must be a whole number, at least 1, or none")
        if not isinstance(sort, bool):
            raise ValueError(f"sort: {sort!r} must be true or false")
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience: {patience!r} must be a whole number, at least 1")
        self.budget, self.sort, self.patience = budget, sort, patience
        self._cycle: dict[int, int] = {}  # by slot: blocks left when the cycle began
        self._between = True  # two cycles
        self._waiting = False
        self._passed: dict[int, int] = {}

    def decide(self, view: View, now: float) -> Actions:
        """Refill between two cycles."""
        self._waiting = bool(view.waiting)
        if not (self._between or view.idle):
            return Actions()
        self._between, self._cycle = True, {}
        queue = self._in_order(view.waiting)
        longest = [one.request.length for one in view.running]
        fits = 0
        for request in queue:
            longest.append(request.length)
            box = len(longest) * max(longest)
            if self.budget is not None and box > self.budget and len(longest) > 1:
                break
            fits += 1
        admitted = first_that_fit(queue[:fits], view)
        self._passed = {
            request.key: self._passed.get(request.key, 0) + bool(admitted)
            for request in view.waiting
            if request.key not in admitted
        }
        return Actions(admit=admitted)

    def _in_order(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        is_overdue = lambda request: self._passed.get(request.key, 0) >= self.patience
        overdue = [request for request in waiting if is_overdue(request)]
        others = [request for request in waiting if not is_overdue(request)]
        return overdue + (
            sorted(others, key=lambda request: (request.priority, request.length)) if self.sort else others
        )

    def hold(self, passes: Sequence[Pass]) -> Sequence[int]:
        """Those that have their block. Everyone for a moment once all have, so that others can join."""
        if not self._between:
            due = {one.key for one in passes if one.blocks_left == self._cycle.get(one.key, math.inf)}
            if due:
                return [one.key for one in passes if one.key not in due]
            self._between = True
            if self._waiting:
                return [one.key for one in passes]
        self._between, self._cycle = False, {one.key: one.blocks_left for one in passes}
        return []
