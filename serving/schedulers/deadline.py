"""Thresholds that follow the load, so that requests end in time (DiLaServe, 2606.29094).

A lower threshold commits more positions in a pass and is right less often. So every request decodes at the highest one,
from its own downwards, at which it is expected to keep its SLO; and where all requests together want more than the
machine has, those that are furthest along keep high thresholds first, and those that cannot be saved get the lowest and
wait behind everyone else. When a burst is over everything goes back to what was asked for.

Estimates, in the paper's terms and pessimistic: every refresh runs with all rows refreshing, every other pass with all
rows decoding (``Deadline.time``). Passes that are left come from tokens a pass at each threshold and from the length of
answers, both followed as requests run (the paper has a trained regressor there).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Actions, Running, View, Waiting, first_that_fit

FOLLOW = 0.05
"""Weight of the newest observation."""

HOPELESS = 0.7
"""A request is given up when even this share of its expected time is too long."""


@dataclasses.dataclass
class _Seen:
    """What a row looked like when it was last seen."""

    request: int
    done: int
    passes: int
    threshold: float | None


class Deadline(Slot):
    """The rule, and what it has learned.

    Args:
        slo: seconds that requests have which do not say; infinity: those are left alone.
        thresholds: candidates below a request's own, as ``0.8/0.7``.
        debounce: seconds between two looks at the load.
        patience: seconds after which a request that was given up waits like any other, so that it is served at last.
        shed: refuse those that are given up instead of letting them wait.
    """

    steers = True

    def __init__(
        self,
        slo: float = math.inf,
        thresholds: str | float = "0.8/0.7",
        debounce: float = 1.0,
        patience: float = 60.0,
        shed: bool = False,
    ):
        for name, value in (("slo", slo), ("debounce", debounce), ("patience", patience)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name}: {value!r} must be a number of seconds, at least 0")
        if not isinstance(shed, bool):
            raise ValueError(f"shed: {shed!r} must be true or false")
        self.slo, self.debounce, self.patience, self.shed = slo, debounce, patience, shed
        self.candidates = _candidates(thresholds)
        self._speed: dict[float, float] = {}  # tokens a pass, by threshold
        self._tokens = 0.0  # of an answer; 0 until one has ended
        self._seen: dict[int, _Seen] = {}
        self._caps: Mapping[int, float] = {}  # by request
        self._looked = -math.inf

    def decide(self, view: View, now: float) -> Actions:
        """Learn from what has happened, look at the load from time to time, choose thresholds, admit."""
        self._learn(view.running)
        if now - self._looked >= self.debounce:
            self._caps, self._looked = self._load_control(view, now), now
        hopeless = {request.key for request in view.waiting if self._is_hopeless(request, view, now)}
        shed = sorted(hopeless) if self.shed else ()
        queue = [request for request in view.waiting if request.key not in hopeless]
        if not self.shed:
            queue += [request for request in view.waiting if request.key in hopeless]
        return Actions(
            admit=first_that_fit(queue, view),
            thresholds={
                row.key: choice for row in view.running if (choice := self._choice(row, view, now)) != row.threshold
            },
            shed=shed,
        )

    def speed(self, threshold: float | None) -> float:
        """Tokens a pass at a threshold: what was seen there, else at the nearest one above, where there are fewer; 1
        before anything was seen."""
        above = [known for known in self._speed if threshold is not None and known >= threshold]
        return self._speed[min(above)] if above else 1.0

    def passes(self, request: Waiting, done: int, threshold: float | None) -> float:
        """That a request still needs, at least one."""
        expected = min(request.tokens, self._tokens or math.inf)
        left = max(expected - done, min(self.speed(threshold), request.tokens - done))
        return max(1.0, left / self.speed(threshold))

    def time(self, row: Running, threshold: float | None, view: View) -> float:
        """Seconds until a running request ends: its refreshes with everyone's, its other passes with everyone's."""
        count = len(view.running)
        passes = self.passes(row.request, row.done, threshold)
        refreshes = min(passes, row.blocks_left) if row.refreshes else 0
        together = sum(other.request.length for other in view.running)
        decoding = sum(_narrow(other) for other in view.running)
        return refreshes * view.seconds(count, together) + (passes - refreshes) * view.seconds(count, decoding)

    def _learn(self, running: Sequence[Running]) -> None:
        """Tokens a pass from what rows have done since they were last seen; the length of an answer from those that are
        gone."""
        present = {row.key: row for row in running}
        for key, seen in self._seen.items():
            row = present.get(key)
            if row is None or row.request.key != seen.request:
                self._tokens = seen.done if not self._tokens else _followed(self._tokens, max(seen.done, 1))
            elif row.passes > seen.passes and seen.threshold is not None:
                pace = (row.done - seen.done) / (row.passes - seen.passes)
                self._speed[seen.threshold] = _followed(self._speed.get(seen.threshold, max(pace, 1.0)), pace)
        self._seen = {row.key: _Seen(row.request.key, row.done, row.passes, row.threshold) for row in running}

    def _choice(self, row: Running, view: View, now: float) -> float | None:
        """The highest threshold within the row's cap at which it keeps its SLO; the lowest if none does."""
        if row.wanted is None or row.threshold is None or self._target(row.request) == math.inf:
            return row.wanted
        options = self._options(row.wanted)
        cap = self._caps.get(row.request.key, row.wanted)
        left = row.request.arrived + self._target(row.request) - now
        return next((c for c in options if c <= cap and self.time(row, c, view) <= left), options[-1])

    def _load_control(self, view: View, now: float) -> Mapping[int, float]:
        """The highest threshold that each request may have, so that all of them together ask for no more positions than
        the machine does until they are due: those furthest along first, each as high as leaves the others their
        least."""
        running = [row for row in view.running if row.wanted is not None]
        if not running:
            return {}
        work = sorted(running, key=lambda row: row.done / row.request.tokens, reverse=True)
        model = running[0]  # those that wait will be like those that run
        waiting = [
            dataclasses.replace(model, request=request, done=0, passes=0, blocks_left=-(-request.tokens // model.block))
            for request in view.waiting
        ]
        rows = [*work, *waiting]
        targets = [t for row in rows if (t := self._target(row.request)) < math.inf]
        if not targets:
            return {}
        supply = self._positions_a_second(view) * sum(targets) / len(targets)
        least = [self._demand(row, self._options(row.wanted or 0)[-1]) for row in rows]
        used, later, caps = 0.0, sum(least), {}
        for row, low in zip(rows, least, strict=True):
            options = self._options(row.wanted or 0)
            later -= low
            hopeless = self._is_late(row, view, now)
            fits = (c for c in options if used + self._demand(row, c) + later <= supply)
            cap = options[-1] if hopeless else next(fits, options[-1])
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

    def _is_late(self, row: Running, view: View, now: float) -> bool:
        left = row.request.arrived + self._target(row.request) - now
        return HOPELESS * self.time(row, self._options(row.wanted or 0)[-1], view) > left

    def _is_hopeless(self, request: Waiting, view: View, now: float) -> bool:
        """Whether one that waits could not keep its SLO even alone from now on."""
        if now - request.arrived > self.patience:
            return False
        passes = self.passes(request, 0, self.candidates[-1])
        return now + HOPELESS * passes * view.seconds(1, 1) > request.arrived + self._target(request)

    def _target(self, request: Waiting) -> float:
        return request.slo if request.slo < math.inf else self.slo

    def _options(self, wanted: float) -> list[float]:
        """From what was asked for downwards."""
        return [wanted, *(c for c in self.candidates if c < wanted)]


def _narrow(row: Running) -> int:
    """Positions of its passes that are no refresh."""
    return row.block if row.refreshes else row.width


def _followed(average: float, value: float) -> float:
    return average + FOLLOW * (value - average)


def _candidates(text: str | float) -> list[float]:
    parts: Iterable[str] = str(text).split("/")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if not values or not all(0 < value <= 1 for value in values):
        raise ValueError(f"thresholds: {text!r} must be numbers above 0, at most 1, as in 0.8/0.7")
    return sorted(values, reverse=True)
