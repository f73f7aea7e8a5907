"""When requests arrive: random processes, and traces of real services. Times are seconds, rates requests a second.

    poisson, gamma, static, burst   float64 times that do not decrease, a gap before the first
    read_azure, read_mooncake       what a trace file knows, from time 0; scaled() gives it another rate
    parse                           any of them by a flag's text

Traces: Azure LLM inference, 2023 and 2024 (github.com/Azure/AzurePublicDataset, CC-BY-4.0); Mooncake
(github.com/kvcache-ai/Mooncake, FAST25-release/traces), whose clock ticks about every three seconds, so that many
arrive at one moment.
"""

import dataclasses
import datetime
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

Times = Callable[[np.random.Generator, float, int], np.ndarray]
"""(rng, rate, count) -> times."""

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
"""Columns and fields of the traces: time, tokens of the prompt, tokens of the answer."""

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at: seconds since the trace's first.
        prompt: its tokens; None where the trace does not say.
        tokens: of the answer; None likewise.
    """

    at: float
    prompt: int | None = None
    tokens: int | None = None


def poisson(rng: np.random.Generator, rate: float, count: int) -> np.ndarray:
    """Times of ``count`` arrivals, ``rate`` a second."""
    _check(rate, count)
    return np.cumsum(rng.exponential(1 / rate, count))


def gamma(rng: np.random.Generator, rate: float, cv: float, count: int) -> np.ndarray:
    """Gaps from a gamma distribution with mean 1/rate and coefficient of variation ``cv``: 1 is a Poisson process in
    distribution, above it arrivals cluster. The first gap is drawn like the others."""
    _check(rate, count)
    if not 1e-3 <= cv <= 1e3:
        raise ValueError(f"cv: {cv} must be from 0.001 to 1000; for equal gaps use static")
    return np.cumsum(rng.gamma(cv**-2, cv**2 / rate, count))


def static(rate: float, count: int) -> np.ndarray:
    """Equal gaps."""
    _check(rate, count)
    return np.arange(1, count + 1) / rate


def burst(rng: np.random.Generator, rate: float, factor: float, begin: float, end: float, count: int) -> np.ndarray:
    """A Poisson process of ``rate`` that is ``factor`` times as high from ``begin`` to ``end`` (s). With factor 1 it is
    poisson with the same draws."""
    if not 0 < factor < math.inf:
        raise ValueError(f"factor: {factor} must be a number above 0")
    if not 0 <= begin < end:
        raise ValueError(f"begin, end: {begin}, {end} must be moments from 0 on, the end after the beginning")
    # On a clock that runs ``factor`` times as fast during the burst, the process is homogeneous. Back from that clock
    # in a sum of three parts none of which decreases, so that rounding cannot change the order.
    clock = poisson(rng, rate, count)
    inside = np.clip(clock - begin, 0, factor * (end - begin))
    after = np.maximum(clock - begin - factor * (end - begin), 0)
    return np.minimum(clock, begin) + inside / factor + after


def _check(rate: float, count: int) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"rate: {rate} must be a number above 0")
    if count < 0:
        raise ValueError(f"count: {count} must be at least 0")


def read_azure(path: Path) -> list[Arrival]:
    """A CSV file with the columns AZURE, in any order and among others; times to a microsecond, UTC where no zone is
    given.

    Raises:
        ValueError: naming file, line and column.
    """
    with _open(path) as file:
        names = [name.strip() for name in file.readline().split(",")]
        if absent := [name for name in AZURE if name not in names]:
            raise ValueError(f"{path}, line 1: the columns must have {', '.join(AZURE)}; {absent[0]} is not among them")
        times, prompts, tokens = (names.index(name) for name in AZURE)
        found = []
        for number, line in enumerate(file, 2):
            if not line.strip():
                continue
            # No cell of these files is quoted.
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) != len(names):
                raise ValueError(f"{path}, line {number}: {len(cells)} cells must be {len(names)}, as in the header")
            where = [f"{path}, line {number}, {name}" for name in AZURE]
            at = _moment(cells[times], where[0])
            found.append((at, _digits(cells[prompts], where[1]), _digits(cells[tokens], where[2])))
    return _from_zero(found, 1e6, path)


def read_mooncake(path: Path) -> list[Arrival]:
    """A file with a JSON object a line: ``timestamp`` in milliseconds, and the lengths, which may be left out.

    Raises:
        ValueError: naming file, line and field.
    """
    found = []
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: must be a JSON object: {error}") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{path}, line {number}: must be a JSON object, not {line.strip()[:40]}")
            where = [f"{path}, line {number}, {name}" for name in MOONCAKE]
            at = fields.get(MOONCAKE[0])
            # The bound is past any clock, and far from where doubles lose milliseconds.
            if isinstance(at, bool) or not isinstance(at, int | float) or not abs(at) < 1e15:
                raise ValueError(f"{where[0]}: {at!r} must be a number of milliseconds")
            prompt, tokens = (
                _whole(fields[name], place) if name in fields else None
                for name, place in zip(MOONCAKE[1:], where[1:], strict=True)
            )
            found.append((at, prompt, tokens))
    return _from_zero(found, 1e3, path)


def read_trace(path: Path) -> list[Arrival]:
    """A trace of either format: where the first line begins with a brace, it is Mooncake's.

    Raises:
        OSError: the file cannot be read.
        ValueError: naming file, line and field.
    """
    with _open(path) as file:
        first = next((line for line in file if line.strip()), "")
    return read_mooncake(path) if first.lstrip().startswith("{") else read_azure(path)


def scaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same arrivals on a slower or faster clock, from time 0, so that their mean gap is 1/rate."""
    _check(rate, len(arrivals))
    first, last = (arrivals[0].at, arrivals[-1].at) if arrivals else (0.0, 0.0)
    if not last > first:
        raise ValueError(f"{len(arrivals)} arrivals must come at two moments at least to have a rate")
    factor = (len(arrivals) - 1) / rate / (last - first)
    return [dataclasses.replace(one, at=(one.at - first) * factor) for one in arrivals]


def _open(path: Path) -> TextIO:
    # What is not UTF-8 becomes a value that its line's message can show.
    return open(path, encoding="utf-8-sig", errors="replace")


def _moment(text: str, where: str) -> int:
    """Microseconds since 1970, exact: a double would lose some of them."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} must be a time like 2023-11-16 18:15:46.6805900") from None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return (aware - _EPOCH) // datetime.timedelta(microseconds=1)


def _digits(text: str, where: str) -> int:
    return _whole(int(text) if re.fullmatch("[0-9]{1,18}", text) else text, where)


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}: {value!r} must be a whole number of tokens, 0 or more")
    return value


def _from_zero(found: Sequence[tuple[float, int | None, int | None]], ticks: float, path: Path) -> list[Arrival]:
    """In order of time, counted in so many ``ticks`` a second; what arrives at one moment stays in the file's order."""
    if not found:
        raise ValueError(f"{path}: must have an arrival at least; there is none in it")
    first = min(at for at, *_ in found)
    return sorted((Arrival((at - first) / ticks, *counts) for at, *counts in found), key=lambda one: one.at)


PROCESSES: dict[str, Callable[..., np.ndarray]] = {
    "poisson": poisson,
    "gamma": gamma,
    "static": lambda rng, rate, count: static(rate, count),
    "burst": burst,
}
"""By the names that a flag takes."""


def parse(text: str) -> Times:
    """Arrivals by a flag's text: ``poisson``, ``gamma:cv=2``, ``static``, ``burst:factor=2,begin=30,end=60``, or
    ``trace:FILE``, the first ``count`` arrivals of that file, scaled to ``rate``. The file is read at once.

    Raises:
        OSError: the file cannot be read.
        ValueError: naming what is unknown, missing or out of range.
    """
    name, _, rest = text.partition(":")
    if name == "trace":
        if not rest:
            raise ValueError("trace needs a file, as in trace:FILE")
        return functools.partial(_replay, read_trace(Path(rest)), rest)
    if name not in PROCESSES:
        raise ValueError(f"{name!r} is not one of {', '.join(PROCESSES)}, trace")
    known = [n for n in inspect.signature(PROCESSES[name]).parameters if n not in ("rng", "rate", "count")]
    settings: dict[str, Any] = {}
    for pair in rest.split(",") if rest else ():
        setting, equals, value = pair.partition("=")
        if not equals or setting not in known:
            raise ValueError(f"{pair!r} is no setting of {name}; known: {', '.join(known) or 'none'}, as name=value")
        try:
            settings[setting] = float(value)
        except ValueError:
            raise ValueError(f"{setting}: {value!r} must be a number") from None
    if missing := [n for n in known if n not in settings]:
        raise ValueError(f"{name} needs {', '.join(missing)}, as in {name}:{','.join(f'{n}=2' for n in missing)}")
    times: Times = lambda rng, rate, count: PROCESSES[name](rng=rng, rate=rate, count=count, **settings)
    # No arrivals, but a setting that is out of range is refused now.
    times(np.random.default_rng(), 1.0, 0)
    return times


def _replay(trace: Sequence[Arrival], path: str, rng: np.random.Generator, rate: float, count: int) -> np.ndarray:
    if not 2 <= count <= len(trace):
        raise ValueError(f"{path}: count: {count} must be from 2 to {len(trace)}, the arrivals that it has")
    return np.array([one.at for one in scaled(trace[:count], rate)])
