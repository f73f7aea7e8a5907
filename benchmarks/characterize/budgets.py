"""Fig. 6 and Table I, generation budgets: what max_tokens does to latency, its tail, truncation and accuracy."""

from collections.abc import Sequence
from typing import Any

from benchmarks import tables
from benchmarks.characterize.runs import Progress, answers, run_batches
from benchmarks.characterize.statistics import spread
from benchmarks.characterize.subject import Subject
from benchmarks.step_law import law
from jdllm.runtime import UsageError


def budgets_of(subject: Subject, given: Sequence[int] | None) -> list[int]:
    """The budgets: those given, else a quarter, a half and the whole of max_tokens, in whole blocks.

    Raises:
        UsageError: one is not whole blocks, or more than max_tokens.
    """
    decode = subject.d2f()
    block, most = decode.block_size, decode.max_tokens
    if given is None:
        return sorted({max(block, most // part // block * block) for part in (4, 2, 1)})
    for budget in given:
        if budget % block or not block <= budget <= most:
            raise UsageError(
                f"--budgets: {budget} must be whole blocks of {block}, {most} tokens (--max-tokens) at most"
            )
    return sorted(set(given))


def measure(subject: Subject, progress: Progress, given: Sequence[int] | None = None) -> dict[str, Any]:
    """Every problem alone, at the paper's settings, under each budget."""
    rows = []
    for budget in budgets_of(subject, given):
        decode = subject.d2f(max_tokens=budget)
        name = f"{budget} tokens"
        found = answers(run_batches(subject.engine(1), subject.prompts, decode, 1, progress, name))
        rows.append(
            {
                "budget": budget,
                "count": len(found),
                "seconds": spread([answer.seconds for answer in found]),
                "nfe": spread([answer.nfe for answer in found]),
                "most_by_law": law(budget // decode.block_size, decode),
                "truncated": sum(answer.truncated for answer in found) / len(found),
                "accuracy": subject.accuracy(found),
            }
        )
    return {"rows": rows}


def text(data: dict[str, Any]) -> str:
    """The rows as Markdown."""
    milliseconds = lambda row, name: f"{1e3 * row['seconds'][name]:.1f}"
    header = [
        "budget",
        "n",
        "CV",
        "P50 ms",
        "P90 ms",
        "P99 ms",
        "mean NFE",
        "most NFE",
        "its law",
        "truncated",
        "right",
    ]
    return tables.markdown(
        header,
        [
            [
                r["budget"],
                r["count"],
                f"{r['seconds']['cv']:.2f}",
                *(milliseconds(r, name) for name in ("p50", "p90", "p99")),
                f"{r['nfe']['mean']:.1f}",
                f"{r['nfe']['most']:.0f}",
                r["most_by_law"],
                tables.percent(r["truncated"]),
                tables.percent(r["accuracy"]),
            ]
            for r in data["rows"]
        ],
    )
