"""What an operator sees of a server while it works: how soon /health answers, and how much memory its process has."""

import dataclasses
import statistics
import threading
import time
from collections.abc import Sequence

from benchmarks.http_client import Address
from benchmarks.server_process import get, resident_bytes

SLOW = 0.05
"""Seconds above which an answer of /health is remembered with its time."""
HEALTH_EVERY = 0.05
"""Seconds between two questions."""
MEMORY_EVERY = 1.0


@dataclasses.dataclass
class Seen:
    """Samples, in order.

    Attributes:
        health: seconds until /health had answered, connecting included.
        health_failed: times it did not say 200.
        slow: those above ``SLOW``: when, in seconds from the start, and how long.
        late: seconds by which this thread itself was woken too late: what the machine adds.
        memory: resident bytes of the process.
    """

    health: list[float] = dataclasses.field(default_factory=list)
    health_failed: int = 0
    slow: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    late: list[float] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)

    def memory_growth(self) -> tuple[float, float]:
        """Bytes: medians of the second and of the last fifth of the run."""
        fifth = max(1, len(self.memory) // 5)
        return statistics.median(self.memory[fifth : 2 * fifth]), statistics.median(self.memory[-fifth:])


class Watch(threading.Thread):
    """A thread of its own, so that what the clients' event loop does is not measured too."""

    def __init__(self, address: Address, pid: int):
        super().__init__(name="watch", daemon=True)
        self.seen = Seen()
        self._address, self._pid = address, pid
        self._end = threading.Event()

    def run(self) -> None:
        start, next_memory = time.perf_counter(), 0.0
        while not self._end.is_set():
            begin = time.perf_counter()
            if begin >= next_memory:
                self.seen.memory.append(resident_bytes(self._pid))
                next_memory = begin + MEMORY_EVERY
                begin = time.perf_counter()
            try:
                ok = get(self._address, "/health", timeout=10)[0] == 200
            except OSError:
                ok = False
            asleep = time.perf_counter()
            self.seen.health.append(asleep - begin)
            self.seen.health_failed += not ok
            if asleep - begin > SLOW:
                self.seen.slow.append((asleep - start, asleep - begin))
            if not self._end.wait(HEALTH_EVERY):
                self.seen.late.append(time.perf_counter() - asleep - HEALTH_EVERY)

    def stop(self) -> Seen:
        """End the thread; what it saw."""
        self._end.set()
        self.join()
        return self.seen


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
