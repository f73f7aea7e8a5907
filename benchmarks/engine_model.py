"""The engine in simulated time: rows in slots, one call after the other, each as long as the cost table says.

It drives the server's own policy objects as the engine's thread does: what has ended leaves, the policy decides, those
admitted take the lowest free slots, the policy holds rows back, the others have a pass. What a request does in its
passes does not hang on its neighbours, so it is recorded once (benchmarks.workload) and replayed here.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from jdllm.serving.forecast import Forecast
from jdllm.serving.schedulers import Pass, Policy, Running, View, Waiting
from jdllm.serving.schedulers.view import Seconds


@dataclasses.dataclass(frozen=True)
class Step:
    """One pass: positions of its window, whether that is the whole canvas, and the tokens settled when it is over."""

    width: int
    refresh: bool
    done: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What a request does, whoever is beside it.

    Attributes:
        length: positions of its canvas.
        tokens: max_tokens.
        block: its block size.
        traces: its passes at each threshold that a policy may set; the first is the one that it asks for (None where
            its decoder has none).
        refreshes: every block begins with a pass over the whole canvas.
        slo: seconds.
    """

    length: int
    tokens: int
    block: int
    traces: Mapping[float | None, Sequence[Step]]
    refreshes: bool = False
    slo: float = math.inf

    @property
    def wanted(self) -> float | None:
        return next(iter(self.traces))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One request, in seconds of the simulated clock: ``first`` is its first settled text. ``passes`` that it had."""

    key: int
    arrived: float
    started: float
    first: float
    ended: float
    passes: int
    done: int

    @property
    def latency(self) -> float:
        return self.ended - self.arrived


@dataclasses.dataclass(frozen=True)
class Machine:
    """What simulated requests run on.

    Attributes:
        slots: B.
        seconds: of a step.
        gap: seconds between a report and the next call.
        outside: seconds of a request before it is queued and after it has ended.
        room: positions of keys and values.
        pace: at a moment, by how much steps take longer than ``seconds`` and ``gap`` say.
    """

    slots: int
    seconds: Seconds
    gap: float = 0.0
    outside: float = 0.0
    room: float = math.inf
    pace: Callable[[float], float] = lambda now: 1.0


@dataclasses.dataclass
class _Row:
    key: int
    work: Work
    arrived: float
    started: float
    threshold: float | None
    at: int = 0
    passes: int = 0
    done: int = 0
    stalled: int = 0  # passes since anything was settled
    first: float = math.inf

    @property
    def step(self) -> Step:
        return self.work.traces[self.threshold][self.at]

    def set_threshold(self, threshold: float) -> None:
        """Go on at another one: in that trace as many passes behind the one at which as much was settled as here, at
        most up to the pass that settles more."""
        self.threshold = threshold
        trace = self.work.traces[threshold]
        last = len(trace) - 1  # an answer may be shorter at another threshold
        same = 0 if not self.done else 1 + next((i for i, step in enumerate(trace) if step.done >= self.done), last)
        more = next((i for i, step in enumerate(trace) if step.done > self.done), last)
        self.at = min(same + self.stalled, more)

    def advance(self, now: float) -> bool:
        """Have the pass; whether it was the last."""
        self.passes += 1
        self.stalled = self.stalled + 1 if self.step.done == self.done else 0
        self.done = self.step.done
        self.first = min(self.first, now) if self.done else self.first
        self.at += 1
        return self.at == len(self.work.traces[self.threshold])


class StuckError(Exception):
    """The policy holds every row, again and again, or waits for something that never comes."""


def simulate(
    arrivals: Sequence[float],
    works: Sequence[Work],
    policy: Policy,
    machine: Machine,
    leaving: Mapping[int, float] | None = None,
) -> list[Outcome]:
    """Serve every request; those that leave before are left out, and those that the policy sheds.

    Args:
        arrivals: times of arrival, not decreasing, one for each work.
        leaving: when a client hangs up, by the number of its request.

    Raises:
        StuckError: the policy lets nobody move.
    """
    return _Run(arrivals, works, policy, machine, leaving or {}).all()


class _Run:
    def __init__(
        self,
        arrivals: Sequence[float],
        works: Sequence[Work],
        policy: Policy,
        machine: Machine,
        leaving: Mapping[int, float],
    ):
        self.times = [float(at) + machine.outside / 2 for at in arrivals]
        self.works, self.policy, self.machine, self.leaving = works, policy, machine, leaving
        self.waiting: list[Waiting] = []
        self.rows: dict[int, _Row] = {}
        self.out: list[Outcome] = []
        self.ended: list[Running] = []
        self.forecast = Forecast(1.0)
        self.now, self.busy_since, self.arrived, self.held_all = 0.0, 0.0, 0, False

    def all(self) -> list[Outcome]:
        while self.arrived < len(self.times) or self.waiting or self.rows:
            self._arrive()
            wake = self._decide()
            going = self._going()
            if going:
                self._call(going)
            elif self.rows and self.held_all:
                raise StuckError("every row is held, though the policy was asked")
            elif self.rows:
                self.held_all = True
            else:
                self._sleep(wake)
        return sorted(self.out, key=lambda one: one.key)

    def _arrive(self) -> None:
        while self.arrived < len(self.times) and self.times[self.arrived] <= self.now:
            work, at = self.works[self.arrived], self.times[self.arrived]
            self.waiting.append(_waiting(self.arrived, at, work))
            self.forecast.arrived(at)
            self.arrived += 1
        gone = {key for key, at in self.leaving.items() if at <= self.now}
        self.waiting = [request for request in self.waiting if request.key not in gone]
        self.rows = {slot: row for slot, row in self.rows.items() if row.key not in gone}

    def _decide(self) -> float:
        """Ask the policy and do as it says; when it wants to be asked again."""
        free = [slot for slot in range(self.machine.slots) if slot not in self.rows]
        if not self.policy.steers and not (free and self.waiting):
            return math.inf
        taken = sum(row.work.length for row in self.rows.values())
        view = View(
            self.waiting,
            len(free),
            self.machine.slots,
            rate=self.forecast.rate,
            batch=self.forecast.batch,
            room=self.machine.room - taken,
            running=[_running(slot, row) for slot, row in self.rows.items()] if self.policy.steers else (),
            ended=self.ended,
            seconds=self.machine.seconds,
        )
        self.ended = []
        actions = self.policy.decide(view, self.now)
        for slot, threshold in actions.thresholds.items():
            self.rows[slot].set_threshold(threshold)
        if not self.rows:
            self.busy_since = self.now
        for key in actions.admit:
            work = self.works[key]
            self.rows[free.pop(0)] = _Row(key, work, self.times[key], self.now, work.wanted)
        left = {*actions.admit, *actions.shed}
        self.waiting = [request for request in self.waiting if request.key not in left]
        return actions.wake

    def _going(self) -> list[int]:
        """Slots that have a pass."""
        if not self.policy.holds or not self.rows:
            return list(self.rows)
        passes = [
            Pass(slot, row.step.width, row.step.refresh, row.arrived, row.passes, _blocks_left(row))
            for slot, row in sorted(self.rows.items())
        ]
        held = set(self.policy.hold(passes))
        return [slot for slot in self.rows if slot not in held]

    def _call(self, going: Sequence[int]) -> None:
        self.held_all = False
        wide = sum(self.rows[slot].step.width for slot in going)
        took = self.machine.gap + self.machine.seconds(max(going) + 1, wide)
        self.now += self.machine.pace(self.now) * took
        for slot in going:
            row = self.rows[slot]
            if row.advance(self.now):
                del self.rows[slot]
                self.forecast.ended(row.passes)
                if not self.rows:
                    self.forecast.idle(self.now - self.busy_since)
                self.ended.append(_running(slot, row))
                end = self.now + self.machine.outside / 2
                before = row.arrived - self.machine.outside / 2
                self.out.append(Outcome(row.key, before, row.started, row.first, end, row.passes, row.done))

    def _sleep(self, wake: float) -> None:
        """Until somebody comes or the policy wakes."""
        coming = self.times[self.arrived] if self.arrived < len(self.times) else math.inf
        leaves = min((self.leaving.get(request.key, math.inf) for request in self.waiting), default=math.inf)
        soonest = min(coming, leaves, wake if wake > self.now else math.inf)
        if soonest < math.inf:
            self.now = max(soonest, self.now)
        elif self.waiting:
            raise StuckError(f"{len(self.waiting)} requests wait, and nothing will happen")


def _waiting(key: int, arrived: float, work: Work) -> Waiting:
    return Waiting(key, arrived, 1, work.length, work.tokens, work.slo, wanted=work.wanted)


def _running(slot: int, row: _Row) -> Running:
    """As of its next pass, or, once it has ended, its last."""
    trace = row.work.traces[row.threshold]
    step = trace[min(row.at, len(trace) - 1)]
    narrow = min(row.work.block, row.work.length) if step.refresh else step.width
    return Running(
        key=slot,
        request=_waiting(row.key, row.arrived, row.work),
        done=row.done,
        passes=row.passes,
        width=step.width,
        block=narrow if row.work.refreshes else row.work.length,
        blocks_left=_blocks_left(row),
        refreshes=row.work.refreshes,
        threshold=row.threshold,
    )


def _blocks_left(row: _Row) -> int:
    return max(1, -(-row.work.tokens // row.work.block) - row.done // row.work.block)
