"""python -m benchmarks.costs: what steps cost beside what the cost table said before, on random requests.

The engine measures every compiled size at its start and follows each call since. Here requests of many decoders and
lengths come and go; before each call the table is asked what it will cost, and afterwards told what it did.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import tables, workload
from jdllm import runtime

if TYPE_CHECKING:
    from jdllm.engine import Engine

GOAL = 0.10
"""Largest median of the relative errors."""


def measure(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """One row for each compiled size that was used at least ten times, and one for all calls."""
    from jdllm.serving.model import open_model

    model = open_model(runtime.model_folder(None), log, max_rows=workload.ROWS, max_length=workload.LENGTH)
    kinds = {kind: workload.requests(model, count, kind, seed) for kind in workload.KINDS}
    asked = [one for requests in kinds.values() for one in requests]
    random.Random(seed).shuffle(asked)
    engine = model.new_engine(log)
    calls = _run(engine, asked, random.Random(seed))
    sizes = sorted({size for size, _, _ in calls})
    rows = [_row(f"{size[0]}x{size[1]}", [call for call in calls if call[0] == size]) for size in sizes]
    return [*(row for row in rows if row["calls"] >= 10), _row("all", calls)]


Call = tuple[tuple[int, int], float, float]
"""Rows and positions, seconds predicted, seconds measured."""


def _run(engine: "Engine", asked: Sequence[workload.Request], rng: random.Random) -> list[Call]:
    """Between one and all slots busy, changing as requests come in bunches."""
    waiting, calls = list(asked), []
    predicted, allowed, running = 0.0, 1, 0
    while waiting or running:
        before = engine.last_call
        for row in engine.read():
            if not row.live:
                engine.evict(row.slot)
                running -= 1
        if engine.last_call is not None and engine.last_call is not before:
            bucket, seconds, _ = engine.last_call
            calls.append(((bucket.rows, bucket.packed), predicted, seconds))
        if rng.random() < 0.02:
            allowed = rng.randint(1, workload.ROWS)
        for slot in engine.free_slots[: max(0, min(allowed - running, len(waiting)))]:
            one = waiting.pop()
            engine.insert(slot, ("cost", len(waiting)), one.prompt_ids, one.decode)
            running += 1

        def look(passes: list) -> list[int]:
            nonlocal predicted
            if passes:
                predicted = engine.step_seconds(passes[-1].slot + 1, sum(one.width for one in passes))
            return []

        engine.dispatch(look)
    return calls


def _row(size: str, calls: Sequence[Call]) -> dict[str, Any]:
    errors = [abs(predicted / seconds - 1) for _, predicted, seconds in calls]
    return {
        "size": size,
        "calls": len(calls),
        "predicted": statistics.median(predicted for _, predicted, _ in calls),
        "measured": statistics.median(seconds for _, _, seconds in calls),
        "error": statistics.median(errors),
        "error_p90": statistics.quantiles(errors, n=10)[-1] if len(errors) > 1 else errors[0],
    }


def table(results: dict[str, Any]) -> str:
    """Rows as Markdown."""
    ms, share = (lambda seconds: f"{1e3 * seconds:.2f}"), "{:.1%}".format
    cells = [
        [r["size"], r["calls"], ms(r["predicted"]), ms(r["measured"]), share(r["error"]), share(r["error_p90"])]
        for r in results["rows"]
    ]
    header = ["rows x positions", "calls", "predicted, ms", "measured, ms", "error, median", "error, 90 %"]
    verdict = "reached" if results["rows"][-1]["error"] <= GOAL else "not reached"
    note = (
        f"Goal for the median over all calls {GOAL:.0%}: {verdict}; commit {results['commit']}; `{results['command']}`"
    )
    return f"{tables.markdown(header, cells)}\n\n{note}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description="predicted and measured step times")
    parser.add_argument("--n", type=int, default=120, help="requests of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args(arguments)
    runtime.configure()
    from benchmarks import machine  # JAX comes in here

    results = {**machine.provenance("benchmarks.costs"), "rows": measure(options.n)}
    if options.json:
        tables.write(options.json, results)
    print(table(results))


def log(text: str) -> None:
    """Progress; standard output is for the table alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
