"""Figs. 7, 8 and 10, batches: synchronized batches against per-request dispatch, and whether a batch changes an answer.

Synchronized: B requests start together and every step is one dispatch for all that have not ended. Per-request dispatch
makes one forward pass for each request and step: the same requests through an engine of one row, whose times are added
up over the members of a batch. A step of a batch is one forward pass of its longest request, in both.

The paper says that quality does not fall with the batch size and does not measure it. Here every answer must be that of
batch size 1, token for token, or the run fails.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import tables
from benchmarks.characterize.runs import Batch, Progress, answers, run_batches
from benchmarks.characterize.subject import Subject
from jdllm.runtime import UsageError

SIZES, ROUNDS = (1, 2, 4, 8, 16), 3


def sizes_of(subject: Subject, given: Sequence[int] | None) -> list[int]:
    """Batch sizes in order, 1 always among them: those given, or as many of SIZES as there are problems for.

    Raises:
        UsageError: one is more than there are problems.
    """
    sizes = sorted({1, *(given or (size for size in SIZES if size <= len(subject.problems)))})
    if sizes[-1] > len(subject.problems):
        raise UsageError(f"--batch: {sizes[-1]} is more than the {len(subject.problems)} problems (--n)")
    return sizes


def measure(subject: Subject, progress: Progress, given: Sequence[int] | None = None) -> dict[str, Any]:
    """Each size on the same problems, at the paper's settings; the sizes take turns, times are medians of the rounds.

    Raises:
        SystemExit: an answer hangs on the batch that it was in.
    """
    decode, sizes = subject.d2f(), sizes_of(subject, given)
    runs: dict[int, list[list[Batch]]] = {size: [] for size in sizes}
    for turn in range(1, ROUNDS + 1):
        for size in sizes:
            name = f"batch {size}, round {turn} of {ROUNDS}"
            runs[size].append(run_batches(subject.engine(size), subject.prompts, decode, size, progress, name))
    check_equal(runs)
    seconds = {
        size: statistics.median(sum(batch.seconds for batch in turn) for turn in turns) for size, turns in runs.items()
    }
    rows = []
    for size in sizes:
        first, together, apart = runs[size][0], seconds[size], seconds[1]
        steps = sum(max(answer.nfe for answer in batch.answers) for batch in first)
        rows.append(
            {
                "batch": size,
                "count": len(subject.problems),
                "steps": steps,
                "computed": sum(batch.computed for batch in first) / sum(batch.needed for batch in first),
                "ms_per_step": 1e3 * together / steps,
                "ms_per_step_apart": 1e3 * apart / steps,
                "ms_per_request": 1e3 * together / len(subject.problems),
                "ms_per_request_apart": 1e3 * apart / len(subject.problems),
                "equal": len(subject.problems),
                "accuracy": subject.accuracy(answers(first)),
            }
        )
    return {"rounds": ROUNDS, "rows": rows}


def check_equal(runs: dict[int, list[list[Batch]]]) -> None:
    """Every run of every batch size gave the tokens and passes of the first alone.

    Raises:
        SystemExit: naming the batch size and the request that differs.
    """
    outcome = lambda batches: [(answer.ids, answer.nfe) for answer in answers(batches)]
    expected = outcome(runs[1][0])
    for size, turns in runs.items():
        for turn in turns:
            for number, (here, there) in enumerate(zip(outcome(turn), expected, strict=True)):
                if here != there:
                    raise SystemExit(f"batch size {size}: the answer to problem {number} is not that of batch size 1")


def text(data: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rows = tables.markdown(
        [
            "batch",
            "steps",
            "computed/needed",
            "ms a step",
            "ms a step, per-request dispatch",
            "ms a request",
            "times faster",
            "equal answers",
            "right",
        ],
        [
            [
                r["batch"],
                r["steps"],
                f"{r['computed']:.2f}",
                f"{r['ms_per_step']:.2f}",
                f"{r['ms_per_step_apart']:.2f}",
                f"{r['ms_per_request']:.2f}",
                f"{r['ms_per_request_apart'] / r['ms_per_request']:.2f}",
                f"{r['equal']} of {r['count']}",
                tables.percent(r["accuracy"]),
            ]
            for r in data["rows"]
        ],
    )
    return f"{rows}\n\nMedians of {data['rounds']} rounds; equal: the tokens and passes of batch size 1."
