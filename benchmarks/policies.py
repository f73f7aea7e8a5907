"""Schedulers on a live server: python -m benchmarks.policies compare|agree|block|burst|capacity [--json FILE].

    compare    every policy under the same arrivals, at shares of what one of them can serve (--of)
    agree      every policy at shares of what it can serve itself, beside the same run simulated
    block      block cycles beside synchronized batches: short and long answers mixed, all there from the start
    burst      twice the load for a while: thresholds that follow it beside fixed ones
    capacity   the largest arrival rate at which a share of the requests keeps an SLO

The server is ``python -m jdllm.serve`` with the shipped model in sixteen slots, the client this process, both on this
machine. Requests are held-out messages; all times are seconds.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arrivals, calibrate, engine_model, live_run, policies_report, tables, workload
from benchmarks.capacity import largest_rate
from benchmarks.engine_model import Machine, Work
from benchmarks.workload import ROWS, Request
from jdllm import runtime
from jdllm.serving.schedulers import parse

LOADS = (0.3, 0.5, 0.7, 0.85)
SEED = 7
POLICIES = {
    "slot": "slot",
    "per-request": "per-request",
    "fixed fill": f"fixed-fill,size={ROWS},timeout=none",
    "fixed fill, timer": f"fixed-fill,size={ROWS},timeout=auto",
    "block": "block",
    "deficit": "deficit,budget=256",
    "exclusive": "exclusive,theta=0.3",
}
"""As ``--scheduler`` takes them. (``deadline`` does as ``slot`` where no request has a target: see ``burst``.)"""

OF = "fixed fill"
"""With a load as a share of what this can serve, ``compare`` has the utilization of 2608.23807."""

WARM = 2 * ROWS
"""Requests at the start of a run of ``agree`` that do not count: a timer that follows arrivals and service times knows
those of the run before until it has seen some of this one's."""

LOAD, BURST = 0.7, 2.0
THRESHOLDS = (0.9999, 0.999, 0.99, 0.9)
"""What ``burst`` compares: the first is asked for, the others are the candidates."""
MARGIN = 1.5


def prepare(count: int, kind: str, thresholds: Sequence[float] = ()) -> tuple[list[Request], list[Work]]:
    """Requests and what each does, recorded on an engine of this process."""
    from jdllm.serving.model import open_model

    model = open_model(runtime.model_folder(None), quiet, max_rows=ROWS, max_length=workload.LENGTH)
    asked = workload.requests(model, count, kind)
    engine = model.new_engine(quiet)
    return asked, workload.record(engine, model, asked, thresholds)


def compare(count: int, kind: str, names: Sequence[str], of: str) -> dict[str, Any]:
    """Rows of policy and load, 1 being what policy ``of`` can serve; ``slo`` is three times the median latency of a
    request alone."""
    asked, works = prepare(count, kind)
    like = calibrate.calibrate(asked, works, log)
    rate, slo = calibrate.rate_of(like, works, parse(POLICIES[of])), 3 * median_alone(like, works)
    rows: list[dict[str, Any]] = []
    for name in names:
        with live_run.server(POLICIES[name], log) as process:
            live_run.play(process.address, asked[:ROWS], [0.0] * ROWS)
            for load in LOADS:
                run = live_run.play(process.address, asked, at(load * rate, count))
                rows.append({"policy": name, "load": load, **live_run.summary(run, slo)})
                log(f"{name} at {load}: P50 {rows[-1]['p50']:.3f} s, P99 {rows[-1]['p99']:.3f} s")
    return {"rate": rate, "slo": slo, "rows": rows}


def agree(count: int, kind: str, names: Sequence[str]) -> dict[str, Any]:
    """Rows of policy and its own utilization: measured and simulated percentiles, on a machine that is like the server
    was in that run."""
    asked, works = prepare(count, kind)
    known = calibrate.calibrate(asked, works, log)
    rows: list[dict[str, Any]] = []
    for name in names:
        text = POLICIES[name]
        rate = calibrate.rate_of(known, works, parse(text))
        with live_run.server(text, log) as process:
            live_run.play(process.address, asked[:ROWS], [0.0] * ROWS)
            for load in LOADS:
                times = at(load * rate, count)
                run = live_run.play(process.address, asked, times)
                machine = calibrate.at_its_pace(run)
                found = engine_model.simulate(times, works, parse(text), machine)
                rows.append(
                    {
                        "policy": name,
                        "load": load,
                        "rate": load * rate,
                        "real": percentiles(run.answers[WARM:]),
                        "simulated": percentiles(found[WARM:]),
                        "gap": machine.gap,
                        "outside": machine.outside,
                    }
                )
                log(f"{name} at {load}: {rows[-1]['real']} s, simulated {rows[-1]['simulated']} s")
    return {"rows": rows}


def block(count: int, kind: str) -> dict[str, Any]:
    """Everything at once: one answer in five is long, the others are short. Beside the live server, the same requests
    simulated where a step costs the same however many rows are in it, as on a GPU that they do not fill."""
    asked, works = prepare(8 * count, kind)
    sizes = [work.tokens for work in works]
    short, long = np.quantile(sizes, (0.25, 0.9))
    brief = [i for i, size in enumerate(sizes) if size <= short][: count * 4 // 5]
    wide = [i for i, size in enumerate(sizes) if size >= long][: count - len(brief)]
    mixed = np.random.default_rng(SEED).permutation([*brief, *wide]).tolist()
    rows = []
    flat = Machine(ROWS, lambda rows, positions: 1.0)
    for text in (f"fixed-fill,size={ROWS},timeout=0", "block", "block,sort=false", "slot"):
        steps = calibrate.makespan(flat, [works[i] for i in mixed], parse(text))
        with live_run.server(text, log) as process:
            best: live_run.Run | None = None
            for _ in range(3):
                run = live_run.play(process.address, [asked[i] for i in mixed], [0.0] * len(mixed))
                best = run if best is None or run.seconds < best.seconds else best
            assert best is not None
            tokens = best.counted["jdllm_committed_tokens_total"]
            rows.append({"policy": text, "seconds": best.seconds, "tokens_per_second": tokens / best.seconds})
            rows[-1]["steps"] = steps
            log(f"{text}: {best.seconds:.2f} s")
    return {"requests": len(mixed), "rows": rows}


def burst(count: int, kind: str) -> dict[str, Any]:
    """Fixed thresholds and those that follow the load, on the same arrivals: LOAD of what the first threshold can
    carry, BURST times that in the middle third."""
    asked, works = prepare(count, kind)
    field = "skip_threshold" if kind == "d2f" else "threshold"
    like = calibrate.calibrate(asked, works, log)
    rate, slo = calibrate.rate_of(like, works, parse("slot")), 4 * median_alone(like, works)
    length = count / (LOAD * rate * (2 + BURST) / 3)
    times = arrivals.burst(np.random.default_rng(SEED), LOAD * rate, BURST, length / 3, 2 * length / 3, count).tolist()
    adaptive = f"deadline,thresholds={'/'.join(map(str, THRESHOLDS[1:]))},debounce=0.2"
    rows = []
    for name, text, threshold in (
        *((f"fixed {value}", "slot", value) for value in THRESHOLDS),
        ("follows the load", adaptive, THRESHOLDS[0]),
        (f"the same, margin {MARGIN}", f"{adaptive},margin={MARGIN}", THRESHOLDS[0]),
    ):
        own = [workload.with_fields(one, {field: threshold, "slo_ms": 1e3 * slo}) for one in asked]
        with live_run.server(text, log) as process:
            live_run.play(process.address, own[:ROWS], [0.0] * ROWS)
            run = live_run.play(process.address, own, times)
        right = sum(a.text == one.task.answer for a, one in zip(run.answers, own, strict=True)) / count
        rows.append({"thresholds": name, "exact": right, **live_run.summary(run, slo)})
        log(f"{name}: {rows[-1]['within_slo']:.1%} within the SLO, {right:.1%} right")
    return {"rate": rate, "slo": slo, "rows": rows}


def capacity(count: int, kind: str, policy: str, slo: float, share: float) -> dict[str, Any]:
    """On the simulator, and on the live server from there."""
    asked, works = prepare(count, kind, getattr(parse(policy), "candidates", ()))
    like = calibrate.calibrate(asked, works, log)
    with live_run.server(policy, log) as process:

        def simulated(rate: float) -> bool:
            outcomes = engine_model.simulate(at(rate, count), works, parse(policy), like)
            return sum(one.latency <= slo for one in outcomes) >= share * count

        def live(rate: float) -> bool:
            return live_run.play(process.address, asked, at(rate, count)).within(slo) >= share

        first = calibrate.rate_of(like, works, parse(policy)) / 4
        found = {"simulated": largest_rate(simulated, first), "live": largest_rate(live, first)}
    rows = [{"on": name, "rate": one.rate, "probes": one.probes} for name, one in found.items()]
    return {"policy": policy, "slo": slo, "share": share, "rows": rows}


def percentiles(served: Sequence[live_run.Answer | engine_model.Outcome]) -> list[float]:
    """P50 and P99 of their latencies, seconds."""
    ordered = sorted(one.latency for one in served)
    return [live_run.percentile(ordered, percent) for percent in (50, 99)]


def at(rate: float, count: int) -> list[float]:
    """The same Poisson stream for every policy, stretched to a rate."""
    return arrivals.poisson(np.random.default_rng(SEED), rate, count).tolist()


def median_alone(like: Machine, works: Sequence[Work]) -> float:
    """Seconds."""
    found = sorted(engine_model.simulate([0.0], [work], parse("slot"), like)[0].latency for work in works)
    return live_run.percentile(found, 50)


def quiet(text: str) -> None:
    """How a model loads is not worth a line here."""


def log(text: str) -> None:
    """Progress; standard output is for the table alone."""
    print(text, file=sys.stderr, flush=True)


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "compare": compare,
    "agree": agree,
    "block": block,
    "burst": burst,
    "capacity": capacity,
}
KIND = {"burst": "threshold"}
"""What a part's requests are by default; ``dual`` for the others."""


def lines_of(doc: str) -> Iterator[tuple[str, str]]:
    """Name and text of each part, from the module's own words."""
    for line in doc.splitlines():
        name, _, text = line.strip().partition(" ")
        if name in PARTS:
            yield name, text.strip()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description="schedulers on a live server")
    commands = parser.add_subparsers(required=True, dest="what", metavar="|".join(PARTS))
    for name, text in lines_of(__doc__ or ""):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--n", type=int, default=160, help="requests a run, a multiple of 16 (default 160)")
        command.add_argument("--kind", choices=tuple(workload.KINDS), default=KIND.get(name, "dual"))
        command.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
        command.add_argument("--plot", type=Path, metavar="FILE", help="draw them (PNG or SVG)")
        if name in ("compare", "agree"):
            command.add_argument("--policy", nargs="+", choices=tuple(POLICIES), default=list(POLICIES), metavar="NAME")
        if name == "compare":
            text = f"what serves a load of 1 (default {OF})"
            command.add_argument("--of", choices=tuple(POLICIES), default=OF, help=text)
        if name == "capacity":
            command.add_argument("--scheduler", default="slot")
            command.add_argument("--slo", type=float, required=True, help="seconds")
            command.add_argument("--share", type=float, default=0.99, help="of the requests that must keep it")
    options = parser.parse_args(given)
    least = 2 * WARM if options.what == "agree" else ROWS
    if options.n < least or options.n % ROWS:
        text = f"must be a multiple of {ROWS}, since batches without a timer must fill, and at least {least}"
        parser.error(f"--n: {options.n} {text}")
    own: tuple[Any, ...] = ()
    if options.what == "capacity":
        own = (options.scheduler, options.slo, options.share)
    elif options.what == "compare":
        own = (options.policy, options.of)
    elif options.what == "agree":
        own = (options.policy,)
    runtime.configure()
    from benchmarks import machine  # JAX comes in here

    results = machine.provenance("benchmarks.policies") | {"part": options.what, "kind": options.kind}
    results |= PARTS[options.what](options.n, options.kind, *own)
    if options.json:
        tables.write(options.json, results)
    if options.plot:
        policies_report.plot(results, options.plot)
    print(policies_report.table(results))


if __name__ == "__main__":
    main()
