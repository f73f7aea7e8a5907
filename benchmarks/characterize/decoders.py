"""Figs. 4 and 10, decoders: how widely their step counts vary, and how often their answers are right.

D2F's steps hang on the answer; the base decoder makes one pass a token of the canvas, however long the answer is.
"""

from typing import Any

from benchmarks import tables
from benchmarks.characterize.levels import LOWER_SKIP
from benchmarks.characterize.runs import Progress, answers, run_batches
from benchmarks.characterize.statistics import spread
from benchmarks.characterize.subject import Subject
from jdllm.config import DecodeConfig
from jdllm.decoders import TABLE

ROWS = 16
BASE = ("fast-dllm", "llada", "dream")
"""Decoders of the model without its adapter; a model's family has two of them."""


def measure(subject: Subject, progress: Progress) -> dict[str, Any]:
    """All problems with every decoder."""
    rows = min(ROWS, len(subject.problems))
    engine, base = subject.engine(rows), subject.base_engine(rows)
    runs: dict[str, tuple[Any, DecodeConfig]] = {
        "d2f, skip 1": (engine, subject.d2f()),
        f"d2f, skip {LOWER_SKIP}": (engine, subject.d2f(skip_threshold=LOWER_SKIP)),
    }
    for decoder in BASE:
        if (decoder, subject.model.family) in TABLE:
            runs[f"base, {decoder}"] = (base, subject.other(decoder))
    found = []
    for name, (runner, decode) in runs.items():
        decoded = answers(run_batches(runner, subject.prompts, decode, rows, progress, name, timed=False))
        nfe = [answer.nfe for answer in decoded]
        found.append(
            {
                "decoder": name,
                "count": len(nfe),
                "nfe": spread(nfe),
                "variance": spread(nfe)["sd"] ** 2,
                "all_nfe": nfe,
                "accuracy": subject.accuracy(decoded),
                "truncated": sum(answer.truncated for answer in decoded) / len(decoded),
            }
        )
    return {"model": subject.name, "base": subject.base_name, "rows": found}


def text(data: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rows = tables.markdown(
        ["decoder", "n", "mean NFE", "variance", "CV", "least", "most", "truncated", "right"],
        [
            [
                r["decoder"],
                r["count"],
                f"{r['nfe']['mean']:.1f}",
                f"{r['variance']:.1f}",
                f"{r['nfe']['cv']:.2f}",
                f"{r['nfe']['least']:.0f}",
                f"{r['nfe']['most']:.0f}",
                tables.percent(r["truncated"]),
                tables.percent(r["accuracy"]),
            ]
            for r in data["rows"]
        ],
    )
    return f"{rows}\n\nD2F on {data['model']}, the others on {data['base']}."
