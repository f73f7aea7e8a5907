"""A live server under one scheduler, and requests that come to it at given moments, whether it keeps up or not."""

import asyncio
import contextlib
import dataclasses
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.http_client import Address, Connection, HungUpError
from benchmarks.server_process import ServerProcess, get, metrics
from benchmarks.soak_requests import CHAT
from benchmarks.workload import LENGTH, ROWS, Request

LOOK = 0.5
"""Seconds between two looks at the server's metrics in a run."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a client saw, seconds from the first arrival: when it was to ask and when it had the answer. ``text`` is
    None for a refusal."""

    at: float
    ended: float
    text: str | None

    @property
    def latency(self) -> float:
        return self.ended - self.at


@dataclasses.dataclass(frozen=True)
class Size:
    """A compiled size of the step: how many calls it had and their seconds together, and the cost table's of one."""

    rows: int
    packed: int
    calls: float
    seconds: float
    cost: float


@dataclasses.dataclass(frozen=True)
class Window:
    """Some seconds of a run: when they end, on the clock of the arrivals, what the server says of its steps in them,
    and of what lay between two steps: how many times, and seconds together."""

    until: float
    sizes: list[Size]
    gaps: float
    gap_seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """All answers of one run, and what the server counted meanwhile: its counters' growth, by their names, and what it
    says of its steps, in all and window by window."""

    answers: list[Answer]
    counted: dict[str, float]
    sizes: list[Size]
    windows: list[Window] = dataclasses.field(default_factory=list)

    def latency(self, *percents: float) -> list[float]:
        """Percentiles, seconds."""
        ordered = sorted(answer.latency for answer in self.answers)
        return [percentile(ordered, percent) for percent in percents]

    def within(self, slo: float) -> float:
        """Share of the requests that were answered in so many seconds."""
        return statistics.mean(a.text is not None and a.latency <= slo for a in self.answers)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last answer."""
        return max(answer.ended for answer in self.answers) - min(answer.at for answer in self.answers)

    def average(self, name: str) -> float:
        """Of a histogram of the server's."""
        return self.counted[f"jdllm_{name}_sum"] / max(self.counted[f"jdllm_{name}_count"], 1)

    @property
    def widest(self) -> Size:
        """Of the sizes of its steps that with the most positions."""
        return max((size for size in self.sizes if size.calls), key=lambda size: (size.packed, size.rows))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between neighbours, as numpy does it."""
    place = percent / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@contextlib.contextmanager
def server(scheduler: str, log: Callable[[str], None], *flags: str) -> Iterator[ServerProcess]:
    """The shipped model under this scheduler."""
    sizes = ("--max-rows", str(ROWS), "--max-length", str(LENGTH), "--queue-limit", "100000")
    process = ServerProcess(*sizes, "--scheduler", scheduler, *flags, log=lambda text: log(f"{scheduler}: {text}"))
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop(20)


def play(address: Address, asked: Sequence[Request], arrivals: Sequence[float]) -> Run:
    """Send each request at its moment, wait for all answers.

    Args:
        arrivals: seconds, not decreasing.
    """
    bodies = [json.dumps(one.body).encode() for one in asked]
    before = get(address, "/metrics")[1].decode()
    answers, looks = asyncio.run(_watched(address, bodies, arrivals))
    after = get(address, "/metrics")[1].decode()
    known = metrics(before)
    counted = {name: value - known.get(name, 0.0) for name, value in metrics(after).items()}
    looks.append((math.inf, after))
    pages = [before, *(page for _, page in looks)]
    windows = [_window(until, earlier, page) for earlier, (until, page) in zip(pages[:-1], looks, strict=True)]
    return Run(answers, counted, _sizes(before, after), windows)


def _window(until: float, before: str, after: str) -> Window:
    """From two pages of metrics."""
    known, now = metrics(before), metrics(after)
    name = "jdllm_between_steps_seconds"
    gaps, seconds = (now[f"{name}_{what}"] - known[f"{name}_{what}"] for what in ("count", "sum"))
    return Window(until, _sizes(before, after), gaps, seconds)


def _sizes(before: str, after: str) -> list[Size]:
    """From two pages of metrics."""
    by_size = lambda name, page: {
        size: float(value)
        for size, value in re.findall(rf'^jdllm_{name}{{bucket="(\S+?)"}} (\S+)$', page, re.MULTILINE)
    }
    calls, seconds = (
        (by_size(f"step_seconds_{what}", before), by_size(f"step_seconds_{what}", after)) for what in ("count", "sum")
    )
    grown = lambda pair, size: pair[1].get(size, 0.0) - pair[0].get(size, 0.0)
    found = []
    for size, cost in by_size("step_cost_seconds", after).items():
        rows, packed = map(int, size.split("x"))
        found.append(Size(rows, packed, grown(calls, size), grown(seconds, size), cost))
    return found


async def _watched(
    address: Address, bodies: Sequence[bytes], arrivals: Sequence[float]
) -> tuple[list[Answer], list[tuple[float, str]]]:
    """The answers, and the server's metrics every LOOK seconds, with the time of each."""
    looks = []
    begin = time.perf_counter() - arrivals[0]
    playing = asyncio.ensure_future(_play(address, bodies, arrivals, begin))
    while not (await asyncio.wait([playing], timeout=LOOK))[0]:
        page = await asyncio.to_thread(get, address, "/metrics")
        looks.append((time.perf_counter() - begin, page[1].decode()))
    return await playing, looks


async def _play(address: Address, bodies: Sequence[bytes], arrivals: Sequence[float], begin: float) -> list[Answer]:
    idle: list[Connection] = []

    async def ask(body: bytes, at: float) -> Answer:
        kept = idle.pop() if idle else None
        try:
            connection = kept or await Connection.open(address)
            await connection.send("POST", CHAT, body)
            status = await connection.status()
        except (HungUpError, OSError):
            if kept is None:
                raise
            connection = await Connection.open(address)  # the server closes what has been idle for some seconds
            await connection.send("POST", CHAT, body)
            status = await connection.status()
        data = await connection.body()
        ended = time.perf_counter() - begin
        idle.append(connection)
        text = json.loads(data)["choices"][0]["message"]["content"] if status == 200 else None
        return Answer(at, ended, text)

    tasks = []
    for body, moment in zip(bodies, arrivals, strict=True):
        await asyncio.sleep(max(0.0, begin + moment - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(body, moment)))
    answers = list(await asyncio.gather(*tasks))
    for connection in idle:
        connection.close()
    return answers


def summary(run: Run, slo: float) -> dict[str, Any]:
    """The numbers of a row: seconds, requests and tokens a second, shares."""
    p50, p90, p99 = run.latency(50, 90, 99)
    count, counted = len(run.answers), run.counted
    needed, computed = counted["jdllm_positions_needed"], counted["jdllm_positions_computed"]
    return {
        "requests": count,
        "requests_per_second": count / run.seconds,
        "ttft": run.average("time_to_first_token_seconds"),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "within_slo": run.within(slo),
        "goodput": run.within(slo) * count / run.seconds,
        "tokens_per_nfe": counted["jdllm_committed_tokens_total"] / counted["jdllm_forward_passes_total"],
        "wasted": 1 - needed / computed,
        "widest": run.widest.packed,
        "widest_seconds": run.widest.seconds / run.widest.calls,
    }
