"""Synchronized batches of a fixed size, with or without a timer (paper: Serving Masked Diffusion LLMs, 2608.23807).

A batch starts when nothing runs, and the next when all of it has ended. Without a timer it starts only when ``size``
requests are in, so that a quiet server keeps everyone waiting for the last one; with a timer of T seconds a batch that
is not full starts as well. Two rules differ in what the timer closes:

    sealed       a batch is closed T after the arrival of its first request, whether the server is idle or not. Stable
                 only if batches are closed no faster than they are served (``timeout_for_stability``): the paper's
                 T_min is necessary, not sufficient.
    free server  the timer counts only while nothing runs: go if the oldest has waited T, and take whoever is there. No
                 T can make it unstable, since a queue that grows fills the batches.
"""

import math

from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Actions, View, Waiting, first_that_fit

AUTO = "auto"


class FixedFill(Slot):
    """Batches of ``size`` requests.

    Args:
        size: B.
        timeout: T in seconds; None: only full batches start; AUTO: ``shortest_timeout`` of the measured rates.
        sealed: which of the two rules.
    """

    def __init__(self, size: int, timeout: float | str | None = AUTO, sealed: bool = False):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"size: {size!r} must be a whole number, at least 1")
        if isinstance(timeout, str) and timeout != AUTO:
            raise ValueError(f"timeout: {timeout!r} must be a number of seconds, None or {AUTO!r}")
        if isinstance(timeout, int | float) and not 0 <= timeout < math.inf:
            raise ValueError(f"timeout: {timeout} must be a number of seconds, at least 0")
        self.size, self.timeout, self.sealed = size, timeout, sealed

    def decide(self, view: View, now: float) -> Actions:
        """Start the next batch if it is due."""
        if not view.waiting or not view.idle:
            return Actions()
        timeout = self._timeout(view)
        oldest = min(request.arrived for request in view.waiting)
        batch = self._batch(view, oldest + timeout)
        if len(batch) < self.size and now < oldest + timeout:
            return Actions(wake=oldest + timeout)
        return Actions(admit=first_that_fit(batch, view))

    def _timeout(self, view: View) -> float:
        if self.timeout is None:
            return math.inf
        if isinstance(self.timeout, str):
            return shortest_timeout(view.batch, view.rate) if view.rate > 0 else 0.0
        return self.timeout

    def _batch(self, view: View, closed: float) -> list[Waiting]:
        """Who belongs to the next batch: of those that are there, or, sealed, of those that came before it closed."""
        batch = [request for request in view.waiting if not self.sealed or request.arrived <= closed]
        return batch[: self.size]


def shortest_timeout(service: float, rate: float) -> float:
    """The paper's T_min, S - 1/lambda, at least 0: the timer starts with a batch's first request, so the shortest cycle
    of batches is 1/lambda + T, which must not be below S.

    Args:
        service: S, seconds that a batch takes.
        rate: lambda, requests a second.
    """
    return max(0.0, service - 1 / rate)


def cycle(timeout: float, size: int, rate: float) -> float:
    """Mean seconds between two sealed batches: 1/lambda + E[min(T, Erlang(B - 1, lambda))], since a batch also leaves
    when it is full."""
    if rate * timeout == math.inf:
        return size / rate
    return (1 + sum(_erlang_before(j, rate * timeout) for j in range(1, size))) / rate


def timeout_for_stability(service: float, size: int, rate: float, utilization: float = 1.0) -> float:
    """The least T with which sealed batches are served as fast as they are closed, at this utilization of the server.

    Raises:
        ValueError: even full batches are too many.
    """
    wanted = service / utilization
    if cycle(math.inf, size, rate) <= wanted:
        raise ValueError(
            f"rate: {rate} requests a second need more than {utilization:.0%} of the server in full batches"
        )
    low, high = 0.0, wanted
    while cycle(high, size, rate) < wanted:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cycle(middle, size, rate) < wanted else (low, middle)
    return high


def _erlang_before(count: int, mean: float) -> float:
    """Probability that ``count`` arrivals come within a time in which ``mean`` are expected: P(Poisson >= count)."""
    term, below = math.exp(-mean), 0.0
    for k in range(count):
        below += term
        term *= mean / (k + 1)
    return max(0.0, 1 - below)
