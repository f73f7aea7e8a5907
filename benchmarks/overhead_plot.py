"""The picture of benchmarks.overhead: time, busy share and dispatched operations of a step against the batch size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jdllm.runtime import UsageError

PANELS = (
    ("ms_per_step", "ms a step", True),
    ("device_busy", "device busy share", False),
    ("dispatched_per_step", "operations dispatched from Python a step", True),
)
"""Field of a row, title, logarithmic."""


def require() -> Any:
    """matplotlib's pyplot.

    Raises:
        UsageError: it is not installed; the text names the extra that brings it.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'jdllm[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One line per engine in each panel; what is not known is left out."""
    plt = require()
    figure, axes = plt.subplots(1, len(PANELS), figsize=(5 * len(PANELS), 4), layout="constrained")
    batches = sorted({row["batch"] for row in rows})
    for axis, (field, title, logarithmic) in zip(axes, PANELS, strict=True):
        for engine in dict.fromkeys(row["engine"] for row in rows):
            points = sorted((r["batch"], r[field]) for r in rows if r["engine"] == engine and r.get(field) is not None)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=engine)
        axis.set_title(title)
        axis.set_xlabel("batch")
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        if logarithmic:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.05)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
