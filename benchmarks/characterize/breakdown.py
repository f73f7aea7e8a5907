"""Fig. 9, where the wall time of a step goes: operations on the device, and everything around them (dispatch, Python,
waiting, putting requests into slots). Device work is the union of the operations' intervals (benchmarks.device_share),
set against the wall time of equal runs without the profiler; on a CPU both are the same cores."""

import statistics
from typing import Any

from benchmarks import tables
from benchmarks.characterize.runs import Progress, run_batches
from benchmarks.characterize.subject import Subject
from benchmarks.device_share import busy_share, jax_busy_seconds

LARGEST, STEPS, ROUNDS = 8, (1, 4), 5


def measure(subject: Subject, progress: Progress) -> dict[str, Any]:
    """The first LARGEST problems one by one and all together, at the paper's settings, with one step a dispatch and
    with several."""
    sizes = sorted({1, min(LARGEST, len(subject.problems))})
    cases = [(size, steps) for size in sizes for steps in STEPS]
    rows = []
    for done, (size, steps) in enumerate(cases):
        progress(done, len(cases), f"batch {size}, {steps} steps a dispatch")
        rows.append(_row(subject, size, steps))
    progress(len(cases), len(cases), "measured")
    return {"rounds": ROUNDS, "rows": rows}


def _row(subject: Subject, size: int, steps: int) -> dict[str, Any]:
    engine, decode = subject.engine(size, steps), subject.d2f()
    quiet = lambda done, total, text: None
    run = lambda: run_batches(engine, subject.prompts[:LARGEST], decode, size, quiet, "", timed=False)
    run()
    rounds = [run() for _ in range(ROUNDS)]
    wall = statistics.median(sum(batch.seconds for batch in batches) for batches in rounds)
    share = busy_share(lambda: jax_busy_seconds(run), wall) or 0.0
    count = sum(max(answer.nfe for answer in batch.answers) for batch in rounds[0])
    return {
        "batch": size,
        "steps_per_dispatch": steps,
        "steps": count,
        "ms_per_step": 1e3 * wall / count,
        "device_share": share,
        "device_ms": 1e3 * wall * min(1.0, share) / count,
        "host_ms": 1e3 * wall * max(0.0, 1 - share) / count,
    }


def text(data: dict[str, Any]) -> str:
    """The rows as Markdown."""
    return tables.markdown(
        ["batch", "steps a dispatch", "steps", "ms a step", "device ms", "host ms", "device share"],
        [
            [
                r["batch"],
                r["steps_per_dispatch"],
                r["steps"],
                *(f"{r[name]:.2f}" for name in ("ms_per_step", "device_ms", "host_ms")),
                tables.busy(r["device_share"]),
            ]
            for r in data["rows"]
        ],
    )
