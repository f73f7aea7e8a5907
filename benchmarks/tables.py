"""Results as Markdown tables whose columns are also aligned for a terminal, and results files."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers, and the header of their column, stand to the right."""
    cells = [["" if c is None else str(c) for c in row] for row in rows]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(header))]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True))
    return "\n".join([line(header), f"|{rule}|", *map(line, cells)])


def _is_number(text: str) -> bool:
    return not text or text.replace(",", "").replace(" %", "").replace("x", "").replace(".", "").isdigit()


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f} %"


def busy(share: float | None) -> str | None:
    """A share of time as a profiler gives it, which may be above all of it."""
    return None if share is None else percent(min(1.0, share))


def write(path: Path, results: dict[str, Any]) -> None:
    """Write a results file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
