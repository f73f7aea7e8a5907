"""What the step benchmarks let compete: jdllm's engine and the PyTorch loops on the same requests, and how they take
turns. All must give the tokens of the official loop, in as many passes."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Case, Request
from benchmarks.device_share import TorchTrace, jax_busy_seconds, torch_busy_seconds, trace_torch
from benchmarks.flops import step_flops, visible_pairs
from benchmarks.torch_batch import TorchBatch
from benchmarks.torch_loop import TorchModel, TorchRequest, take_turns
from jdllm.buckets import choose_bucket
from jdllm.config import EngineConfig
from jdllm.engine import Engine
from jdllm.models.llada import Params

SETTLE_SECONDS = 0.05
"""Pause before a timed run: the other engine's idle threads spin for some milliseconds before they sleep."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What the decoder's rules demand for a batch, counted from the passes of the PyTorch loop.

    Attributes:
        steps: of the longest request.
        tokens: generated positions, all requests.
        needed: window positions, all requests and steps.
        flops: needed operations.
        widths: int [steps, rows], the window of each row in each step, 0 once it has ended.
        ids: what each request generated.
        nfe: forward passes of each request.
    """

    steps: int
    tokens: int
    needed: int
    flops: int
    widths: np.ndarray
    ids: list[list[int]]
    nfe: list[int]


def count_work(case: Case, requests: Sequence[TorchRequest]) -> Work:
    """The work of requests that have ended."""
    widths = np.zeros((max(len(r.passes) for r in requests), len(requests)), int)
    flops = 0
    for row, request in enumerate(requests):
        for i, p in enumerate(request.passes):
            widths[i, row] = p.end - p.start
            pairs = visible_pairs(request.prompt_length, request.decode.block_size, p.start, p.end)
            flops += step_flops(case.model, p.end - p.start, pairs, p.masks)
    return Work(
        steps=len(widths),
        tokens=sum(len(r.ids) for r in requests),
        needed=int(widths.sum()),
        flops=flops,
        widths=widths,
        ids=[r.ids for r in requests],
        nfe=[len(r.passes) for r in requests],
    )


class PyTorch:
    """The eager loop on the requests of one batch, as the official code runs it or tuned (benchmarks.torch_loop).
    ``network`` shares the weights of another contender."""

    def __init__(self, case: Case, requests: Sequence[Request], tuned: bool = False, network: TorchModel | None = None):
        self.name = "pytorch, tuned" if tuned else "pytorch"
        self.network = network or TorchModel(case.params, case.model, tuned)
        self.asked = requests
        self.requests: list[TorchRequest] = []

    def prepare(self) -> None:
        self.requests = [TorchRequest(self.network, prompt, decode) for prompt, decode in self.asked]

    def run(self) -> None:
        take_turns(self.requests)

    def outcome(self) -> tuple[list[list[int]], list[int]]:
        return [r.ids for r in self.requests], [len(r.passes) for r in self.requests]

    def computed(self) -> int:
        return sum(p.end - p.start for r in self.requests for p in r.passes)

    def busy_seconds(self) -> float:
        self.prepare()
        return torch_busy_seconds(self.run)

    def trace(self) -> TorchTrace:
        """A run under the profiler; memory with the weights and what each request keeps from the start."""
        self.prepare()
        traced = trace_torch(self.run, self.network.device.type == "cuda")
        own = weight_bytes(self.network) + sum(r.bias.nbytes for r in self.requests)
        return dataclasses.replace(traced, peak_bytes=traced.peak_bytes + own)


class BatchedPyTorch:
    """The loop in lockstep on the requests of one batch (benchmarks.torch_batch)."""

    def __init__(self, network: TorchModel, requests: Sequence[Request], how: str):
        self.name = {"eager": "pytorch, batched", "compiled": "pytorch, batched, torch.compile"}.get(
            how, "pytorch, batched, CUDA graphs"
        )
        self.network = network
        self.batch = TorchBatch(network, requests, how)

    def prepare(self) -> None:
        self.batch.reset()

    def run(self) -> None:
        while self.batch.step():
            pass

    def outcome(self) -> tuple[list[list[int]], list[int]]:
        return [row.ids for row in self.batch.rows], [len(row.passes) for row in self.batch.rows]

    def computed(self) -> int:
        return self.batch.computed

    def trace(self) -> TorchTrace:
        """A run under the profiler; memory with the weights and the cache."""
        self.prepare()
        traced = trace_torch(self.run, self.network.device.type == "cuda")
        return dataclasses.replace(
            traced, peak_bytes=traced.peak_bytes + weight_bytes(self.network) + self.batch.state_bytes
        )


def weight_bytes(network: TorchModel) -> int:
    return sum(weight.nbytes for weight in network.params.values())


class Jdllm:
    """jdllm's engine on the requests of one batch.

    Only the buckets that the steps of these requests choose are compiled. With one step a dispatch that changes no
    step: the engine chooses them from the full list too. With several, a row that outgrows the bucket of its call waits
    for the next, so that a step may want a bucket that is not among them, and takes the next larger one. ``params``
    shares the weights of another contender.
    """

    def __init__(
        self,
        case: Case,
        requests: Sequence[Request],
        work: Work,
        steps_per_dispatch: int = 1,
        params: Params | None = None,
    ):
        longest = max(len(prompt) + decode.max_tokens for prompt, decode in requests)
        config = EngineConfig(
            max_rows=len(requests),
            max_length=-(-longest // 32) * 32,
            steps_per_dispatch=steps_per_dispatch,
        )
        self.asked = requests
        self.name = "jdllm" if steps_per_dispatch == 1 else f"jdllm, {steps_per_dispatch} steps a dispatch"
        self.params = params or {name: jnp.asarray(weight) for name, weight in case.params.items()}
        self.engine = Engine(self.params, case.model, config)
        used = {choose_bucket(self.engine.buckets, widths) for widths in work.widths}
        self.engine.buckets = [b for b in self.engine.buckets if b in used]
        self.engine.compile(
            lambda done, total, text: log(f"  compiled {done} of {total}: {text}") if done == total else None
        )
        self.rows: dict[Any, Any] = {}
        self._before = (0, 0, 0)

    def prepare(self) -> None:
        self.engine.reset()
        for slot, (prompt, decode) in enumerate(self.asked):
            self.engine.insert(slot, f"row {slot}", prompt, decode)
        jax.block_until_ready(self.engine.state)
        self._before = (self.engine.counters.computed, self.engine.counters.needed, self.engine.counters.calls)
        self.rows = {}

    def run(self) -> None:
        rows = self.engine.step()  # nothing is in flight before it, so no row yet
        while rows := self.engine.step():
            self.rows.update((row.slot, row) for row in rows)

    def outcome(self) -> tuple[list[list[int]], list[int]]:
        ordered = [self.rows[slot] for slot in range(len(self.asked))]
        return [row.canvas_ids for row in ordered], [row.nfe for row in ordered]

    def computed(self) -> int:
        return self.engine.counters.computed - self._before[0]

    def needed(self) -> int:
        return self.engine.counters.needed - self._before[1]

    def busy_seconds(self) -> float:
        self.prepare()
        return jax_busy_seconds(self.run)

    def launches(self) -> int:
        """Executables that Python launched in the last run; nothing else is launched between them."""
        return self.engine.counters.calls - self._before[2]

    def peak_bytes(self) -> int:
        """Weights, state and temporaries of the largest program, as XLA laid them out; not measured."""
        memory = (self.engine.memory(bucket) for bucket in self.engine.buckets)
        return sum(weight.nbytes for weight in self.engine.params.values()) + max(map(sum, memory))


Contender = PyTorch | BatchedPyTorch | Jdllm


def time_runs(contenders: Sequence[Contender], seconds: float, most: int) -> list[list[float]]:
    """Wall times of whole runs, one list per contender. They take turns, each first as often as the others; as many
    rounds as fit into ``seconds``, at least 2 (unless ``most`` is less), at most ``most``."""
    times: list[list[float]] = [[] for _ in contenders]
    order, until = list(range(len(contenders))), time.perf_counter() + seconds
    while (rounds := len(times[0])) < most and (rounds < 2 or time.perf_counter() < until):
        for i in order:
            contenders[i].prepare()
            time.sleep(SETTLE_SECONDS)
            begin = time.perf_counter()
            contenders[i].run()
            times[i].append(time.perf_counter() - begin)
        order = order[1:] + order[:1]
    return times


def check_equal(contender: Contender, work: Work, where: str) -> None:
    """Raise unless the contender generated the tokens of ``work`` in as many passes on as many positions."""
    ids, nfe = contender.outcome()
    for row, (got, want) in enumerate(zip(ids, work.ids, strict=True)):
        if got != want:
            raise SystemExit(f"{where}: row {row} differs between jdllm and PyTorch:\n{got}\n{want}")
    if nfe != work.nfe:
        raise SystemExit(f"{where}: forward passes differ: {nfe} and {work.nfe}")
    if isinstance(contender, Jdllm) and contender.needed() != work.needed:
        raise SystemExit(f"{where}: needed positions differ: {contender.needed()} and {work.needed}")


def log(text: str) -> None:
    """Progress; standard output is for the table alone."""
    print(text, file=sys.stderr, flush=True)
