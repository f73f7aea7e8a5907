"""How much of a run's wall time is device work: the union of the operations' intervals over the unprofiled wall time.

The union, never the sum: operations of several threads or streams overlap. Only leaves count: an enclosing ``while``,
``conditional`` or ``call`` would cover the gaps inside it. Tracing makes each operation a little longer and the run
itself longer still, so the union is set against the wall time of an equal run without the profiler, and reads a little
high where operations take microseconds.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import torch

Interval = tuple[float, float]
"""Start and end."""

CONTAINERS = ("while", "conditional", "call")
"""Operations that only run other operations; XLA names an instance ``while``, ``while.5`` and so on."""


def union(intervals: Iterable[Interval]) -> float:
    """Total length covered by at least one interval."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def jax_busy_seconds(run: Callable[[], object]) -> float:
    """Seconds in which XLA operations ran during ``run``, which must wait for its own results."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a record per Python call would slow the host between dispatches
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        return union(_xla_intervals(jax.profiler.ProfileData.from_file(str(trace)))) / 1e9


def _xla_intervals(data: jax.profiler.ProfileData) -> Iterator[Interval]:
    """Nanoseconds of every leaf operation. On a CPU it is a host event that names its HLO operation; on a GPU an event
    of a stream's line (the other lines of a device plane are derived from those)."""
    for plane in data.planes:
        on_device = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if on_device and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                is_leaf = event.name.split(".")[0] not in CONTAINERS
                if is_leaf and (on_device or any(name == "hlo_op" for name, _ in event.stats)):
                    yield event.start_ns, event.start_ns + event.duration_ns


# fmt: off
BOOKKEEPING = frozenset({
    "as_strided", "as_strided_", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "item",
    "is_nonzero", "narrow", "permute", "reshape", "resize_", "resolve_conj", "resolve_neg", "result_type",
    "select", "slice", "split", "squeeze", "squeeze_", "t", "to", "transpose", "unsqueeze", "unsqueeze_",
    "view", "_unsafe_view",
})
# fmt: on
"""PyTorch operators that compute no element: views, allocation, type rules."""


def torch_busy_seconds(run: Callable[[], object]) -> float:
    """Seconds in which PyTorch computed elements on the CPU during ``run``: the operators that spend most of their time
    in themselves. One that mostly waits for others (``linear`` for ``mm``) is a container; one that only calls
    bookkeeping on the way (``mm``) is not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return union(_torch_intervals(profile.events() or [])) / 1e6


def _torch_intervals(events: Iterable[Any]) -> Iterator[Interval]:
    """Microseconds."""
    for event in events:
        own = event.self_cpu_time_total >= (event.time_range.end - event.time_range.start) / 2
        if own and event.name.removeprefix("aten::") not in BOOKKEEPING:
            yield event.time_range.start, event.time_range.end
