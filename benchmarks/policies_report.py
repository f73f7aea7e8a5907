"""Results of benchmarks.policies as Markdown and as pictures."""

from pathlib import Path
from typing import Any

from benchmarks import tables

CLOSE = 0.15
"""The goal for what is simulated, relative to what was measured."""


def table(results: dict[str, Any]) -> str:
    """Rows as Markdown, and what they were measured with."""
    header, rows = {"compare": _compare, "agree": _agree, "block": _block, "burst": _burst, "capacity": _capacity}[
        results["part"]
    ](results)
    source = f"{results['machine']['cpu']}, {results['machine']['cpus']} CPUs for server and client together"
    note = f"Requests: {results['kind']}; {source}; commit {results['commit']}; `{results['command']}`"
    if results["part"] == "agree":
        note = f"{_agreement(results)} {note}"
    return f"{tables.markdown(header, rows)}\n\n{note}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


_SERVED = ["requests/s", "TTFT", "P50", "P90", "P99", "in SLO", "goodput", "tokens/NFE", "wasted"]


def _served(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['requests_per_second']:.1f}",
        *(_ms(row[name]) for name in ("ttft", "p50", "p90", "p99")),
        _percent(row["within_slo"]),
        f"{row['goodput']:.1f}",
        f"{row['tokens_per_nfe']:.2f}",
        _percent(row["wasted"]),
    ]


def _compare(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [r["policy"], f"{r['load']:.2f}", *_served(r), f"{r['widest']} ({_ms(r['widest_seconds'])})"]
        for r in results["rows"]
    ]
    return ["policy", "load", *_SERVED, "widest step"], rows


def _agree(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for r in results["rows"]:
        cells = [r["policy"], f"{r['load']:.2f}", f"{r['rate']:.1f}"]
        for real, model in zip(r["real"], r["simulated"], strict=True):
            cells += [_ms(real), _ms(model), f"{100 * (model / real - 1):+.0f} %"]
        rows.append(cells)
    return ["policy", "load", "requests/s", "P50", "simulated", "off", "P99", "simulated", "off"], rows


def _agreement(results: dict[str, Any]) -> str:
    """How many percentiles are simulated as well as they should be."""
    pairs = [pair for r in results["rows"] for pair in zip(r["real"], r["simulated"], strict=True)]
    near = sum(abs(model / real - 1) <= CLOSE for real, model in pairs)
    return f"Within {100 * CLOSE:.0f} %: {near} of {len(pairs)}."


def _block(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows, first = [], results["rows"][0]
    for r in results["rows"]:
        live, flat = r["tokens_per_second"] / first["tokens_per_second"], first["steps"] / r["steps"]
        cells = [
            f"{r['seconds']:.2f}",
            f"{r['tokens_per_second']:.0f}",
            f"{live:.2f}x",
            f"{r['steps']:.0f}",
            f"{flat:.2f}x",
        ]
        rows.append([r["policy"], *cells])
    return ["policy", "seconds", "tokens/s", "of the first", "steps if all cost the same", "gain"], rows


def _burst(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [[r["thresholds"], _percent(r["exact"]), *_served(r)] for r in results["rows"]]
    return ["thresholds", "right", *_SERVED], rows


def _capacity(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [[r["on"], f"{r['rate']:.1f}", str(len(r["probes"]))] for r in results["rows"]]
    share = f"requests/s with {100 * results['share']:.0f} % in {_ms(results['slo'])} ms"
    return ["on", share, "runs"], rows


def plot(results: dict[str, Any], path: Path) -> None:
    """Latency over load of each policy (compare, agree), or bars.

    Raises:
        SystemExit: matplotlib is not there.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'jdllm[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = results["rows"]
    path.parent.mkdir(parents=True, exist_ok=True)
    if results["part"] in ("compare", "agree"):
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True)
        for place, (axis, name) in enumerate(zip(axes, ("P50", "P99"), strict=True)):
            for policy in dict.fromkeys(row["policy"] for row in rows):
                own = [row for row in rows if row["policy"] == policy]
                real = [1e3 * (row["real"][place] if "real" in row else row[name.lower()]) for row in own]
                [line] = axis.plot([row["load"] for row in own], real, marker="o", label=policy)
                if "simulated" in own[0]:
                    model = [1e3 * row["simulated"][place] for row in own]
                    axis.plot([row["load"] for row in own], model, linestyle="--", color=line.get_color())
            axis.set(title=f"{name} latency", xlabel="load", ylabel="ms", yscale="log")
        axes[1].legend(fontsize="small")
    else:
        figure, axis = pyplot.subplots(figsize=(6, 4))
        label = {"block": "policy", "burst": "thresholds", "capacity": "on"}[results["part"]]
        value = {"block": "tokens_per_second", "burst": "within_slo", "capacity": "rate"}[results["part"]]
        axis.barh([str(row[label]) for row in rows], [row[value] for row in rows])
        axis.set(xlabel=value.replace("_", " "))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
