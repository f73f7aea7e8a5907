"""A simulated machine that is like a live server: the server's own cost table, and three numbers measured beside it.

What a request takes outside the engine and what lies between two calls come from requests one at a time, what every
request that joins adds to that from one run in which all come at once. All are under the default scheduler; what is
simulated of other schedulers and loads with them is a prediction.
"""

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks import live_run
from benchmarks.engine_model import Machine, Work, simulate
from benchmarks.http_client import Address
from benchmarks.workload import ROWS, Request
from jdllm.serving.schedulers import Policy, Slot

ALONE, TOGETHER = 24, 128
"""Requests of each measurement."""


def calibrate(address: Address, asked: Sequence[Request], works: Sequence[Work]) -> Machine:
    """From a server under ``slot``."""
    together, at_once = asked[:TOGETHER], [0.0] * len(asked[:TOGETHER])
    live_run.play(address, together, at_once)  # warms up; the cost table follows
    run = live_run.play(address, together, at_once)
    latencies = [live_run.alone(address, [one] * 3) for one in asked[:ALONE]]
    machine = Machine(ROWS, live_run.costs(address))
    rests = [
        seconds - simulate([0.0], [work], Slot(), machine)[0].latency
        for seconds, work in zip(latencies, works, strict=False)
    ]
    passes = [len(next(iter(work.traces.values()))) for work in works[:ALONE]]
    gap, outside = statistics.linear_regression(passes, rests)
    machine = dataclasses.replace(machine, gap=max(0.0, gap), outside=max(0.0, outside))
    # What was measured of requests alone has their joining in it.
    joined = lambda seconds: dataclasses.replace(machine, joining=seconds, outside=max(0.0, machine.outside - seconds))
    low, high = 0.0, 0.05
    for _ in range(30):
        middle = (low + high) / 2
        slow = makespan(joined(middle), works[:TOGETHER], Slot()) > run.seconds
        low, high = (low, middle) if slow else (middle, high)
    return joined(low)


def makespan(machine: Machine, works: Sequence[Work], policy: Policy) -> float:
    """Seconds until all are answered that come at once."""
    return max(one.ended for one in simulate([0.0] * len(works), works, policy, machine))


def rate_of(machine: Machine, works: Sequence[Work], policy: Policy) -> float:
    """Requests a second that a policy serves at most."""
    return len(works) / makespan(machine, works, policy)
