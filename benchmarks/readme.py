"""python -m benchmarks.readme: write the measured tables of the README from benchmarks/results/*.json.

A table stands between ``<!-- benchmark NAME -->`` and ``<!-- end NAME -->`` and is made from ``results/NAME.json``, so
no number in the README is typed by hand. ``--check`` writes nothing and fails if the README differs.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import decoders, orders, server, shapes, step
from benchmarks.machine import ROOT

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"

TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": step.table,
    "shapes": shapes.table,
    "orders": orders.table,
    "decoders": decoders.table,
    "server": server.table,
}


class MarkerError(ValueError):
    """The README has no pair of markers for a results file; the text names it."""


def rewritten(text: str, results: Path = RESULTS) -> str:
    """``text`` with the block of every results file that exists made anew.

    Raises:
        MarkerError: a results file has no block.
    """
    for name, table in TABLES.items():
        file = results / f"{name}.json"
        if file.exists():
            text = _with_block(text, name, table(json.loads(file.read_text())))
    return text


def _with_block(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- benchmark {name} -->", f"<!-- end {name} -->"
    block = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not block.search(text):
        raise MarkerError(f"the README has no block from {begin!r} to {end!r} for results/{name}.json")
    return block.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description="README tables from results")
    parser.add_argument("--check", action="store_true", help="fail if the README differs from the results")
    options = parser.parse_args(arguments)
    old = README.read_text()
    try:
        new = rewritten(old)
    except MarkerError as error:
        raise SystemExit(str(error)) from None
    if options.check and new != old:
        raise SystemExit("README.md differs from benchmarks/results; run python -m benchmarks.readme")
    if not options.check:
        README.write_text(new)


if __name__ == "__main__":
    main()
