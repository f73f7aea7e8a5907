"""Refreshes and decoding never share a step (phase-exclusive batching, EB of 2606.00516).

Their rule is for prefill and decode of autoregressive models; a refresh is our prefill. A step of refreshes costs a_p
however few they are, so they are gathered: decoding goes on until a share theta of the rows waits for a refresh (in the
paper: until so many slots are free), then all that wait have it in one step. A step of decoding follows in any case, so
that rows that refresh in every pass, or ever new ones, keep nobody waiting for ever.

Where a row comes to its refresh with probability p in each step, and a decoding step costs a_d, the best share is the
root of theta/(1 - theta) + ln(1 - theta) = p a_p / a_d (``best_share``), the limit for many rows of a rule that counts
rows (``best_count``).
"""

import math
from collections.abc import Sequence

from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Pass


class Exclusive(Slot):
    """Requests take slots as they come; a step runs refreshes or decoding rows.

    Args:
        theta: share of the rows that gather for a refresh; 0: each as soon as it is due (alone all the same).

    Attributes:
        refreshing: the last step was one of refreshes.
    """

    holds = True

    def __init__(self, theta: float = 0.7):
        if not isinstance(theta, int | float) or not 0 <= theta <= 1:
            raise ValueError(f"theta: {theta!r} must be a number from 0 to 1")
        self.theta = theta
        self.refreshing = False

    def hold(self, passes: Sequence[Pass]) -> Sequence[int]:
        """Those of the other phase."""
        due = [one.key for one in passes if one.refresh]
        decoding = [one.key for one in passes if not one.refresh]
        enough = len(due) >= max(1, math.ceil(self.theta * len(passes)))
        self.refreshing = bool(due) and (not decoding or (enough and not self.refreshing))
        return decoding if self.refreshing else due


def best_share(cost: float) -> float:
    """The root theta in [0, 1) of theta/(1 - theta) + ln(1 - theta) = ``cost``, which is p a_p / a_d."""
    if cost < 0:
        raise ValueError(f"cost: {cost} must be at least 0")
    low, high = 0.0, 1 - 1e-12
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / (1 - middle) + math.log1p(-middle) < cost else (low, middle)
    return (low + high) / 2


def best_count(rows: int, p: float, refresh: float, step: float, per_row: float = 0.0) -> int:
    """How many of ``rows`` rows should gather: the least k with k tau(N - k) - sum of tau(j), j = N - k + 1..N, at
    least a_p, where tau(j) = (a_d + b_d j) / (1 - (1 - p)^j) is the time until one of j rows comes to its refresh.
    All, if none does.

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
