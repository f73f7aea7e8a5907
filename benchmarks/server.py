"""python -m benchmarks.server: the whole server's throughput beside that of its engine alone, on the same requests.

Held-out messages go through sixteen slots in the engine alone (benchmarks.bare_engine, which sees only ids), over HTTP
with plain answers, and over HTTP streamed: of the shipped model; of the same computed by one processor, which leaves
the others to Python, as an accelerator does; and of a model that is ten times as large (random weights,
benchmarks.random_checkpoint), since what a request costs outside the model does not grow with it. Over HTTP a client,
this process, keeps as many connections busy as there are slots and as many again (benchmarks.light_client); the little
that it takes of the processors is missing in the server, and is not corrected for. The three take turns; a ratio is one
of all rounds' requests a second, with its standard error.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import light_client, random_checkpoint, server_process, tables
from benchmarks.bare_engine import LENGTH, bodies
from benchmarks.light_client import LightClient, RefusedError
from benchmarks.machine import provenance
from benchmarks.server_process import ServerProcess, cpu_seconds, get
from benchmarks.soak_clients import Answer, collect, plain
from benchmarks.soak_requests import CHAT

ROWS = 16
CONNECTIONS = 2 * ROWS
GOAL = 0.95
"""Least ratio of the server with plain answers to its engine."""
ALONE = {"NPROC": "1"}
"""Environment in which XLA computes on one processor."""
SETTLE_SECONDS = 0.1
"""Pause before a run: the other process's idle threads spin for some milliseconds before they sleep."""

ENGINE, PLAIN, STREAMED = "engine alone", "server, plain", "server, streamed"


class BareEngine:
    """The engine's process."""

    def __init__(self, count: int, *model: str, environment: Mapping[str, str]):
        command = [sys.executable, "-m", "benchmarks.bare_engine", str(count), str(ROWS), *model]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)
        self._read()

    def run(self) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        return {**self._read(), "client_cpu_seconds": 0.0}

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the engine's process has ended")
        return json.loads(line)


class Http:
    """Requests over HTTP, plain or streamed."""

    def __init__(self, server: ServerProcess, count: int, stream: bool):
        extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        self._server, self._stream = server, stream
        self._bodies = [json.dumps({**body, **extra}).encode() for body in bodies(count)]

    def run(self) -> dict[str, Any]:
        pid, steps = self._server.pid, self._steps()
        with contextlib.closing(LightClient(self._server.address, CONNECTIONS)) as posts:
            served, client, begin = cpu_seconds(pid), time.process_time(), time.perf_counter()
            raw = posts.post_all(CHAT, self._bodies)
            told = {
                "seconds": time.perf_counter() - begin,
                "client_cpu_seconds": time.process_time() - client,
                "cpu_seconds": cpu_seconds(pid) - served,
            }
        told["steps"] = self._steps() - steps
        answers = [self._answer(light_client.body(data)) for data in raw]
        tokens = sum(answer.completion_tokens for answer in answers)
        return {**told, "tokens": tokens, "texts": [answer.choices[0].text for answer in answers]}

    def _answer(self, data: bytes) -> Answer:
        if not self._stream:
            return plain(json.loads(data))
        events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event.startswith("data: ")]
        answer = collect(events)
        if not isinstance(answer, Answer):
            raise RefusedError(answer)
        return answer

    def _steps(self) -> int:
        page = get(self._server.address, "/metrics")[1].decode()
        return int(server_process.metrics(page)["jdllm_steps_total"])


def take_turns(runs: dict[str, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What each run told, round by round; each is first as often as the others.

    Raises:
        SystemExit: they did not give the same answers.
    """
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    order = list(runs)
    texts = None
    for turn in range(rounds + 1):
        for name in order:
            time.sleep(SETTLE_SECONDS)
            result = runs[name]()
            if texts is None:
                texts = result["texts"]
            if result["texts"] != texts:
                raise SystemExit(f"{name}: other answers than before")
            if turn:  # the round before the first warms everything up
                told[name].append(result)
        order = order[1:] + order[:1]
        log(f"round {turn} of {rounds}: " + ", ".join(f"{n} {r[-1]['seconds']:.2f} s" for n, r in told.items() if r))
    return told


def rows_of(told: dict[str, list[dict[str, Any]]], count: int, model: str) -> list[dict[str, Any]]:
    """One row of results each; ratios are to the first."""
    first, rows = next(iter(told.values())), []
    for name, results in told.items():
        total = {key: sum(r[key] for r in results) for key in results[0] if key != "texts"}
        requests = count * len(results)
        ratio, error = speed([r["seconds"] for r in first], [r["seconds"] for r in results])
        rows.append(
            {
                "model": model,
                "what": name,
                "requests": count,
                "rounds": len(results),
                "requests_per_second": requests / total["seconds"],
                "tokens_per_second": total["tokens"] / total["seconds"],
                "steps": total["steps"] / len(results),
                "ms_per_step": 1e3 * total["seconds"] / total["steps"],
                "cpu_ms_per_request": 1e3 * total["cpu_seconds"] / requests,
                "client_cpu_ms_per_request": 1e3 * total["client_cpu_seconds"] / requests,
                "ratio": ratio,
                "error": error,
                "seconds": [r["seconds"] for r in results],
            }
        )
    return rows


def speed(first: Sequence[float], other: Sequence[float]) -> tuple[float, float | None]:
    """How many times as fast the other is in all rounds together, and the standard error of that: the jackknife's,
    which leaves out each round, a pair of durations, in turn; None for one round."""
    whole, n = sum(first) / sum(other), len(first)
    if n == 1:
        return whole, None
    rest = [(sum(first) - a) / (sum(other) - b) for a, b in zip(first, other, strict=True)]
    middle = sum(rest) / n
    return whole, math.sqrt((n - 1) / n * sum((r - middle) ** 2 for r in rest))


def table(results: dict[str, Any]) -> str:
    """Rows as Markdown, and a line on goal and machine."""
    rows = tables.markdown(
        [
            "model",
            "held-out messages",
            "requests/s",
            "tokens/s",
            "steps",
            "ms a step",
            "CPU ms a request",
            "client's",
            "of the engine's rate",
            "standard error",
        ],
        [
            [
                r["model"],
                r["what"],
                f"{r['requests_per_second']:.1f}",
                f"{r['tokens_per_second']:.0f}",
                f"{r['steps']:.0f}",
                f"{r['ms_per_step']:.2f}",
                f"{r['cpu_ms_per_request']:.1f}",
                f"{r['client_cpu_ms_per_request']:.1f}",
                f"{100 * r['ratio']:.1f} %",
                "" if r["error"] is None else f"{100 * r['error']:.1f} %",
            ]
            for r in results["rows"]
        ],
    )
    machine, rounds = results["machine"], results["rows"][0]["rounds"]
    told = lambda r: (
        f"{'reached' if r['ratio'] >= GOAL else 'not reached'} ({r['model']}, {r['requests']} requests a run)"
    )
    verdicts = [told(r) for r in results["rows"] if r["what"] == PLAIN]
    note = (
        f"{rounds} rounds; goal for plain answers {100 * GOAL:.0f} %: {', '.join(verdicts)}; "
        f"{machine['cpu']}, {machine['cpus']} CPUs for server and client together; "
        f"commit {results['commit']}; `{results['command']}`"
    )
    return f"{rows}\n\n{note}"


def measure(
    name: str, count: int, rounds: int, *model: str, environment: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """The rows of one model: its folder, or nothing for the shipped one; both processes get the environment."""
    flags = ("--max-rows", str(ROWS), "--max-length", str(LENGTH), *(("--model", *model) if model else ()))
    server = ServerProcess(*flags, log=log, environment=environment)
    engine = None
    try:
        server.wait_ready()
        engine = BareEngine(count, *model, environment=environment)
        plain_http, streamed = (Http(server, count, stream) for stream in (False, True))
        told = take_turns({ENGINE: engine.run, PLAIN: plain_http.run, STREAMED: streamed.run}, rounds)
    finally:
        if engine:
            engine.stop()
        server.stop(20)
    return rows_of(told, count, name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description="the server beside its engine")
    parser.add_argument("--n", type=int, default=400, help="held-out messages; of the larger model a sixteenth")
    parser.add_argument("--rounds", type=int, default=30, help="of the larger model a tenth")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    rows = measure("shipped", options.n, options.rounds)
    rows += measure("shipped, on one processor", options.n, options.rounds, environment=ALONE)
    with tempfile.TemporaryDirectory() as folder:
        larger = random_checkpoint.write(Path(folder), random_checkpoint.LARGER)
        size = f"{random_checkpoint.parameters(random_checkpoint.LARGER) / 1e6:.0f} M, random"
        rows += measure(size, max(1, options.n // 16), max(1, options.rounds // 10), str(larger))
    results = {**provenance("benchmarks.server"), "rows": rows}
    if options.json:
        tables.write(options.json, results)
    print(table(results))


def log(text: str) -> None:
    """Progress; standard output is for the table alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
