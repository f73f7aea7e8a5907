"""The figures, one file a part. matplotlib is imported only here, and only when something is drawn."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.characterize.levels import PAPER
from benchmarks.characterize.requests import AFTER, BEFORE
from benchmarks.step_law import law
from jdllm.config import DecodeConfig
from jdllm.runtime import UsageError


def check_available() -> None:
    """Raise UsageError, naming the extra, if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError(
            "plots need matplotlib, which is in the extra `bench`: pip install -e '.[bench]' (or give --no-plots)"
        ) from None


def save(draw: Callable[[Any, Any], None], panels: int, data: dict[str, Any], path: Path) -> None:
    """Draw one part's data side by side on ``panels`` axes and write a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * panels, 3.6), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    draw(axes, data)
    figure.savefig(path, dpi=110)


def levels(axes: Sequence[Any], data: dict[str, Any]) -> None:
    rows = data["rows"]
    n = [row["n"] for row in rows]
    line = [row["law"] for row in rows]
    axes[0].plot(n, line, color="0.7", label=f"{data['stride']} (n - 1) + {data['block_size']}")
    axes[0].plot(n, [row["nfe"] for row in rows], "o", label="skip 1")
    lower = [row["nfe_sure_lower_skip"] for row in rows]
    axes[0].plot(n, lower, "x", label=f"large head, skip {data['lower_skip']:g}")
    _name(axes[0], "Fig. 2: step-count levels, random weights", "blocks", "forward passes")
    axes[0].legend()


def requests(axes: Sequence[Any], data: dict[str, Any]) -> None:
    scatter, counts, signals = axes
    for i, s in enumerate(data["settings"]):
        label = f"skip {s['skip_threshold']:g}"
        r = "" if s["pearson"] is None else f", r = {s['pearson']:.3f}"
        nfe = [row["nfe"] for row in s["requests"]]
        scatter.plot(nfe, [1e3 * row["seconds"] for row in s["requests"]], "o", alpha=0.6, label=label + r)
        counts.plot([row["blocks"] for row in s["requests"]], nfe, "o", alpha=0.6, label=label)
        names = [*BEFORE, *AFTER]
        shares = [s["r_squared"][name]["nfe"] or 0.0 for name in names]
        signals.barh([place + 0.4 * i for place in range(len(names))], shares, height=0.4, label=label)
    paper = DecodeConfig(**PAPER, block_size=data["block_size"])
    most = max(row["blocks"] for s in data["settings"] for row in s["requests"])
    counts.plot(range(1, most + 1), [law(n, paper) for n in range(1, most + 1)], color="0.7", label="law")
    signals.set_yticks([place + 0.2 for place in range(len(names))], names)
    signals.set_xlim(0, 1)
    _name(scatter, "Fig. 3: steps and latency", "forward passes", "ms")
    _name(counts, "Fig. 2 on this model's problems", "blocks", "forward passes")
    _name(signals, "Fig. 5: what foretells the steps", "R²", "")
    for axis in axes:
        axis.legend()


def decoders(axes: Sequence[Any], data: dict[str, Any]) -> None:
    rows = data["rows"]
    names = [row["decoder"] for row in rows]
    axes[0].boxplot([row["all_nfe"] for row in rows])
    axes[0].set_xticks(range(1, len(rows) + 1), names, rotation=15)
    _name(axes[0], "Fig. 4: step counts by decoder", "", "forward passes")
    axes[1].barh(names, [100 * (row["accuracy"] or 0.0) for row in rows])
    _name(axes[1], "Fig. 10: right answers", "%", "")


def budgets(axes: Sequence[Any], data: dict[str, Any]) -> None:
    rows = data["rows"]
    sizes = [row["budget"] for row in rows]
    for name in ("p50", "p90", "p99"):
        axes[0].plot(sizes, [1e3 * row["seconds"][name] for row in rows], "o-", label=name.upper())
    _name(axes[0], "Fig. 6: latency by budget", "max_tokens", "ms")
    axes[1].plot(sizes, [100 * row["truncated"] for row in rows], "o-", label="truncated")
    if rows[0]["accuracy"] is not None:
        axes[1].plot(sizes, [100 * row["accuracy"] for row in rows], "o-", label="right")
    _name(axes[1], "Table I: truncation and accuracy", "max_tokens", "%")
    for axis in axes:
        axis.legend()


def batches(axes: Sequence[Any], data: dict[str, Any]) -> None:
    rows = data["rows"]
    sizes = [row["batch"] for row in rows]
    for axis, name in zip(axes, ("ms_per_step", "ms_per_request"), strict=True):
        axis.plot(sizes, [row[name] for row in rows], "o-", label="synchronized")
        axis.plot(sizes, [row[f"{name}_apart"] for row in rows], "x--", label="per-request dispatch")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, sizes)
        axis.set_ylim(bottom=0)
        axis.legend(loc="lower right")
    _name(axes[0], "Fig. 7: a step", "batch size", "ms")
    _name(axes[1], "Fig. 8: a request", "batch size", "ms")


def breakdown(axes: Sequence[Any], data: dict[str, Any]) -> None:
    rows = data["rows"]
    names = [f"batch {row['batch']}, {row['steps_per_dispatch']} a dispatch" for row in rows]
    device = [row["device_ms"] for row in rows]
    axes[0].barh(names, device, label="device")
    axes[0].barh(names, [row["host_ms"] for row in rows], left=device, label="everything else")
    _name(axes[0], "Fig. 9: a step's wall time", "ms", "")
    axes[0].legend()


def scheduling(axes: Sequence[Any], data: dict[str, Any]) -> None:
    rows = data["rows"]
    for name in ("p50", "p90", "p99"):
        axes[0].plot([row["rho"] for row in rows], [row[name] for row in rows], "o-", label=name.upper())
    axes[0].axhline(data["limit"], color="0.7")
    _name(axes[0], "Fig. 11: fixed-fill batches of eight", "load", "s")
    axes[0].legend()


def _name(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
