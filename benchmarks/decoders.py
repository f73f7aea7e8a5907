"""Every decoder on the shipped model, its D2F adapter beside the weights: python -m benchmarks.step --decoders.

Held-out messages go through sixteen slots of one engine, first one decoder after the other, then all of them shuffled
into one batch, which must give the same tokens in as many passes. A second table says what generality costs: the step
as it is, beside the same step compiled for D2F rows alone (their settings are constants, so that XLA drops every rule
that they do not use), on the same rows.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdllm.checkpoint
from benchmarks import tables
from benchmarks.cases import Case
from jdllm.batch import Asked, decode_all
from jdllm.config import DecodeConfig, EngineConfig
from jdllm.convert.adapter import read_adapter
from jdllm.denoise.request import placed, request
from jdllm.denoise.state import State, empty_state, insert
from jdllm.denoise.step import steps
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine, Row
from jdllm.runtime import SHIPPED
from jdllm.train import evaluate, tokenizer
from jdllm.train.tasks import Task, held_out

ADAPTER = 1
DECODERS: dict[str, dict[str, Any]] = {
    "d2f": {"adapter": ADAPTER},
    "fast-dllm, prefix cache": {"decoder": "fast-dllm"},
    "fast-dllm, dual cache": {"decoder": "fast-dllm", "cache": "dual"},
    "fast-dllm, no cache": {"decoder": "fast-dllm", "cache": "none"},
    "llada": {"decoder": "llada"},
}
"""Decoders of a LLaDA at their default settings (of Fast-dLLM all caches)."""

GENERALITY = ("ms_general", "ms_d2f_alone", "ratio", "ratio_of_fastest")

Name = tuple[str, int]
"""Decoder and number of the message."""

Outcome = dict[Name, tuple[list[int], int]]
"""Answer ids and forward passes of each request."""


def open_engine() -> Engine:
    """The shipped base model and its adapter, unmerged."""
    base = jdllm.checkpoint.load(SHIPPED / "orders-base")
    adapter = read_adapter("d2f", SHIPPED / "orders-d2f-lora", base.config)
    engine = Engine(base.params, base.config, EngineConfig(evaluate.ROWS, evaluate.LENGTH), [adapter])
    engine.compile()
    return engine


def run(engine: Engine, requests: Sequence[tuple[Name, list[int], DecodeConfig]]) -> Outcome:
    """Decode all requests, each taking the next free slot."""
    ended = decode_all(engine, [Asked(*request) for request in requests])
    return {handle: (row.ids, row.nfe) for handle, row in ended if isinstance(row, Row)}  # type: ignore[misc]


def measure_decoders(count: int, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per decoder, and one for all of them in one batch.

    Raises:
        SystemExit: a request gave other tokens among others than among its like.
    """
    engine, tasks = open_engine(), held_out("test", count)
    text = tokenizer.build()
    prompts = [text.encode(tokenizer.prompt_text(task.message)).ids for task in tasks]
    rows, apart, everything = [], Outcome(), []
    for name, settings in DECODERS.items():
        decode = DecodeConfig(**{**evaluate.DEFAULTS, **settings})
        requests = [((name, i), prompt, decode) for i, prompt in enumerate(prompts)]
        run(engine, requests[: evaluate.ROWS])
        row, outcome = _timed(engine, requests, tasks, name)
        rows.append(row)
        apart |= outcome
        everything += requests
        log(f"  {name}: {row['nfe']:.1f} passes")
    random.Random(0).shuffle(everything)
    row, together = _timed(engine, everything, tasks, "all in one batch")
    if together != apart:
        raise SystemExit("a row's tokens or passes differ among neighbours of other decoders")
    return [*rows, row]


def _timed(
    engine: Engine, requests: Sequence[tuple[Name, list[int], DecodeConfig]], tasks: Sequence[Task], name: str
) -> tuple[dict[str, Any], Outcome]:
    before, begin = engine.counters.steps, time.perf_counter()
    outcome = run(engine, requests)
    seconds, calls = time.perf_counter() - begin, engine.counters.steps - before
    by_task: dict[str, list[evaluate.Decoded]] = {}
    for (decoder, _), (ids, nfe) in sorted(outcome.items()):
        by_task.setdefault(decoder, []).append(evaluate.Decoded(ids, nfe))
    scored = [evaluate.score(tasks, d, decoded, by_length=False)[0] for d, decoded in by_task.items()]
    mean = lambda pick: statistics.mean(pick(s) for s in scored)
    row = {
        "decoder": name,
        "count": len(requests),
        "exact": mean(lambda s: s.exact),
        "nfe": mean(lambda s: s.nfe),
        "tokens_per_nfe": mean(lambda s: s.tokens) / mean(lambda s: s.nfe),
        "steps": calls,
        "ms_per_step": 1e3 * seconds / calls,
        "tokens_per_second": sum(len(ids) for ids, _ in outcome.values()) / seconds,
    }
    return row, outcome


def measure_generality(case: Case, buckets: Sequence[Bucket], rounds: int = 60) -> list[dict[str, Any]]:
    """The general step and the one for D2F alone, taking turns on the same rows: the median of the ratios within the
    rounds, since what disturbs one round disturbs both."""
    return [_generality(case, bucket, rounds) for bucket in buckets]


def _generality(case: Case, bucket: Bucket, rounds: int) -> dict[str, Any]:
    S, model = 160, case.model
    params = {name: jnp.asarray(weight) for name, weight in case.params.items()}
    decode = DecodeConfig(max_tokens=128, block_size=8, skip_threshold=1.0, early_stop=False)

    def start() -> State:
        state = empty_state(model, bucket.rows, S, jnp.dtype("float32"))
        for i in range(bucket.rows):
            asked = placed(request([5] * 12, decode, model, S), i, i, i)
            state = insert(state, jnp.int32(i), asked)
        return jax.tree.map(lambda x: x.copy(), state)

    nobody = jnp.zeros(bucket.rows, bool)
    settings, schedule = (np.asarray(x) for x in (start().settings, start().schedule))

    def d2f_alone(params: Any, state: State, held: jax.Array) -> Any:
        known = dataclasses.replace(state, settings=jnp.asarray(settings), schedule=jnp.asarray(schedule))
        return steps(params, known, held, model=model, bucket=bucket)

    programs = {
        "general": jax.jit(partial(steps, model=model, bucket=bucket), donate_argnums=1)
        .lower(params, start(), nobody)
        .compile(),
        "d2f alone": jax.jit(d2f_alone, donate_argnums=1).lower(params, start(), nobody).compile(),
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    reports: dict[str, np.ndarray] = {}
    for turn in range(rounds):
        for name in sorted(programs, reverse=turn % 2 == 1):
            program, state = programs[name], start()
            for call in range(26):
                if call == 6:
                    jax.block_until_ready(state)
                    begin = time.perf_counter()
                state, report = program(params, state, nobody)
            jax.block_until_ready(report)
            times[name].append((time.perf_counter() - begin) / 20)
            reports[name] = np.asarray(report[0])
    np.testing.assert_array_equal(reports["general"], reports["d2f alone"])
    pairs = list(zip(times["general"], times["d2f alone"], strict=True))
    return {
        "rows": bucket.rows,
        "positions": bucket.packed,
        "ms_general": 1e3 * statistics.median(times["general"]),
        "ms_d2f_alone": 1e3 * statistics.median(times["d2f alone"]),
        "ratio": statistics.median(general / alone for general, alone in pairs),
        "ratio_of_fastest": min(times["general"]) / min(times["d2f alone"]),
    }


def table(results: dict[str, Any]) -> str:
    """Both tables as Markdown, and a line on the machine."""
    rows = tables.markdown(
        ["decoder", "requests", "exact match", "NFE", "tokens per NFE", "ms a step", "tokens/s"],
        [
            [
                r["decoder"],
                r["count"],
                f"{100 * r['exact']:.1f} %",
                f"{r['nfe']:.1f}",
                f"{r['tokens_per_nfe']:.1f}",
                f"{r['ms_per_step']:.2f}",
                f"{r['tokens_per_second']:.0f}",
            ]
            for r in results["decoders"]
        ],
    )
    cost = tables.markdown(
        ["rows", "positions", "ms a step", "ms compiled for D2F alone", "ratio", "of the fastest rounds"],
        [[g["rows"], g["positions"], *(f"{g[name]:.3f}" for name in GENERALITY)] for g in results["generality"]],
    )
    machine = results["machine"]
    note = f"{machine['cpu']}, {machine['cpus']} CPUs; commit {results['commit']}; `{results['command']}`"
    return "\n\n".join([rows, cost, note])
