"""python -m benchmarks.soak: a real server for minutes under clients of every kind, well-behaved and not.

The server decodes the shipped model with its D2F adapter beside it, so that all decoders of a LLaDA run in one batch.
Clients (benchmarks.soak_clients) come at random; every few seconds another number of them may be there at once. At the
end, when all have left, the server's books, memory and answers must be right (benchmarks.soak_checks); the exit code is
1 if one of the checks fails.
"""

import argparse
import asyncio
import collections
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import server_process, tables
from benchmarks.http_client import Address, ask
from benchmarks.machine import provenance
from benchmarks.server_process import ServerProcess
from benchmarks.soak_checks import Calm, Check, balance, judge, left
from benchmarks.soak_clients import ENDS, Answer, Outcome, World, guarded, one_of, reads, sentinel
from benchmarks.soak_requests import Prompt, Requests, sentinels
from benchmarks.soak_watch import Seen, Watch, percentile
from jdllm.runtime import SHIPPED
from jdllm.train.tasks import held_out

CROWDS = (2, 8, 24, 64)
"""How many clients there may be at once; one of these holds for ``CROWD_SECONDS``."""
CROWD_SECONDS = 8.0
GAP_SECONDS = 0.03
"""Mean time between two arrivals, as long as the crowd is not complete."""
SENTINEL_SECONDS = 1.0
PROGRESS_SECONDS = 5.0
PROMPTS = 40
DRAIN_SECONDS = 120.0
CALM = 48
"""Clients of the end, eight at once."""

Log = Callable[[str], None]


@dataclasses.dataclass
class Run:
    """What a soak brought.

    Attributes:
        seconds: that clients came.
        outcomes: of every client.
        alone: answers of the sentinels on the idle server.
        metrics: the server's, when all had left.
        seen: what the watch saw.
        imbalance: the most requests that a scrape in mid-run had too many or too few. (A scrape is no snapshot.)
        calm: the end, when every client reads all.
    """

    seconds: float
    outcomes: list[Outcome]
    alone: list[Answer | None]
    metrics: dict[str, float]
    seen: Seen
    imbalance: float
    calm: Calm

    def checks(self) -> list[Check]:
        return judge(self.outcomes, self.metrics, self.seen, self.alone, self.calm)


async def soak(address: Address, pid: int, seconds: float, seed: int, log: Log) -> Run:
    """Send clients to a server that is ready and that nobody else uses."""
    rng = random.Random(seed)
    models = [card["id"] for card in json.loads((await ask(address, "GET", "/v1/models"))[1])["data"]]
    prompts, max_length = await _prompts(address)
    world = World(address, rng, Requests(rng, models, prompts, max_length))
    fixed = sentinels(models, prompts)
    outcomes = [await sentinel(world, fixed, i, stream=False) for i in range(len(fixed))]
    alone = [outcome.answer for outcome in outcomes]
    log(f"{len(alone)} fixed requests answered alone; {len(prompts)} prompts, models {', '.join(models)}")
    watch = Watch(address, pid)
    watch.start()
    begin = time.monotonic()
    clients: set[asyncio.Task[Outcome]] = set()

    def end(task: asyncio.Task[Outcome]) -> None:
        clients.discard(task)
        outcomes.append(task.result())

    def start(client: Any) -> None:
        task = asyncio.ensure_future(client)
        clients.add(task)
        task.add_done_callback(end)

    async def send_sentinels() -> None:
        for turn in range(1 << 30):
            start(sentinel(world, fixed, turn % len(fixed), stream=bool(turn // len(fixed) % 2)))
            await asyncio.sleep(SENTINEL_SECONDS)

    imbalance = 0.0

    async def report() -> None:
        nonlocal imbalance
        told = begin
        while True:
            metrics = await _metrics(address)
            imbalance = max(imbalance, abs(balance(metrics)))
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                log(_progress(told - begin, seconds, outcomes, len(clients), metrics, watch.seen))
            await asyncio.sleep(0.5)

    helpers = [asyncio.ensure_future(send_sentinels()), asyncio.ensure_future(report())]
    try:
        while (now := time.monotonic()) < begin + seconds:
            crowd, until = rng.choice(CROWDS), min(now + CROWD_SECONDS, begin + seconds)
            while time.monotonic() < until:
                if len(clients) < crowd:
                    start(one_of(world))
                await asyncio.sleep(rng.expovariate(1 / GAP_SECONDS))
            for helper in helpers:
                if helper.done():
                    helper.result()
    finally:
        for helper in helpers:
            helper.cancel()
        passed = time.monotonic() - begin
    log(f"no more clients; {len(clients)} are still there")
    while clients:
        await asyncio.wait(clients)
        await asyncio.sleep(0)  # the callbacks above come after it
    seen, before = watch.stop(), await _drained(address)
    log("all have left; the last ones all read what they get")
    calm = Calm([], before, before)
    for _ in range(CALM // 8):
        calm.outcomes += await asyncio.gather(*(guarded(world, reads) for _ in range(8)))
    calm.after = await _drained(address)
    return Run(passed, outcomes + calm.outcomes, alone, calm.after, seen, imbalance, calm)


async def _prompts(address: Address) -> tuple[list[Prompt], int]:
    """Messages that leave most of the canvas for the answer, and its length."""
    found, max_length = [], 0
    for task in held_out("test", PROMPTS):
        messages = [{"role": "user", "content": task.message}]
        status, body = await ask(address, "POST", "/tokenize", {"messages": messages})
        told = json.loads(body)
        max_length = told["max_model_len"]
        if status == 200 and told["count"] <= max_length // 2:
            found.append(Prompt(task.message, tuple(told["tokens"])))
    return found, max_length


async def _metrics(address: Address) -> dict[str, float]:
    return server_process.metrics((await ask(address, "GET", "/metrics"))[1].decode())


async def _drained(address: Address) -> dict[str, float]:
    """The metrics once nothing runs or waits; after ``DRAIN_SECONDS`` as they are then."""
    until = time.monotonic() + DRAIN_SECONDS
    while left(metrics := await _metrics(address)) and time.monotonic() < until:
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)  # the last calls are counted a moment after their clients have read them
    return await _metrics(address) if not left(metrics) else metrics


def _progress(
    now: float, seconds: float, outcomes: Sequence[Outcome], clients: int, metrics: dict[str, float], seen: Seen
) -> str:
    ends = collections.Counter(outcome.end for outcome in outcomes)
    problems = sum(outcome.problem is not None for outcome in outcomes)
    gone = ", ".join(f"{ends[end]} {end}" for end in ENDS)
    running, waiting = (metrics[f"jdllm_requests_{state}"] for state in ("running", "waiting"))
    return (
        f"{now:5.0f} of {seconds:.0f} s: {clients} clients there, {len(outcomes)} gone ({gone}), "
        f"{running:.0f} running, {waiting:.0f} waiting; /health at most {1e3 * max(seen.health):.0f} ms; "
        f"{seen.memory[-1] / 1e6:.0f} MB; {problems} problems"
    )


def summary(run: Run) -> dict[str, Any]:
    """Numbers of a results file."""
    clients = collections.Counter((outcome.client, outcome.end) for outcome in run.outcomes)
    decoders = collections.Counter(o.request.decoder for o in run.outcomes if o.answer and o.request)
    seen = run.seen
    kinds = sorted(
        {client for client, _ in clients}, key=lambda name: -sum(n for (c, _), n in clients.items() if c == name)
    )
    return {
        "seconds": run.seconds,
        "checks": [dataclasses.asdict(check) for check in run.checks()],
        "clients": [{"client": kind, **{end: clients[kind, end] for end in ENDS}} for kind in kinds],
        "problems": collections.Counter(f"{o.client}: {o.problem}" for o in run.outcomes if o.problem).most_common(50),
        "answered_by_decoder": dict(decoders.most_common()),
        "health_ms": {
            "p50": 1e3 * percentile(seen.health, 0.5),
            "p99": 1e3 * percentile(seen.health, 0.99),
            "max": 1e3 * max(seen.health),
            "samples": len(seen.health),
            "slow": [{"at_seconds": round(at, 1), "ms": round(1e3 * took, 1)} for at, took in seen.slow],
        },
        "machine_wakes_late_ms": {"p99": 1e3 * percentile(seen.late, 0.99), "max": 1e3 * max(seen.late)},
        "memory_mb": [round(value / 1e6, 1) for value in seen.memory],
        "imbalance_of_scrapes": run.imbalance,
        "metrics": {
            name: value for name, value in run.metrics.items() if name.startswith("jdllm_") and "bucket" not in name
        },
    }


def table(results: dict[str, Any]) -> str:
    """Checks and clients as Markdown, and a line on the machine."""
    checks = tables.markdown(
        ["check", "found", "allowed", "passed"],
        [
            [c["name"], c["found"].replace("|", "/"), c["allowed"], "yes" if c["passed"] else "NO"]
            for c in results["checks"]
        ],
    )
    clients = tables.markdown(
        ["clients", "answered", "refused", "ended by the server", "left"],
        [[row["client"], *(row[end] or None for end in ENDS)] for row in results["clients"]],
    )
    machine = results["machine"]
    note = (
        f"{results['seconds'] / 60:.1f} minutes, {results['rows']} slots; {machine['cpu']}, {machine['cpus']} CPUs; "
        f"commit {results['commit']}; `{results['command']}`"
    )
    return "\n\n".join([checks, clients, note])


def server_checks(server: ServerProcess) -> list[Check]:
    """End the server; what must hold then."""
    code = server.stop()
    found = exceptions(server.errors.splitlines())
    text = f"{len(found)}: {', '.join(sorted(set(found)))}" if found else "0"
    return [
        Check("exit code after SIGTERM", str(code), "0", code == 0),
        Check("exceptions in the server's log", text, "0", not found),
    ]


def exceptions(lines: Sequence[str]) -> list[str]:
    """The exception at the end of every traceback, without its text."""
    found, inside = [], False
    for line in lines:
        if line.startswith("Traceback"):
            inside = True
        elif inside and not line.startswith(" "):
            found.append(line.strip().partition(":")[0])
            inside = False
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description="a server under all kinds of clients"
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=8, help="slots of the server (default 8)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    options = parser.parse_args(arguments)

    adapter = f"orders-d2f={SHIPPED / 'orders-d2f-lora'}"
    flags = ["--model", str(SHIPPED / "orders-base"), "--adapter", adapter, "--max-length", "256"]
    server = ServerProcess(*flags, "--max-rows", str(options.rows), "--queue-limit", "64", log=log)
    try:
        server.wait_ready()
        run = asyncio.run(soak(server.address, server.pid, 60 * options.minutes, options.seed, log))
        ended = server_checks(server)
    finally:
        server.stop(5)
        if options.log:
            options.log.write_text(server.errors)
    results = {**provenance("benchmarks.soak"), "rows": options.rows, "seed": options.seed, **summary(run)}
    results["checks"] += [dataclasses.asdict(check) for check in ended]
    if options.json:
        tables.write(options.json, results)
    print(table(results))
    failed = [check["name"] for check in results["checks"] if not check["passed"]]
    if failed:
        log(f"failed: {'; '.join(failed)}")
    return 1 if failed else 0


def log(text: str) -> None:
    """Progress; standard output is for the table alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
