"""The largest arrival rate that a server, simulated or real, sustains within its SLO. Rates are requests a second."""

import dataclasses
import math
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What a search found.

    Attributes:
        rate: the largest that held; 0 if none did.
        probes: every rate that was tried and whether it held, in order.
    """

    rate: float
    probes: tuple[tuple[float, bool], ...]

    @property
    def failed(self) -> float | None:
        """The smallest rate that did not hold; none if the search went to its upper end."""
        return min((rate for rate, held in self.probes if not held), default=None)


def largest_rate(
    holds: Callable[[float], bool],
    first: float,
    precision: float = 0.05,
    least: float = 1e-3,
    most: float = 1e6,
    log: Callable[[str], None] = lambda text: None,
) -> Capacity:
    """Double the rate from ``first`` until the SLO fails (halve it until it holds, if it fails at once), then bisect.

    Every rate is tried once, so all that held lie below all that failed, and the answer is a rate that held when tried,
    with one at most ``precision`` above it that failed when tried. Where ``holds`` is noisy (a live server, a short
    simulation) that is a point on the slope between rates that always hold and rates that never do; a failure by bad
    luck far below it is never tried again, and makes the answer too small. Give every rate the same random stream, or
    let ``holds`` ask several runs. Where it is not monotone (fixed-fill batches fail on a quiet server too), begin at a
    rate that holds: the answer is then an upper end of the rates that do.

    Args:
        first: where to begin.
        precision: largest relative distance between what held and what failed.
        least: the search gives up when this fails. A run of so many requests at a low rate takes long.
        most: the search ends when this holds.
        log: told each probe in a line.
    """
    if not 1e-9 <= least <= first <= most < math.inf:
        raise ValueError(f"first: {first} must be a rate from least ({least}, 1e-9 or more) to most ({most}, finite)")
    if not 1e-6 <= precision <= 1:
        raise ValueError(f"precision: {precision} must be from 0.000001 to 1, relative to the rate")
    probes: list[tuple[float, bool]] = []
    held, failed, rate = 0.0, math.inf, first
    while True:
        probes.append((rate, bool(holds(rate))))
        log(f"{rate:.4g} requests/s: {'holds' if probes[-1][1] else 'fails'}")
        held, failed = (rate, failed) if probes[-1][1] else (held, rate)
        if held == most or failed == least or failed <= (1 + precision) * held:
            return Capacity(held, tuple(probes))
        if failed == math.inf:
            rate = min(2 * held, most)
        elif held == 0:
            rate = max(failed / 2, least)
        else:
            rate = (held + failed) / 2
