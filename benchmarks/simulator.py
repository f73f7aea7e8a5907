"""Discrete events: requests arrive, a policy of the server decides, a machine works. The clock is simulated.

The policies are the server's own objects (jdllm.serving.schedulers); a machine is what they drive.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

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


class SlotMachine:
    """Rows that join and leave between steps, as in the engine.

    Args:
        slots: B.
        passes: forward passes that each request takes, by its number.
        seconds: of one step by the number of rows in it, [0] for none.
    """

    def __init__(self, slots: int, passes: Sequence[int], seconds: Sequence[float]):
        self.slots, self._passes, self._seconds = slots, passes, seconds
        self._left: dict[int, int] = {}
        self._joining: list[int] = []
        self._end = math.inf

    def start(self, keys: Sequence[int], now: float) -> None:
        """They take part from the next step on."""
        self._joining += keys
        if not self._left:
            self._begin(now)

    def next_event(self) -> float:
        return self._end

    def advance(self, now: float) -> list[int]:
        if now < self._end:
            return []
        ended = []
        for key in list(self._left):
            self._left[key] -= 1
            if not self._left[key]:
                del self._left[key]
                ended.append(key)
        self._end = math.inf
        if self._left or self._joining:
            self._begin(now)
        return ended

    def _begin(self, now: float) -> None:
        self._left |= {key: self._passes[key] for key in self._joining}
        self._joining = []
        self._end = now + self._seconds[len(self._left)]

    @property
    def running(self) -> int:
        return len(self._left) + len(self._joining)


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


def poisson(rng: np.random.Generator, rate: float, count: int) -> np.ndarray:
    """Times of ``count`` arrivals, ``rate`` a second."""
    return np.cumsum(rng.exponential(1 / rate, count))
