"""Refreshes and decoding never share a step (phase-exclusive batching, EB and EB+ of 2606.00516).

Their rule is for prefill and decode of autoregressive models; a refresh is our prefill. A step of refreshes costs a_p
however few they are, so they are gathered: decoding goes on until a share theta of the rows waits for a refresh (in the
paper: until so many slots are free), then all that wait have it in one step. A step of decoding follows in any case, so
that rows that refresh in every pass, or ever new ones, keep nobody waiting for ever.

Where a row comes to its refresh with probability p in each step, and a decoding step costs a_d, the best share is the
root of theta/(1 - theta) + ln(1 - theta) = p a_p / a_d (``best_share``), the limit for many rows of a rule that counts
rows. EB+ leaves phases mixed where that is cheaper (``gain``).
"""

import math
from collections.abc import Sequence

from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Actions, Pass, View

AUTO = "auto"
MODES = ("exclusive", "mixed", AUTO)

FOLLOW = 0.02
"""Weight of the newest step."""

HYSTERESIS, STICKY = 0.05, 32
"""``auto`` changes its mind for at least this share of a row's cost, and keeps it for so many steps."""


class Exclusive(Slot):
    """Requests take slots as they come; a step runs refreshes or decoding rows.

    Args:
        theta: share of the rows that gather for a refresh; 0: each as soon as it is due (alone all the same);
            ``auto``: the best share for what is seen and measured.
        mode: ``exclusive``; ``mixed``: nobody waits for anybody; ``auto``: what costs less.
        interference: share by which a position of a mixed step costs more than one of an exclusive step. (The cost
            table says nothing about it: it knows sizes, not kinds.)

    Attributes:
        refreshing: the last step was one of refreshes.
        mixed: refreshes and decoding share steps at present.
    """

    holds = True

    def __init__(self, theta: float | str = 0.7, mode: str = "exclusive", interference: float = 0.0):
        number = isinstance(theta, int | float) and not isinstance(theta, bool) and 0 <= theta <= 1
        if not number and theta != AUTO:
            raise ValueError(f"theta: {theta!r} must be a number from 0 to 1, or auto")
        if mode not in MODES:
            raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
        if not isinstance(interference, int | float) or not 0 <= interference < math.inf:
            raise ValueError(f"interference: {interference!r} must be a number, at least 0")
        self.theta, self.mode, self.interference = theta, mode, interference
        self.steers = AUTO in (theta, mode)
        self.refreshing, self.mixed = False, mode == "mixed"
        self._step = self._position = 0.0  # seconds of a step beside its positions, and of a position
        self._refreshes, self._others = _Passes(), _Passes()
        self._steps = 0

    def decide(self, view: View, now: float) -> Actions:
        """As Slot; looks at what steps cost."""
        if view.running:
            few, many = len(view.running), max(len(view.running) + 1, sum(row.request.length for row in view.running))
            low, high = view.seconds(view.slots, few), view.seconds(view.slots, many)
            self._position = max(0.0, (high - low) / (many - few))
            self._step = max(0.0, low - few * self._position)
        return super().decide(view, now)

    def hold(self, passes: Sequence[Pass]) -> Sequence[int]:
        """Those of the other phase."""
        due = [one for one in passes if one.refresh]
        decoding = [one for one in passes if not one.refresh]
        if self.mixed:
            self.refreshing = False
        else:
            enough = len(due) >= max(1, math.ceil(self._share() * len(passes)))
            self.refreshing = bool(due) and (not decoding or (enough and not self.refreshing))
        self._refreshes.follow([one.width for one in due] if self.mixed or self.refreshing else [])
        self._others.follow([one.width for one in decoding] if self.mixed or not self.refreshing else [])
        held = [] if self.mixed else decoding if self.refreshing else due
        self._choose(len(passes))
        return [one.key for one in held]

    def _share(self) -> float:
        """theta. A refresh and a decoding step cost the same beside their positions here, so that p is all that
        counts."""
        return best_share(1 / self._between()) if isinstance(self.theta, str) else self.theta

    def _between(self) -> float:
        """Other passes between two refreshes of a row."""
        return max(self._others.rows, 1e-3) / max(self._refreshes.rows, 1e-3)

    def _choose(self, rows: int) -> None:
        """Mix or not, where that is left open."""
        self._steps += 1
        if self.mode != AUTO or self._steps < STICKY or not self._step:
            return
        wide, narrow, between = self._refreshes.width, self._others.width, self._between()
        mixed = self._position * (1 + self.interference)
        won = gain(rows, self._share(), self._step, self._position, mixed, wide, narrow, between)
        whole = self._step / rows + self._position * (wide + narrow * between) / (1 + between)
        if (won < 0) != self.mixed and abs(won) > HYSTERESIS * whole:
            self.mixed, self._steps = won < 0, 0


class _Passes:
    """How many passes of a kind there are in a step, and how wide they are, lately."""

    def __init__(self) -> None:
        self.rows = self.width = 1.0

    def follow(self, widths: Sequence[int]) -> None:
        """Those of one more step."""
        self.rows += FOLLOW * (len(widths) - self.rows)
        if widths:
            self.width += FOLLOW * (sum(widths) / len(widths) - self.width)


def gain(
    rows: int, theta: float, step: float, position: float, mixed: float, wide: float, narrow: float, between: float
) -> float:
    """Seconds a pass and row that exclusive phases save against mixed ones, EB+'s Delta(N): negative where mixing is
    cheaper.

    Args:
        rows: N. theta: share of them that gathers.
        step: seconds of a step beside its positions (a_p, a_d, a_MB).
        position, mixed: seconds of a position in exclusive and in mixed steps (b_EB, b_MB).
        wide, narrow: positions of a refresh and of another pass.
        between: other passes of a row between two refreshes.
    """
    theta = min(max(theta, 1 / rows), 1 - 1e-6)
    exclusive = step * (1 - math.log1p(-theta) * between) / (theta * rows)
    together = step * (1 + between) / rows
    positions = wide + narrow * between
    return ((mixed - position) * positions - (exclusive - together)) / (1 + between)


def best_share(cost: float) -> float:
    """The root theta in [0, 1) of theta/(1 - theta) + ln(1 - theta) = ``cost``, which is p a_p / a_d."""
    if cost < 0:
        raise ValueError(f"cost: {cost} must be at least 0")
    low, high = 0.0, 1 - 1e-12
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / (1 - middle) + math.log1p(-middle) < cost else (low, middle)
    return (low + high) / 2
