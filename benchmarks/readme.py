"""python -m benchmarks.readme: write the measured tables of README and docs from benchmarks/results/*.json.

A table stands between ``<!-- benchmark NAME -->`` and ``<!-- end NAME -->`` and is made from ``results/NAME.json``, so
no number in them is typed by hand. ``--check`` writes nothing and fails if a document differs.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    convert,
    costs,
    decoders,
    evaluate,
    orders,
    overhead,
    policies_report,
    server,
    shapes,
    simulate,
    step,
)
from benchmarks.machine import ROOT

RESULTS = ROOT / "benchmarks" / "results"

Tables = dict[str, Callable[[dict[str, Any]], str]]
"""By the results file's name, what makes a table of it."""

DOCUMENTS: dict[Path, Tables] = {
    ROOT / "README.md": {
        "step": step.table,
        "shapes": shapes.table,
        "orders": orders.table,
        "decoders": decoders.table,
        "server": server.table,
        "convert": convert.table,
    },
    ROOT / "docs" / "overhead.md": {"overhead": overhead.table},
    ROOT / "docs" / "characterization.md": {"evaluate": evaluate.table},
    ROOT / "docs" / "schedulers.md": {
        "table3": simulate.table,
        "fill": simulate.table,
        "costs": costs.table,
        "policies": policies_report.table,
        "agree": policies_report.table,
        "block": policies_report.table,
        "burst": policies_report.table,
        "capacity": policies_report.table,
    },
}


class MarkerError(ValueError):
    """A document has no pair of markers for a results file; the text names it."""


def rewritten(text: str, made: Tables, results: Path = RESULTS) -> str:
    """``text`` with the block of every results file that exists made anew.

    Raises:
        MarkerError: a results file has no block.
    """
    for name, table in made.items():
        file = results / f"{name}.json"
        if file.exists():
            text = _with_block(text, name, table(json.loads(file.read_text())))
    return text


def _with_block(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- benchmark {name} -->", f"<!-- end {name} -->"
    block = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not block.search(text):
        raise MarkerError(f"no block from {begin!r} to {end!r} for results/{name}.json")
    return block.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description="measured tables from results")
    parser.add_argument("--check", action="store_true", help="fail if a document differs from the results")
    options = parser.parse_args(arguments)
    for path, made in DOCUMENTS.items():
        old = path.read_text()
        try:
            new = rewritten(old, made)
        except MarkerError as error:
            raise SystemExit(f"{path.name}: {error}") from None
        if options.check and new != old:
            raise SystemExit(f"{path.name} differs from benchmarks/results; run python -m benchmarks.readme")
        if not options.check:
            path.write_text(new)


if __name__ == "__main__":
    main()
