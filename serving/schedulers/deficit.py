"""Sangam's deficit rule (2607.04206): a budget of positions a step, whose unused rest is saved for wide passes.

A block's first pass runs over the whole canvas (a refresh, Sangam's prefill), its others over the block alone.
Refreshes cannot be cut, and one that does not fit into the budget beside the decoding rows would wait for ever; so what
a step leaves unused is kept, as long as somebody waits, until the refresh at the head of the queue can pay for itself.
Its own words in ``_collect_prefill_batch``; the test vectors are in tests/serving/test_deficit.py.
"""

import math
from collections.abc import Sequence

from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Pass


def arrival_order(refresh: Pass) -> tuple[float, ...]:
    """Oldest request first: its later blocks go before a new one's first."""
    return refresh.arrived, refresh.key


def fewest_remaining_blocks(refresh: Pass) -> tuple[float, ...]:
    """The request that is nearest to its end first. (A long one may wait as long as shorter ones keep coming.)"""
    return refresh.blocks_left, refresh.arrived, refresh.key


ORDERS = {"arrival_order": arrival_order, "fewest_remaining_blocks": fewest_remaining_blocks}

PAGE = 16
"""Positions a page of memory."""


class Deficit(Slot):
    """The rule, and the credit that it carries from one step to the next. Requests take slots as they come; a row whose
    next pass is a refresh is held until the rule lets it go. (Here a slot's memory is there from the start, so pages
    are never short; the rule knows the case.)

    Args:
        budget: positions a step (Sangam's ``--max-tokens-per-iteration``).
        order: a name in ORDERS.

    Attributes:
        credit: positions saved, never below 0. Without an upper bound, but gone as soon as nobody waits.
    """

    holds = True

    def __init__(self, budget: int = 1024, order: str = "arrival_order"):
        if order not in ORDERS:
            raise ValueError(f"order: {order!r} is not one of {', '.join(ORDERS)}")
        if not isinstance(budget, int) or budget < 1:
            raise ValueError(f"budget: {budget!r} must be a whole number, at least 1")
        self.budget, self.order = budget, order
        self.credit = 0

    def hold(self, passes: Sequence[Pass]) -> Sequence[int]:
        """The refreshes that cannot pay yet."""
        waiting = [one for one in passes if one.refresh]
        decoding = sum(one.width for one in passes if not one.refresh)
        going = set(self.collect(waiting, decoding, math.inf))
        return [one.key for one in waiting if one.key not in going]

    def collect(self, waiting: Sequence[Pass], decoding: int, free_pages: float) -> list[int]:
        """Which refreshes join this step, in order. Strictly from the head: nobody passes one that does not fit.

        Args:
            waiting: in any order.
            decoding: positions of the rows that decode in this step, which all run.
            free_pages: pages of memory; infinity for no bound.
        """
        if not waiting:
            self.credit = 0
            return []
        fresh = self.budget - decoding
        usable = fresh + self.credit
        admitted: list[int] = []
        spent, memory_blocked = 0, False
        for refresh in sorted(waiting, key=ORDERS[self.order]):
            # A refresh wider than any budget goes alone on an idle server.
            alone = not decoding and not admitted
            if spent + refresh.width > usable and not alone:
                break
            pages = -(-refresh.width // PAGE)
            if pages > free_pages:
                memory_blocked = True
                break
            free_pages -= pages
            spent += refresh.width
            admitted.append(refresh.key)
        if memory_blocked:  # no new credit while memory is what is short; what was spent of the old is gone
            self.credit = max(0, self.credit - max(0, spent - fresh))
        else:
            self.credit = max(0, usable - spent)
        return admitted
