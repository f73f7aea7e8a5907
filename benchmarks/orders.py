"""python -m benchmarks.orders: exact match of the shipped model on held-out messages, by decoder, answer length and
skip threshold (jdllm.train.evaluate), with the provenance of a results file."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.machine import provenance
from jdllm.runtime import SHIPPED
from jdllm.train import evaluate


def table(results: dict[str, Any]) -> str:
    """Markdown from a results file."""
    rows = tables.markdown(
        ["decoder", "answers", "n", "exact match", "tokens", "NFE", "most NFE", "tokens per NFE"],
        [
            [
                r["decoder"],
                r["answers"],
                r["count"],
                f"{100 * r['exact']:.1f} %",
                f"{r['tokens']:.1f}",
                f"{r['nfe']:.1f}",
                r["most_nfe"],
                f"{r['tokens_per_step']:.1f}",
            ]
            for r in results["rows"]
        ],
    )
    return f"{rows}\n\nMeans over answers; commit {results['commit']}; `{results['command']}`"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orders", description="accuracy of the shipped model")
    parser.add_argument("--n", type=int, default=240, help="held-out messages")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    found = evaluate.evaluate(SHIPPED / "orders-base", SHIPPED / "orders-d2f", options.n, "test")
    rows = [{**dataclasses.asdict(row), "tokens_per_step": row.tokens_per_step} for row in found]
    results = {**provenance("benchmarks.orders"), "rows": rows}
    if options.json:
        tables.write(options.json, results)
    print(table(results))


if __name__ == "__main__":
    main()
