"""Thresholds that follow the load, so that requests end in time (DiLaServe, 2606.29094).

A lower threshold commits more positions in a pass and is right less often. So every request decodes at the highest one,
from its own downwards, at which it is expected to keep its SLO; and where all requests together want more than the
machine has, those that are furthest along keep high thresholds first, and those that cannot be saved get the lowest and
wait behind everyone else. When a burst is over everything goes back to what was asked for.

Estimates, in the paper's terms and pessimistic: every refresh runs with all rows refreshing, every other pass with all
rows decoding (``Deadline.time``). Passes that are left come from tokens a pass at each threshold and from how long the
answers were that were longer, both followed as requests run (the paper has a trained regressor there).
"""

import bisect
import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping

from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Actions, Running, View, Waiting, first_that_fit

FORGET = 0.995
"""Weight of what was seen a pass ago against the newest."""

ANSWERS = 128
"""Of so many of the last answers the lengths are known."""

MOST_PACES = 64
"""Of so many thresholds beside the candidates the pace is known; requests may ask for any."""

HOPELESS = 0.7
"""A request is given up when even this share of its expected time is too long."""


class Deadline(Slot):
    """The rule, and what it has learned.

    Args:
        slo: seconds that requests have which do not say; infinity: those are left alone.
        thresholds: candidates below a request's own, as ``0.8/0.7``.
        debounce: seconds between two looks at the load.
        patience: seconds after which a request that was given up waits like any other, so that it is served at last.
        shed: refuse those that are given up instead of letting them wait, unless a slot is free for them: what is
            expected of requests is learned from those that run.
        margin: a threshold is high enough where so many times the expected seconds are left; expectations are means,
            so that at 1 every other request is on its way to be late until it is lowered.
    """

    steers = True

    def __init__(
        self,
        slo: float = math.inf,
        thresholds: str | float = "0.8/0.7",
        debounce: float = 1.0,
        patience: float = 60.0,
        shed: bool = False,
        margin: float = 1.0,
    ):
        for name, value in (("slo", slo), ("debounce", debounce), ("patience", patience)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name}: {value!r} must be a number of seconds, at least 0")
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not 1 <= margin < math.inf:
            raise ValueError(f"margin: {margin!r} must be a number, at least 1")
        if not isinstance(shed, bool):
            raise ValueError(f"shed: {shed!r} must be true or false")
        self.slo, self.debounce, self.patience, self.shed, self.margin = slo, debounce, patience, shed, margin
        self.candidates = _candidates(thresholds)
        self._paces: dict[float | None, _Pace] = {}  # by threshold; None: of decoders without one
        self._lengths = _Lengths()
        self._seen: dict[int, Running] = {}  # by request, as of the last view
        self._caps: Mapping[int, float] = {}  # by request
        self._looked = -math.inf
        self._refresh = self._step = 0.0  # seconds

    def decide(self, view: View, now: float) -> Actions:
        """Learn from what has happened, look at the load from time to time, choose thresholds, admit."""
        self._learn(view)
        self._price(view)
        if now - self._looked >= self.debounce:
            self._caps, self._looked = self._load_control(view, now), now
        hopeless = {request.key for request in view.waiting if self._is_hopeless(request, view, now)}
        queue = [request for request in view.waiting if request.key not in hopeless]
        queue += [request for request in view.waiting if request.key in hopeless]
        admit = first_that_fit(queue, view)
        return Actions(
            admit=admit,
            thresholds={row.key: choice for row in view.running if (choice := self._choice(row, now)) != row.threshold},
            shed=sorted(hopeless.difference(admit)) if self.shed else (),
        )

    def speed(self, threshold: float | None) -> float:
        """Tokens a pass at a threshold: what was seen there, else at the nearest one above, where there are fewer; 1
        before anything was seen."""
        if threshold is None:
            return self._paces[None].speed if None in self._paces else 1.0
        above = [known for known in self._paces if known is not None and known >= threshold]
        return self._paces[min(above)].speed if above else 1.0

    def passes(self, request: Waiting, done: int, threshold: float | None) -> float:
        """That a request still needs, at least one."""
        left = min(self._lengths.left(done, request.tokens), request.tokens - done)
        return max(1.0, left / self.speed(threshold))

    def time(self, row: Running, threshold: float | None) -> float:
        """Seconds until a running request ends: its refreshes with everyone's, its other passes with everyone's."""
        passes = self.passes(row.request, row.done, threshold)
        refreshes = min(passes, row.blocks_left) if row.refreshes else 0
        return refreshes * self._refresh + (passes - refreshes) * self._step

    def _price(self, view: View) -> None:
        """What a step costs in which all rows refresh, and one in which all decode."""
        count = len(view.running)
        self._refresh = view.seconds(count, sum(row.request.length for row in view.running)) if count else 0.0
        self._step = view.seconds(count, sum(_narrow(row) for row in view.running)) if count else 0.0

    def _learn(self, view: View) -> None:
        """Tokens a pass from what requests have done since they were last seen (at the threshold that they got then),
        lengths from those that were answered."""
        for row in (*view.ended, *view.running):
            before = self._seen.get(row.request.key, dataclasses.replace(row, done=0, passes=0))
            if row.passes > before.passes:
                self._pace(row.threshold).follow(row.done - before.done, row.passes - before.passes)
        for row in view.ended:
            self._lengths.add(row.done)
        self._seen = {row.request.key: row for row in view.running}

    def _pace(self, threshold: float | None) -> "_Pace":
        if threshold not in self._paces:
            others = [known for known in self._paces if known not in self.candidates]
            if len(others) >= MOST_PACES and threshold not in self.candidates:
                del self._paces[others[0]]
            self._paces[threshold] = _Pace()
        return self._paces[threshold]

    def _choice(self, row: Running, now: float) -> float | None:
        """The highest threshold within the row's cap at which it keeps its SLO; the lowest if none does."""
        wanted = row.request.wanted
        if wanted is None or self._target(row.request) == math.inf:
            return wanted
        options = self._options(wanted)
        cap = self._caps.get(row.request.key, wanted)
        left = row.request.arrived + self._target(row.request) - now
        return next((c for c in options if c <= cap and self.margin * self.time(row, c) <= left), options[-1])

    def _load_control(self, view: View, now: float) -> Mapping[int, float]:
        """The highest threshold that each request may have, so that all of them together ask for no more positions than
        the machine does until they are due: those furthest along first, each as high as leaves the others their
        least."""
        work = [row for row in view.running if row.request.wanted is not None]
        if not work:
            return {}
        work.sort(key=lambda row: row.done / row.request.tokens, reverse=True)
        like = work[0]  # those that wait will be like those that run
        waiting = [
            dataclasses.replace(like, request=request, done=0, passes=0, blocks_left=-(-request.tokens // like.block))
            for request in view.waiting
            if request.wanted is not None
        ]
        rows = [*work, *waiting]
        targets = [t for row in rows if (t := self._target(row.request)) < math.inf]
        if not targets:
            return {}
        supply = self._positions_a_second(view) * sum(targets) / len(targets)
        least = [self._demand(row, self._lowest(row)) for row in rows]
        used, later, caps = 0.0, sum(least), {}
        for row, low in zip(rows, least, strict=True):
            later -= low
            options = [self._lowest(row)] if self._is_late(row, now) else self._options(row.request.wanted or 0)
            cap = next((c for c in options if used + self._demand(row, c) + later <= supply), options[-1])
            used += self._demand(row, cap)
            caps[row.request.key] = cap
        return caps

    def _demand(self, row: Running, threshold: float) -> float:
        """Positions that a request still asks for."""
        passes = self.passes(row.request, row.done, threshold)
        refreshes = min(passes, row.blocks_left) if row.refreshes else 0
        return refreshes * row.request.length + (passes - refreshes) * _narrow(row)

    def _positions_a_second(self, view: View) -> float:
        """With every slot taken by rows as wide as those that run."""
        wide = sum(_narrow(row) for row in view.running) / len(view.running)
        seconds = view.seconds(view.slots, round(view.slots * wide))
        return view.slots * wide / seconds if seconds > 0 else math.inf

    def _is_late(self, row: Running, now: float) -> bool:
        left = row.request.arrived + self._target(row.request) - now
        return HOPELESS * self.time(row, self._lowest(row)) > left

    def _is_hopeless(self, request: Waiting, view: View, now: float) -> bool:
        """Whether one that waits could not keep its SLO even alone from now on."""
        if now - request.arrived > self.patience:
            return False
        lowest = None if request.wanted is None else self._options(request.wanted)[-1]
        passes = self.passes(request, 0, lowest)
        return now + HOPELESS * passes * view.seconds(1, 1) > request.arrived + self._target(request)

    def _target(self, request: Waiting) -> float:
        return request.slo if request.slo < math.inf else self.slo

    def _options(self, wanted: float) -> list[float]:
        """From what was asked for downwards."""
        return [wanted, *(c for c in self.candidates if c < wanted)]

    def _lowest(self, row: Running) -> float:
        return self._options(row.request.wanted or 0)[-1]


class _Pace:
    """Tokens a pass, of many passes, the last ones the most."""

    def __init__(self) -> None:
        self._tokens = self._passes = 0.0

    def follow(self, tokens: int, passes: int) -> None:
        keep = FORGET**passes
        self._tokens, self._passes = self._tokens * keep + tokens, self._passes * keep + passes

    @property
    def speed(self) -> float:
        """At least a half: a pass commits something, though not always at the end of what is settled."""
        return max(0.5, self._tokens / self._passes)


class _Lengths:
    """How long the last answers were."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, tokens: int) -> None:
        if len(self._order) == ANSWERS:
            del self._sorted[bisect.bisect_left(self._sorted, self._order.popleft())]
        self._order.append(tokens)
        bisect.insort(self._sorted, tokens)

    def left(self, done: int, most: int) -> float:
        """Tokens that an answer still needs of which so many are done: what those needed on average that were longer,
        or, if none was, half of what it may have."""
        longer = self._sorted[bisect.bisect_right(self._sorted, done) :]
        if longer:
            return sum(longer) / len(longer) - done
        return most - done if not self._sorted else (most - done) / 2


def _narrow(row: Running) -> int:
    """Positions of its passes that are no refresh."""
    return row.block if row.refreshes else row.width


def _candidates(text: str | float) -> list[float]:
    parts: Iterable[str] = str(text).split("/")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if not values or not all(0 < value <= 1 for value in values):
        raise ValueError(f"thresholds: {text!r} must be numbers above 0, at most 1, as in 0.8/0.7")
    return sorted(values, reverse=True)
