"""Figs. 3 and 5, requests decoded alone: their steps against their latency, and what foretells either.

Each problem runs twice, at skip_threshold 1 as in the paper and at 0.9. Per setting: Pearson's r of steps and latency;
the share of a straight line in the variance of steps and of latency (R squared) for signals that are known before
decoding, and for the answer's length in blocks, which is known only afterwards; how many different step counts there
are, and how many answers lie on the step law of their blocks (benchmarks.step_law).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks import tables
from benchmarks.characterize.runs import Answer, Progress, answers, run_batches
from benchmarks.characterize.signals import Signals, first_look
from benchmarks.characterize.statistics import pearson, r_squared, spread
from benchmarks.characterize.subject import Subject
from benchmarks.step_law import law, stride
from jdllm.config import DecodeConfig

SKIPS = (1.0, 0.9)

BEFORE = {
    "prompt": "prompt length",
    "confidence": "first-step confidence, mean of the block",
    "highest": "first-step confidence, highest",
    "entropy": "first-step entropy",
}
"""Signals -> how they are called."""

AFTER = {"written": "answer's length in blocks (known afterwards)"}


def measure(subject: Subject, progress: Progress) -> dict[str, Any]:
    """Every problem alone, at each skip threshold."""
    look = first_look(subject.params, subject.model, subject.d2f().block_size, subject.length)
    signals = [look(prompt) for prompt in subject.prompts]
    settings = []
    for skip in SKIPS:
        decode = subject.d2f(skip_threshold=skip)
        found = answers(run_batches(subject.engine(1), subject.prompts, decode, 1, progress, f"skip {skip:g}"))
        settings.append(_summary(decode, found, signals, subject.right(found)))
    return {"block_size": subject.d2f().block_size, "settings": settings}


def _summary(
    decode: DecodeConfig, found: Sequence[Answer], signals: Sequence[Signals], right: Sequence[bool | None]
) -> dict[str, Any]:
    rows = [
        {
            "nfe": answer.nfe,
            "seconds": answer.seconds,
            "blocks": answer.blocks,
            "written": answer.written,
            "truncated": answer.truncated,
            "right": judged,
            **dataclasses.asdict(signal),
        }
        for answer, signal, judged in zip(found, signals, right, strict=True)
    ]
    column = lambda name: [row[name] for row in rows]
    return {
        "skip_threshold": decode.skip_threshold,
        "stride": stride(decode),
        "pearson": pearson(column("nfe"), column("seconds")),
        "r_squared": {
            name: {to: r_squared(column(name), column(to)) for to in ("nfe", "seconds")} for name in (*BEFORE, *AFTER)
        },
        "nfe": spread(column("nfe")),
        "levels": sorted(set(column("nfe"))),
        "on_law": sum(answer.nfe == law(answer.blocks, decode) for answer in found) / len(found),
        "requests": rows,
    }


def text(data: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    number = lambda value: "" if value is None else f"{value:.3f}"
    steps = tables.markdown(
        ["skip", "requests", "r of NFE and latency", "mean NFE", "CV", "different counts", "on the law"],
        [
            [
                f"{s['skip_threshold']:g}",
                len(s["requests"]),
                number(s["pearson"]),
                f"{s['nfe']['mean']:.1f}",
                f"{s['nfe']['cv']:.2f}",
                len(s["levels"]),
                tables.percent(s["on_law"]),
            ]
            for s in data["settings"]
        ],
    )
    header, cells = ["signal"], [[text] for text in (BEFORE | AFTER).values()]
    for s in data["settings"]:
        for to, name in (("nfe", "NFE"), ("seconds", "latency")):
            header.append(f"R² for {name}, skip {s['skip_threshold']:g}")
            for row, signal in zip(cells, BEFORE | AFTER, strict=True):
                row.append(number(s["r_squared"][signal][to]))
    return f"{steps}\n\n{tables.markdown(header, cells)}"
