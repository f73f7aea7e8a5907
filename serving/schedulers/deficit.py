"""Sangam's deficit rule (2607.04206): a token budget an iteration, whose unused rest is saved for wide passes.

A block's first pass runs over the whole canvas (a refresh, Sangam's prefill), its others over the block alone.
Refreshes cannot be cut, and one that does not fit into the budget beside the decoding rows would wait for ever; so what
an iteration leaves unused is kept, as long as somebody waits, until the refresh at the head of the queue can pay for
itself. Its own words in ``_collect_prefill_batch``; the test vectors are in tests/serving/test_deficit.py.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Refresh:
    """A block that waits for its first pass.

    Attributes:
        key: names it.
        length: positions of that pass: the canvas.
        arrived: when its request came; later blocks of an old request go before a new one.
        blocks_left: with this one, of its request.
    """

    key: int
    length: int
    arrived: float = 0.0
    blocks_left: int = 1


def arrival_order(refresh: Refresh) -> tuple[float, ...]:
    """Oldest request first."""
    return refresh.arrived, refresh.key


def fewest_remaining_blocks(refresh: Refresh) -> tuple[float, ...]:
    """The request that is nearest to its end first."""
    return refresh.blocks_left, refresh.arrived, refresh.key


ORDERS = {"arrival_order": arrival_order, "fewest_remaining_blocks": fewest_remaining_blocks}

PAGE = 16
"""Positions a page of memory."""


class Deficit:
    """The rule, and the credit that it carries from one iteration to the next.

    Args:
        budget: positions an iteration (``--max-tokens-per-iteration``).
        order: a name in ORDERS.

    Attributes:
        credit: positions saved, never below 0. Without an upper bound, but gone as soon as nobody waits.
    """

    def __init__(self, budget: int = 1024, order: str = "arrival_order"):
        if order not in ORDERS:
            raise ValueError(f"order: {order!r} is not one of {', '.join(ORDERS)}")
        if budget < 1:
            raise ValueError(f"budget: {budget} must be at least 1")
        self.budget, self.order = budget, order
        self.credit = 0

    def collect(self, waiting: Sequence[Refresh], decoding: int, free_pages: float) -> list[int]:
        """Which refreshes join this iteration, in order. Strictly from the head: nobody passes one that does not fit.

        Args:
            waiting: in any order.
            decoding: positions of the rows that decode in this iteration, which all run.
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
            if spent + refresh.length > usable and not alone:
                break
            pages = -(-refresh.length // PAGE)
            if pages > free_pages:
                memory_blocked = True
                break
            free_pages -= pages
            spent += refresh.length
            admitted.append(refresh.key)
        if memory_blocked:  # no new credit while memory is what is short; what was spent of the old is gone
            self.credit = max(0, self.credit - max(0, spent - fresh))
        else:
            self.credit = max(0, usable - spent)
        return admitted
