"""Policies on a simulated engine whose requests follow the step law: no model, no measurement, seconds for thousands.

An answer of n blocks takes s (n - 1) + B passes (benchmarks.step_law; the paper's D2F at skip threshold 1), the first
over prompt and block, the others over the blocks that are under way. A step costs ``base`` seconds and ``position``
for each position of its windows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arrivals, engine_model, tables
from benchmarks.capacity import largest_rate
from benchmarks.engine_model import Machine, Step, Work
from benchmarks.step_law import law, stride
from jdllm.config import DecodeConfig
from jdllm.serving.schedulers import parse

POLICIES = (
    "slot",
    "fixed-fill,size={slots},timeout=none",
    "fixed-fill,size={slots},timeout=0",
    "block",
    "deficit,budget=1024",
    "exclusive,theta=0.3",
)
"""What is compared unless --policy says otherwise; {slots} is the machine's number."""

DECODE = DecodeConfig(block_size=32, block_add_threshold=0.5, decoded_token_threshold=0.9, skip_threshold=1.0)
"""The paper's settings (2608.23807, 1.1)."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is simulated.

    Attributes:
        slots: of the engine.
        base, position: seconds of a step, and of each position in it. The defaults come to the paper's 24 ms a step of
            one request, most of it independent of the batch.
        arrivals: as benchmarks.arrivals.parse takes it.
        lengths: a trace file with prompt and answer lengths; None: prompts of 100 tokens, answers of 6 to 16 blocks.
        count: requests a run.
        slo: seconds.
        seed: of arrivals and lengths.
    """

    slots: int = 8
    base: float = 0.023
    position: float = 2e-5
    arrivals: str = "poisson"
    lengths: Path | None = None
    count: int = 2000
    slo: float = 25.0
    seed: int = 42


def work(prompt: int, tokens: int, decode: DecodeConfig = DECODE) -> Work:
    """A request by the step law; lengths are rounded up to whole blocks."""
    size = decode.block_size
    blocks = max(1, -(-tokens // size))
    passes, every = law(blocks, decode), stride(decode)
    begun = lambda i: min(blocks, i // every + 1)
    ended = lambda i: min(blocks, max(0, (i - size) // every + 1))
    steps = [
        Step((begun(i) - ended(i)) * size + (0 if i else prompt), i == 0, ended(i + 1) * size) for i in range(passes)
    ]
    return Work(prompt + blocks * size, blocks * size, size, {None: steps})


def works(setting: Setting) -> list[Work]:
    """The requests."""
    if setting.lengths is not None:
        trace = arrivals.read_trace(setting.lengths)[: setting.count]
        if len(trace) < setting.count or any(one.prompt is None or one.tokens is None for one in trace):
            raise ValueError(f"--lengths {setting.lengths}: {setting.count} requests with both lengths are needed")
        return [work(one.prompt or 0, one.tokens or 1) for one in trace]
    rng = np.random.default_rng(setting.seed + 1)
    return [work(100, int(blocks) * DECODE.block_size) for blocks in rng.integers(6, 17, setting.count)]


def machine(setting: Setting) -> Machine:
    return Machine(setting.slots, lambda rows, positions: setting.base + setting.position * positions)


def run(
    setting: Setting, policies: Sequence[str], loads: Sequence[float], log: Callable[[str], None]
) -> dict[str, Any]:
    """Rows of policy and load; load 1 is what ``slot`` serves at most."""
    asked, times = works(setting), arrivals.parse(setting.arrivals)
    everything = engine_model.simulate([0.0] * len(asked), asked, parse("slot"), machine(setting))
    most = len(asked) / max(one.ended for one in everything)
    rows = []
    for text in policies:
        for load in loads:
            moments = times(np.random.default_rng(setting.seed), load * most, len(asked)).tolist()
            out = engine_model.simulate(moments, asked, parse(text), machine(setting))
            latency = np.array([one.latency for one in out])
            p50, p90, p99 = np.percentile(latency, (50, 90, 99)).tolist()
            late = float(np.mean(latency > setting.slo))
            wait = float(np.mean([one.started - one.arrived for one in out]))
            first = float(np.mean([one.first - one.arrived for one in out]))
            rows.append({"policy": text, "load": load, "rate": load * most, "served": len(out), "wait": wait})
            rows[-1] |= {"ttft": first, "p50": p50, "p90": p90, "p99": p99, "violation": late}
            log(f"{text} at load {load}")
    return {"setting": _as_json(setting), "rows": rows}


def capacity(setting: Setting, policies: Sequence[str], share: float, log: Callable[[str], None]) -> dict[str, Any]:
    """Per policy, the largest rate at which ``share`` of the requests take at most the SLO."""
    asked, times, rows = works(setting), arrivals.parse(setting.arrivals), []
    for text in policies:

        def holds(rate: float, text: str = text) -> bool:
            moments = times(np.random.default_rng(setting.seed), rate, len(asked)).tolist()
            out = engine_model.simulate(moments, asked, parse(text), machine(setting))
            return sum(one.latency <= setting.slo for one in out) >= share * len(asked)

        found = largest_rate(holds, first=0.1, log=functools.partial(_tell, log, text))
        rows.append({"policy": text, "rate": found.rate, "probes": found.probes})
    return {"setting": _as_json(setting), "share": share, "rows": rows}


def _tell(log: Callable[[str], None], policy: str, line: str) -> None:
    log(f"{policy}: {line}")


def _as_json(setting: Setting) -> dict[str, Any]:
    return dataclasses.asdict(setting) | {"lengths": None if setting.lengths is None else str(setting.lengths)}


def run_table(results: dict[str, Any]) -> str:
    """Rows of ``run`` as Markdown."""
    number = "{:.2f}".format
    times = ("wait", "ttft", "p50", "p90", "p99")
    cells = [
        [r["policy"], number(r["load"]), f"{r['rate']:.3f}", *(number(r[n]) for n in times), f"{r['violation']:.1%}"]
        for r in results["rows"]
    ]
    header = ["policy", "load", "requests/s", "wait", "TTFT", "P50", "P90", "P99", "late"]
    return tables.markdown(header, cells)


def capacity_table(results: dict[str, Any]) -> str:
    """Rows of ``capacity`` as Markdown."""
    cells = [[r["policy"], f"{r['rate']:.3f}", str(len(r["probes"]))] for r in results["rows"]]
    share, slo = 100 * results["share"], results["setting"]["slo"]
    return tables.markdown(["policy", f"requests/s with {share:.0f} % in {slo:g} s", "runs"], cells)


def check(setting: Setting) -> None:
    """Raise ValueError, naming the flag, for what cannot be simulated."""
    for name, least in (("slots", 1), ("count", 2), ("base", 0), ("position", 0), ("slo", 0)):
        value = getattr(setting, name)
        if not least <= value < math.inf:
            raise ValueError(f"--{'requests' if name == 'count' else name}: {value} must be at least {least}")
    arrivals.parse(setting.arrivals)
