"""Fig. 11, Tables II and III: fixed-fill batches at five loads, with the paper's batch times and random stream
(benchmarks.simulate). No model takes part."""

from typing import Any

from benchmarks import simulate, tables
from benchmarks.characterize.runs import Progress


def measure(progress: Progress) -> dict[str, Any]:
    """The five loads."""
    rows = [simulate.as_json(row) for row in simulate.table3()]
    progress(len(rows), len(rows), "loads simulated")
    return {"rows": rows, "limit": simulate.LIMIT}


def text(data: dict[str, Any]) -> str:
    """The rows as Markdown; T_min is Table II's column."""
    late = f"above {data['limit']:.0f} s"
    return tables.markdown(
        ["load", "requests/s", "P50", "P90", "P99", late, "T_min"],
        [
            [
                f"{r['rho']:.2f}",
                f"{r['lambda']:.3f}",
                *(f"{r[name]:.1f}" for name in ("p50", "p90", "p99")),
                f"{100 * r['violation']:.0f} %",
                f"{r['t_min']:.1f}",
            ]
            for r in data["rows"]
        ],
    )
