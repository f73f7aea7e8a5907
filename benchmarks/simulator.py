"""Synchronized batches in simulated time: requests arrive, a policy of the server decides, a machine works.

The policies are the server's own objects (jdllm.serving.schedulers). What joins and leaves between steps is simulated
by benchmarks.engine_model.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from jdllm.serving.schedulers import Policy, View, Waiting


@dataclasses.dataclass(frozen=True)
class Served:
    """One request, in seconds of the simulated clock."""

    arrived: float
    started: float
    ended: float

    @property
    def latency(self) -> float:
        """From arrival to the end."""
        return self.ended - self.arrived


class Machine(Protocol):
    """What requests run on.

    Attributes:
        slots: how many it has.
    """

    slots: int

    def start(self, keys: Sequence[int], now: float) -> None:
        """Requests take slots."""

    def next_event(self) -> float:
        """When a request ends next, or could join; infinity if nothing runs."""

    def advance(self, now: float) -> list[int]:
        """The requests that have ended by now."""

    @property
    def running(self) -> int:
        """Slots taken."""


class BatchMachine:
    """Batches that start and end together, each with the next of some service times, however full it is.

    Args:
        slots: B.
        times: seconds a batch.
    """

    def __init__(self, slots: int, times: Iterator[float]):
        self.slots, self._times = slots, times
        self._keys: list[int] = []
        self._end = math.inf

    def start(self, keys: Sequence[int], now: float) -> None:
        """One batch; none may run."""
        assert not self._keys, "a batch runs already"
        self._keys, self._end = list(keys), now + next(self._times)

    def next_event(self) -> float:
        return self._end

    def advance(self, now: float) -> list[int]:
        if now < self._end:
            return []
        keys, self._keys, self._end = self._keys, [], math.inf
        return keys

    @property
    def running(self) -> int:
        return len(self._keys)


def simulate(arrivals: Sequence[float], policy: Policy, machine: Machine) -> list[Served]:
    """Serve every request that ever starts, in order of arrival. Those that a policy keeps for ever (a last batch that
    never fills) are left out.

    Args:
        arrivals: times of arrival, not decreasing.
    """
    waiting: list[Waiting] = []
    started: dict[int, float] = {}
    ended: dict[int, float] = {}
    now, arrived = 0.0, 0
    while True:
        view = View(waiting, machine.slots - machine.running, machine.slots)
        actions = policy.decide(view, now)
        if actions.admit:
            started |= dict.fromkeys(actions.admit, now)
            machine.start(actions.admit, now)
            waiting = [request for request in waiting if request.key not in started]
        coming = float(arrivals[arrived]) if arrived < len(arrivals) else math.inf
        wake = actions.wake if actions.wake > now else math.inf
        now = min(coming, machine.next_event(), wake)
        if now == math.inf:
            return [Served(float(arrivals[key]), started[key], ended[key]) for key in sorted(ended)]
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            waiting.append(Waiting(arrived, float(arrivals[arrived])))
            arrived += 1
        ended |= dict.fromkeys(machine.advance(now), now)
