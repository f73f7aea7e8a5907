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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, decoders, tables
from benchmarks.cases import Case
from benchmarks.contenders import Jdllm, PyTorch, check_equal, count_work, log, time_runs
from benchmarks.device_share import busy_share
from benchmarks.machine import matrix_peak, provenance
from jdllm.denoise.window import Bucket

LONGEST_PROFILE = 15.0
"""Seconds of a run above which PyTorch is not profiled: its profiler then takes minutes for millions of operators."""


def _device_share(contender: PyTorch | Jdllm, seconds: float) -> float | None:
    if isinstance(contender, PyTorch) and seconds > LONGEST_PROFILE:
        return None
    return busy_share(contender.busy_seconds, seconds)


def measure(case: Case, batch: int, peak: float, seconds: float, most: int) -> list[dict[str, Any]]:
    """One row of results per contender."""
    where = f"{case.name}, batch {batch}"
    requests = case.requests[:batch]
    eager = PyTorch(case, requests)
    eager.prepare()
    eager.run()  # its warm-up, which also tells the work
    work = count_work(case, eager.requests)
    log(f"{where}: {work.steps} steps, {work.needed} positions needed")
    contenders: list[PyTorch | Jdllm] = [Jdllm(case, requests, work)]
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


def _needed_share(ours: dict[str, Any], _: dict[str, Any]) -> float:
    return ours["positions_needed"] / ours["positions_computed"]


GOALS = (
    Goal("times as fast as PyTorch", "tiny", 1, 5, _speedup),
    Goal("times as fast as PyTorch", "tiny", 16, 8, _speedup),
    *(Goal("needed / computed positions", name, 16, 0.83, _needed_share) for name in ("tiny", "compute-bound")),
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
                tables.busy(r["device_share"]),
                f"{r['gflops_per_second']:.1f}",
                tables.percent(r["share_of_matrix_peak"]),
            ]
            for r in results["rows"]
        ],
    )
    judged = judge(results["rows"])
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
            for g in judged
        ],
    )
    machine, versions = results["machine"], results["versions"]
    note = (
        f"{machine['cpu']}, {machine['cpus']} CPUs, device {machine['device']}; float32; matrix peak "
        f"{results['matrix_peak_gflops_per_second']:.0f} GFLOP/s; jax {versions['jax']}, torch {versions['torch']} "
        f"({results['threads']['torch']} threads); commit {results['commit']}; `{results['command']}`"
    )
    return "\n\n".join([rows, goals, note] if judged else [rows, note])


def _decoders(options: argparse.Namespace) -> None:
    count, rounds = (12, 2) if options.quick else (120, 300)
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
        "rows": rows,
    }
    if options.json:
        tables.write(options.json, results)
    print(table(results))


if __name__ == "__main__":
    main()
