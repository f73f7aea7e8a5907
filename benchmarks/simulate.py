"""Schedulers on simulated arrivals: python -m benchmarks.simulate table3|fill|engine|capacity [--json FILE].

    table3   fixed-fill batches of eight at five loads, as in the paper (2608.23807, Table III): its eight measured
             batch times, its random stream (seed 42 runs through the five loads in order), 5000 requests each.
             --seeds: the same for so many other seeds, to show how much of a row is luck.
    fill     the two timer rules beside it, and the closed form of the mean, over --requests arrivals a load.
    engine   policies that let rows join and leave between steps, on requests by the step law or with a trace's lengths
             (benchmarks.simulate_engine), under any arrivals (benchmarks.arrivals).
    capacity the largest rate of these at which a share of the requests keeps an SLO.

All times are seconds; ``violation`` is the share of requests that took longer than 25 s.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import batch_theory, machine, simulate_engine, tables
from benchmarks.arrivals import poisson
from benchmarks.simulator import BatchMachine, simulate
from jdllm.serving.schedulers import FixedFill, Policy
from jdllm.serving.schedulers.fixed_fill import shortest_timeout, timeout_for_stability

SIZE, LOADS, REQUESTS, SEED, LIMIT = 8, (0.30, 0.50, 0.70, 0.85, 0.95), 5000, 42, 25.0
TIMES = (
    *(7.298050760, 8.395521392, 6.539795031, 9.397448202),
    *(12.157834049, 12.024951441, 8.987331955, 5.104810279),
)
"""Seconds of the eight measured batches (the paper's repository)."""

SERVICE = 8.74
"""Their mean as the paper prints it."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One load: latencies in seconds, ``violation`` the share above LIMIT, ``t_min`` from the printed mean."""

    rho: float
    rate: float
    p50: float
    p90: float
    p99: float
    mean: float
    violation: float
    t_min: float
    fill: float


def run(policy: Policy, rho: float, rng: np.random.Generator, count: int) -> Row:
    """``count`` requests at one load; first all arrivals are drawn, then all service times."""
    rate = rho * SIZE / float(np.mean(TIMES))
    arrivals = poisson(rng, rate, count).tolist()
    draws = rng.choice(TIMES, -(-count // SIZE) if policy_fills(policy) else count)
    served = simulate(arrivals, policy, BatchMachine(SIZE, iter(draws.tolist())))
    batches = {one.started for one in served}
    latency = np.array([one.latency for one in served])
    p50, p90, p99 = np.percentile(latency, (50, 90, 99)).tolist()
    violation, mean = float(np.mean(latency > LIMIT)), float(latency.mean())
    printed = rho * SIZE / SERVICE
    return Row(
        rho, printed, p50, p90, p99, mean, violation, shortest_timeout(SERVICE, printed), len(served) / len(batches)
    )


def policy_fills(policy: Policy) -> bool:
    """Whether every batch of it is full, so that fewer service times are drawn."""
    return isinstance(policy, FixedFill) and policy.timeout is None


def table3(seed: int = SEED) -> list[Row]:
    """The five loads from one stream."""
    rng = np.random.default_rng(seed)
    return [run(FixedFill(SIZE, timeout=None), rho, rng, REQUESTS) for rho in LOADS]


def bands(seeds: int) -> list[dict[str, Any]]:
    """5 and 95 % points of each load over other seeds."""
    runs = [table3(seed) for seed in range(1000, 1000 + seeds)]
    names = ("p50", "p90", "p99", "violation")
    return [
        {"rho": rows[0].rho}
        | {name: np.percentile([getattr(row, name) for row in rows], (5, 95)).tolist() for name in names}
        for rows in zip(*runs, strict=True)
    ]


def fill_rules(count: int) -> Iterator[dict[str, Any]]:
    """Fixed fill, sealed batches and the free-server rule at each load, on the same arrivals."""
    cv = float(np.std(TIMES) / np.mean(TIMES))
    for rho in LOADS:
        rate = rho * SIZE / float(np.mean(TIMES))
        policies = {
            "fixed fill": FixedFill(SIZE, None),
            "sealed, T = twice the stable one": FixedFill(SIZE, 2 * timeout_for_stability(SERVICE, SIZE, rate), True),
            "free server, T = T_min": FixedFill(SIZE, shortest_timeout(SERVICE, rate)),
        }
        for name, policy in policies.items():
            row = run(policy, rho, np.random.default_rng(SEED), count)
            expected = (
                batch_theory.mean_latency(SIZE, rate, float(np.mean(TIMES)), cv) if policy_fills(policy) else None
            )
            yield {"policy": name, **as_json(row), "mean_in_theory": expected}


def table(results: dict[str, Any]) -> str:
    """Everything that was run, as Markdown."""
    parts, latencies = [], ("p50", "p90", "p99")
    above, number = f"above {LIMIT:.0f} s", "{:.2f}".format
    late = lambda row: f"{100 * row['violation']:.2f} %"
    spread = lambda row: [number(row[name]) for name in latencies]
    if rows := results.get("table3"):
        cells = [[number(r["rho"]), f"{r['lambda']:.3f}", *spread(r), late(r), f"{r['t_min']:.1f}"] for r in rows]
        parts.append(tables.markdown(["load", "requests/s", "P50", "P90", "P99", above, "T_min"], cells))
    if rows := results.get("bands"):
        span = lambda pair, scale=1.0: f"{scale * pair[0]:.1f} to {scale * pair[1]:.1f}"
        cells = [
            [number(r["rho"]), *(span(r[name]) for name in latencies), f"{span(r['violation'], 100)} %"] for r in rows
        ]
        parts.append(f"5 % to 95 % of {results['seeds']} other seeds:")
        parts.append(tables.markdown(["load", "P50", "P90", "P99", above], cells))
    if rows := results.get("fill"):
        theory = lambda row: "" if row["mean_in_theory"] is None else number(row["mean_in_theory"])
        cells = [
            [number(r["rho"]), r["policy"], number(r["fill"]), number(r["mean"]), theory(r), *spread(r), late(r)]
            for r in rows
        ]
        header = ["load", "policy", "mean fill", "mean", "mean in theory", "P50", "P90", "P99", above]
        parts.append(tables.markdown(header, cells))
    if rows := results.get("engine"):
        parts.append(simulate_engine.run_table(rows))
    if rows := results.get("capacity"):
        parts.append(simulate_engine.capacity_table(rows))
    return "\n\n".join([*parts, f"Seconds; commit {results['commit']}; `{results['command']}`"])


def as_json(row: Row) -> dict[str, Any]:
    """Its fields, ``rate`` under the paper's name."""
    return {"lambda" if name == "rate" else name: value for name, value in dataclasses.asdict(row).items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description="schedulers, simulated")
    commands = parser.add_subparsers(required=True, dest="what", metavar="table3|fill|engine|capacity")
    for name, text in (
        ("table3", "the paper's Table III"),
        ("fill", "rules for batches that are not full"),
        ("engine", "rows that join and leave between steps"),
        ("capacity", "the largest rate that keeps an SLO"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
        if name == "table3":
            command.add_argument("--seeds", type=int, default=0, help="so many other seeds beside it")
        elif name == "fill":
            command.add_argument("--requests", type=int, default=40_000, help="arrivals a load")
        else:
            _engine_flags(command)
    options = parser.parse_args(arguments)
    results = machine.provenance("benchmarks.simulate")
    if options.what == "fill":
        results["fill"] = list(fill_rules(options.requests))
    elif options.what == "table3":
        results["table3"] = [as_json(row) for row in table3()]
        if options.seeds:
            results |= {"seeds": options.seeds, "bands": bands(options.seeds)}
    else:
        try:
            results[options.what] = _engine(options)
        except (ValueError, OSError) as error:
            parser.error(str(error))
    if options.json:
        tables.write(options.json, results)
    print(table(results))


def _engine_flags(command: argparse.ArgumentParser) -> None:
    usual, add = simulate_engine.Setting(), command.add_argument
    add("--policy", action="append", metavar="NAME[,SETTING=VALUE]", help="as --scheduler of the server; several times")
    add("--arrivals", default=usual.arrivals, help="poisson, gamma:cv=2, static, burst:..., trace:FILE")
    add("--lengths", type=Path, metavar="FILE", help="prompt and answer lengths of a trace")
    add("--slots", type=int, default=usual.slots)
    add("--base", type=float, default=usual.base, help="seconds of a step beside its positions")
    add("--position", type=float, default=usual.position, help="seconds of a position")
    add("--requests", type=int, default=usual.count, help="a run")
    add("--slo", type=float, default=usual.slo, help="seconds")
    add("--seed", type=int, default=usual.seed)
    if command.prog.endswith("engine"):
        add("--load", action="append", type=float, help="of what slot serves at most; several times")
    else:
        add("--share", type=float, default=0.99, help="of the requests that must keep the SLO")


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    setting = simulate_engine.Setting(
        options.slots,
        options.base,
        options.position,
        options.arrivals,
        options.lengths,
        options.requests,
        options.slo,
        options.seed,
    )
    simulate_engine.check(setting)
    policies = options.policy or [text.format(slots=setting.slots) for text in simulate_engine.POLICIES]
    log = lambda text: print(text, file=sys.stderr, flush=True)
    if options.what == "capacity":
        return simulate_engine.capacity(setting, policies, options.share, log)
    return simulate_engine.run(setting, policies, options.load or LOADS[:4], log)


if __name__ == "__main__":
    main()
