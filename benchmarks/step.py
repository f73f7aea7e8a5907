"""python -m benchmarks.step: milliseconds per denoising step, jdllm beside eager PyTorch, official and tuned.

Both decode the same requests with the same float32 weights in one process; tokens, forward passes and needed positions
must be equal or the run fails. Only stepping is timed: requests are put into their slots before. A step of a batch is
one forward pass for every request that has not ended: one dispatch in jdllm, one dispatch per request in PyTorch. After
a warm-up the engines take turns, each first equally often; times are the median over repetitions.

    device share   union of the operations' intervals / unprofiled wall time (benchmarks.device_share)
    GFLOP/s        needed operations (benchmarks.flops) / time; of peak: over the best float32 product of 2048 x 2048 by
                   2048 x 2048 that JAX reaches in the same process
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import cases, decoders, tables
from benchmarks.cases import Case, Request
from benchmarks.device_share import jax_busy_seconds, torch_busy_seconds
from benchmarks.flops import step_flops, visible_pairs
from benchmarks.machine import matrix_peak, provenance
from benchmarks.torch_loop import TorchModel, TorchRequest, take_turns
from jdllm.buckets import choose_bucket
from jdllm.config import EngineConfig
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine

SETTLE_SECONDS = 0.05
"""Pause before a timed run: the other engine's idle threads spin for some milliseconds before they sleep."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What the decoder's rules demand for a batch, counted from the passes of the PyTorch loop.

    Attributes:
        steps: of the longest request.
        tokens: generated positions, all requests.
        needed: window positions, all requests and steps.
        flops: needed operations.
        widths: int [steps, rows], the window of each row in each step, 0 once it has ended.
        ids: what each request generated.
        nfe: forward passes of each request.
    """

    steps: int
    tokens: int
    needed: int
    flops: int
    widths: np.ndarray
    ids: list[list[int]]
    nfe: list[int]


def count_work(case: Case, requests: Sequence[TorchRequest]) -> Work:
    """The work of requests that have ended."""
    widths = np.zeros((max(len(r.passes) for r in requests), len(requests)), int)
    flops = 0
    for row, request in enumerate(requests):
        for i, p in enumerate(request.passes):
            widths[i, row] = p.end - p.start
            pairs = visible_pairs(request.prompt_length, request.decode.block_size, p.start, p.end)
            flops += step_flops(case.model, p.end - p.start, pairs, p.masks)
    return Work(
        steps=len(widths),
        tokens=sum(len(r.ids) for r in requests),
        needed=int(widths.sum()),
        flops=flops,
        widths=widths,
        ids=[r.ids for r in requests],
        nfe=[len(r.passes) for r in requests],
    )


class PyTorch:
    """The eager loop on the requests of one batch, as the official code runs it or tuned (benchmarks.torch_loop)."""

    def __init__(self, case: Case, requests: Sequence[Request], tuned: bool = False):
        self.name = "pytorch, tuned" if tuned else "pytorch"
        self.network = TorchModel(case.params, case.model, tuned)
        self.asked = requests
        self.requests: list[TorchRequest] = []

    def prepare(self) -> None:
        self.requests = [TorchRequest(self.network, prompt, decode) for prompt, decode in self.asked]

    def run(self) -> None:
        take_turns(self.requests)

    def outcome(self) -> tuple[list[list[int]], list[int]]:
        return [r.ids for r in self.requests], [len(r.passes) for r in self.requests]

    def computed(self) -> int:
        return sum(p.end - p.start for r in self.requests for p in r.passes)

    def busy_seconds(self) -> float:
        self.prepare()
        return torch_busy_seconds(self.run)


class Jdllm:
    """jdllm's engine on the requests of one batch.

    With one step a dispatch only the buckets that these requests use are compiled, which changes no step: the engine
    chooses them from the full list too.
    """

    def __init__(self, case: Case, requests: Sequence[Request], work: Work, steps_per_dispatch: int = 1):
        longest = max(len(prompt) + decode.max_tokens for prompt, decode in requests)
        config = EngineConfig(
            max_rows=len(requests),
            max_length=-(-longest // 32) * 32,
            steps_per_dispatch=steps_per_dispatch,
        )
        self.asked = requests
        self.name = "jdllm" if steps_per_dispatch == 1 else f"jdllm, {steps_per_dispatch} steps a dispatch"
        self.engine = Engine({n: jnp.asarray(w) for n, w in case.params.items()}, case.model, config)
        if steps_per_dispatch == 1:
            used = {choose_bucket(self.engine.buckets, widths) for widths in work.widths}
            self.engine.buckets = [b for b in self.engine.buckets if b in used]
        self.engine.compile(
            lambda done, total, text: log(f"  compiled {done} of {total}: {text}") if done == total else None
        )
        self.rows: dict[Any, Any] = {}
        self._before = (0, 0)

    def prepare(self) -> None:
        self.engine.reset()
        for slot, (prompt, decode) in enumerate(self.asked):
            self.engine.insert(slot, f"row {slot}", prompt, decode)
        jax.block_until_ready(self.engine.state)
        self._before = (self.engine.counters.computed, self.engine.counters.needed)
        self.rows = {}

    def run(self) -> None:
        rows = self.engine.step()  # nothing is in flight before it, so no row yet
        while rows := self.engine.step():
            self.rows.update((row.slot, row) for row in rows)

    def outcome(self) -> tuple[list[list[int]], list[int]]:
        ordered = [self.rows[slot] for slot in range(len(self.asked))]
        return [row.canvas_ids for row in ordered], [row.nfe for row in ordered]

    def computed(self) -> int:
        return self.engine.counters.computed - self._before[0]

    def needed(self) -> int:
        return self.engine.counters.needed - self._before[1]

    def busy_seconds(self) -> float:
        self.prepare()
        return jax_busy_seconds(self.run)


Contender = PyTorch | Jdllm


def time_runs(contenders: Sequence[Contender], seconds: float, most: int) -> list[list[float]]:
    """Wall times of whole runs, one list per contender. They take turns, each first as often as the others; as many
    rounds as fit into ``seconds``, at least 2 (unless ``most`` is less), at most ``most``."""
    times: list[list[float]] = [[] for _ in contenders]
    order, until = list(range(len(contenders))), time.perf_counter() + seconds
    while (rounds := len(times[0])) < most and (rounds < 2 or time.perf_counter() < until):
        for i in order:
            contenders[i].prepare()
            time.sleep(SETTLE_SECONDS)
            begin = time.perf_counter()
            contenders[i].run()
            times[i].append(time.perf_counter() - begin)
        order = order[1:] + order[:1]
    return times


def check_equal(contender: Contender, work: Work, where: str) -> None:
    """Raise unless the contender generated the tokens of ``work`` in as many passes on as many positions."""
    ids, nfe = contender.outcome()
    for row, (got, want) in enumerate(zip(ids, work.ids, strict=True)):
        if got != want:
            raise SystemExit(f"{where}: row {row} differs between jdllm and PyTorch:\n{got}\n{want}")
    if nfe != work.nfe:
        raise SystemExit(f"{where}: forward passes differ: {nfe} and {work.nfe}")
    if isinstance(contender, Jdllm) and contender.needed() != work.needed:
        raise SystemExit(f"{where}: needed positions differ: {contender.needed()} and {work.needed}")


LONGEST_PROFILE = 15.0
"""Seconds of a run above which PyTorch is not profiled: its profiler then takes minutes for millions of operators."""


def _device_share(contender: Contender, seconds: float) -> float | None:
    if isinstance(contender, PyTorch) and seconds > LONGEST_PROFILE:
        return None
    return min(1.0, contender.busy_seconds() / seconds)


def measure(case: Case, batch: int, peak: float, seconds: float, most: int) -> list[dict[str, Any]]:
    """One row of results per contender."""
    where = f"{case.name}, batch {batch}"
    requests = case.requests[:batch]
    eager = PyTorch(case, requests)
    eager.prepare()
    eager.run()  # its warm-up, which also tells the work
    work = count_work(case, eager.requests)
    log(f"{where}: {work.steps} steps, {work.needed} positions needed")
    contenders: list[Contender] = [Jdllm(case, requests, work)]
    if case.name == "tiny" and batch == 1:
        contenders.append(Jdllm(case, requests, work, steps_per_dispatch=4))
    if batch == 1:
        contenders.append(PyTorch(case, requests, tuned=True))
    for contender in contenders:
        contender.prepare()
        contender.run()
        check_equal(contender, work, where)
    contenders.append(eager)
    rows = []
    for contender, times in zip(contenders, time_runs(contenders, seconds, most), strict=True):
        check_equal(contender, work, where)
        computed, median = contender.computed(), statistics.median(times)
        rows.append(
            {
                "engine": contender.name,
                "config": case.name,
                "batch": batch,
                "ms_per_step": 1e3 * median / work.steps,
                "ms_per_step_min": 1e3 * min(times) / work.steps,
                "repetitions": len(times),
                "steps": work.steps,
                "positions_computed": computed,
                "positions_needed": work.needed,
                "tokens": work.tokens,
                "tokens_per_second": work.tokens / median,
                "device_share": _device_share(contender, median),
                "gflops_per_second": work.flops / median / 1e9,
                "share_of_matrix_peak": work.flops / median / peak,
            }
        )
    return rows


@dataclasses.dataclass(frozen=True)
class Goal:
    """A number to reach in one configuration.

    Attributes:
        of: jdllm's row and PyTorch's -> the value.
    """

    text: str
    config: str
    batch: int
    at_least: float
    of: Callable[[dict[str, Any], dict[str, Any]], float]
    engine: str = "jdllm"


def _speedup(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    return theirs["ms_per_step"] / ours["ms_per_step"]


GOALS = (
    Goal("times as fast as PyTorch", "tiny", 1, 5, _speedup),
    Goal("device share", "tiny", 1, 0.95, lambda ours, _: ours["device_share"], engine="jdllm, 4 steps a dispatch"),
    *(Goal("times as fast as PyTorch", "compute-bound", batch, 1, _speedup) for batch in (1, 4, 16)),
    Goal("device share", "compute-bound", 1, 0.95, lambda ours, _: ours["device_share"]),
    Goal("share of the matrix peak", "compute-bound", 16, 0.7, lambda ours, _: ours["share_of_matrix_peak"]),
)


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals for which there are rows, with what was reached."""
    found = {(r["engine"], r["config"], r["batch"]): r for r in rows}
    judged = []
    for goal in GOALS:
        ours = found.get((goal.engine, goal.config, goal.batch))
        theirs = found.get(("pytorch", goal.config, goal.batch))
        if ours and theirs:
            value = goal.of(ours, theirs)
            judged.append(
                {
                    "goal": goal.text,
                    "config": goal.config,
                    "batch": goal.batch,
                    "engine": goal.engine,
                    "at_least": goal.at_least,
                    "value": value,
                    "reached": value >= goal.at_least,
                }
            )
    return judged


def table(results: dict[str, Any]) -> str:
    """Rows and goals as Markdown, and a line on the machine."""
    rows = tables.markdown(
        [
            "config",
            "batch",
            "engine",
            "ms a step",
            "tokens/s",
            "computed / needed positions",
            "device share",
            "GFLOP/s",
            "of peak",
        ],
        [
            [
                r["config"],
                r["batch"],
                r["engine"],
                f"{r['ms_per_step']:.2f}",
                f"{r['tokens_per_second']:.0f}",
                f"{r['positions_computed'] / r['positions_needed']:.2f}",
                tables.percent(r["device_share"]),
                f"{r['gflops_per_second']:.1f}",
                tables.percent(r["share_of_matrix_peak"]),
            ]
            for r in results["rows"]
        ],
    )
    goals = tables.markdown(
        ["goal", "config", "batch", "engine", "at least", "measured", "reached"],
        [
            [
                g["goal"],
                g["config"],
                g["batch"],
                g["engine"],
                g["at_least"],
                f"{g['value']:.2f}",
                "yes" if g["reached"] else "no",
            ]
            for g in results["goals"]
        ],
    )
    machine, versions = results["machine"], results["versions"]
    note = (
        f"{machine['cpu']}, {machine['cpus']} CPUs, device {machine['device']}; float32; matrix peak "
        f"{results['matrix_peak_gflops_per_second']:.0f} GFLOP/s; jax {versions['jax']}, torch {versions['torch']} "
        f"({results['threads']['torch']} threads); commit {results['commit']}; `{results['command']}`"
    )
    return "\n\n".join([rows, goals, note] if results["goals"] else [rows, note])


def log(text: str) -> None:
    """Progress; standard output is for the table alone."""
    print(text, file=sys.stderr, flush=True)


def _decoders(options: argparse.Namespace) -> None:
    count, rounds = (12, 2) if options.quick else (120, 60)
    buckets = [Bucket(1, 16), Bucket(1, 64), Bucket(16, 256)]
    results = {
        **provenance("benchmarks.step"),
        "decoders": decoders.measure_decoders(count, log),
        "generality": decoders.measure_generality(cases.tiny(), buckets, rounds),
    }
    if options.json:
        tables.write(options.json, results)
    print(decoders.table(results))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description="time of a denoising step")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--decoders", action="store_true", help="every decoder on the shipped model instead")
    parser.add_argument("--quick", action="store_true", help="two layers, small batches, 3 repetitions: a trial run")
    parser.add_argument("--config", nargs="+", choices=["tiny", "compute-bound"], default=["tiny", "compute-bound"])
    parser.add_argument("--batch", nargs="+", type=int, help="default: 1 4 16, with --quick 1 4")
    options = parser.parse_args(arguments)

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(cpus)
    if options.decoders:
        _decoders(options)
        return
    threads = {"torch": torch.get_num_threads(), "torch_interop": torch.get_num_interop_threads(), "xla": cpus}
    log(f"threads: {threads}")
    peak = matrix_peak()
    rows: list[dict[str, Any]] = []
    for name in options.config:
        if name == "tiny":
            case = cases.tiny()
        else:
            model = cases.COMPUTE_BOUND
            case = cases.compute_bound(dataclasses.replace(model, n_layers=2) if options.quick else model)
        for batch in options.batch or ((1, 4) if options.quick else (1, 4, 16)):
            rows += measure(case, batch, peak, seconds=0 if options.quick else 15, most=3 if options.quick else 30)
    results = {
        **provenance("benchmarks.step"),
        "threads": threads,
        "quick": options.quick,
        "matrix_peak_gflops_per_second": peak / 1e9,
        "goals": judge(rows),
        "rows": rows,
    }
    if options.json:
        tables.write(options.json, results)
    print(table(results))


if __name__ == "__main__":
    main()
