"""Mean latency of fixed-fill batches in closed form: batches of B from a Poisson stream, one server, first come first
served. Formulas of the E_B/G/1 queue; times in seconds, rates a second."""

import math

from scipy import stats


def fill_wait(size: int, rate: float) -> float:
    """Mean wait for the rest of one's batch."""
    return (size - 1) / (2 * rate)


def wait_constant(size: int, rate: float, service: float) -> float:
    """Mean wait of a batch for the server where every batch takes ``service``, exact (Spitzer):
    sum over n of E[(nS - Erlang(nB))^+] / n."""
    total, n = 0.0, 0
    while True:
        n += 1
        mean, k = rate * n * service, n * size
        term = n * service * stats.poisson.sf(k - 1, mean) - k / rate * stats.poisson.sf(k, mean)
        total += term / n
        if term / n < 1e-9 * max(total, 1e-9):
            return total


def wait_kingman(size: int, rate: float, service: float, cv: float) -> float:
    """An upper bound where service times have a coefficient of variation ``cv``."""
    utilization = rate * service / size
    return utilization / (1 - utilization) * (1 / size + cv**2) / 2 * service


def wait_approximate(size: int, rate: float, service: float, cv: float) -> float:
    """Kraemer and Langenbach-Belz's correction of it."""
    utilization, arrivals = rate * service / size, 1 / size
    exponent = -2 * (1 - utilization) * (1 - arrivals) ** 2 / (3 * utilization * (arrivals + cv**2))
    return wait_kingman(size, rate, service, cv) * math.exp(exponent)


def mean_latency(size: int, rate: float, service: float, cv: float = 0.0) -> float:
    """E[L]: fill, wait, service."""
    wait = wait_approximate(size, rate, service, cv) if cv else wait_constant(size, rate, service)
    return fill_wait(size, rate) + wait + service
