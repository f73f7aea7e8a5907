"""A simulated machine that is like a live server, made from what the server's metrics say of a run.

Steps cost what they took on average in that run, by compiled size; sizes that it hardly used cost what the server's
cost table says. Between two steps lies the run's average; outside the engine a request spends what clients measured
beyond what the server did.
"""

import bisect
import dataclasses
import statistics
from collections.abc import Callable, Sequence

from benchmarks import live_run
from benchmarks.engine_model import Machine, Work, simulate
from benchmarks.live_run import Run
from benchmarks.workload import ROWS, Request
from jdllm.serving.schedulers import Policy, Slot
from jdllm.serving.schedulers.view import Seconds

WARM = 64
"""Requests of the run before the one that counts."""

ENOUGH = 5
"""Calls of a size whose average counts."""


def calibrate(asked: Sequence[Request], works: Sequence[Work], log: Callable[[str], None]) -> Machine:
    """Of a server of its own under ``slot``, under about half the load that it can carry."""
    with live_run.server("slot", log) as process:
        at_once = live_run.play(process.address, asked[:WARM], [0.0] * len(asked[:WARM]))
        rate = rate_of(like(at_once), works, Slot()) / 2
        return like(live_run.play(process.address, asked, [i / rate for i in range(len(asked))]))


def like(run: Run) -> Machine:
    """The machine on which this run was."""
    inside = run.average("request_seconds")
    outside = statistics.mean(answer.latency for answer in run.answers) - inside
    return Machine(ROWS, _step_seconds(run), gap=run.average("between_steps_seconds"), outside=max(0.0, outside))


def at_its_pace(run: Run) -> Machine:
    """The same, and where that was slower or quicker than on average for half a second, so is this one: a scheduler
    answers for its queue, not for other work on its processors."""
    machine, ends, paces = like(run), [], []
    for window in run.windows:
        took = window.gap_seconds + sum(size.seconds for size in window.sizes)
        expected = window.gaps * machine.gap
        expected += sum(size.calls * machine.seconds(size.rows, size.packed) for size in window.sizes)
        ends.append(window.until)
        paces.append(took / expected if expected else 1.0)
    pace = lambda now: paces[place] if (place := bisect.bisect_left(ends, now)) < len(ends) else 1.0
    return dataclasses.replace(machine, pace=pace)


def _step_seconds(run: Run) -> Seconds:
    """The smallest compiled size into which a step fits says what it costs."""
    sizes = sorted(
        (size.packed, size.rows, size.seconds / size.calls if size.calls >= ENOUGH else size.cost) for size in run.sizes
    )

    def seconds(rows: int, positions: int) -> float:
        fits = (cost for packed, most, cost in sizes if packed >= positions and most >= rows)
        return next(fits, sizes[-1][2])

    return seconds


def makespan(machine: Machine, works: Sequence[Work], policy: Policy) -> float:
    """Seconds until all are answered that come at once."""
    return max(one.ended for one in simulate([0.0] * len(works), works, policy, machine))


def rate_of(machine: Machine, works: Sequence[Work], policy: Policy) -> float:
    """Requests a second that a policy serves at most."""
    return len(works) / makespan(machine, works, policy)
