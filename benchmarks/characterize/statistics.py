"""The few statistics that the figures need: correlation, and how values spread."""

from collections.abc import Sequence

import numpy as np


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's r; None where either does not vary (or there are fewer than two values)."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values beside {len(y)}")
    if len(x) < 2 or min(x) == max(x) or min(y) == max(y):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def r_squared(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Share of the variance of ``y`` that a straight line in ``x`` explains; None where either does not vary."""
    r = pearson(x, y)
    return None if r is None else r * r


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, population standard deviation and its share of the mean (``cv``), percentiles and extremes.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    mean, sd = float(np.mean(values)), float(np.std(values))
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    cv = sd / mean if mean else 0.0
    least, most = float(min(values)), float(max(values))
    return {"mean": mean, "sd": sd, "cv": cv, "p50": p50, "p90": p90, "p99": p99, "least": least, "most": most}
