"""python -m benchmarks.overhead: how much of a denoising step is overhead in PyTorch, and how much is left when the
whole step is one XLA program.

    pytorch                           the official algorithm as a user runs it: eager, one request per dispatch, a
                                      canvas that grows, blocks decided in Python (benchmarks.torch_loop)
    pytorch, batched                  the same in lockstep, one forward pass for all (benchmarks.torch_batch)
    pytorch, batched, torch.compile   the forward pass compiled, blocks still decided in Python
    pytorch, batched, CUDA graphs     the forward pass captured; on CUDA only
    jdllm                             the whole step one program, with 1 and 4 steps a dispatch
    bonsai ...                        with --bonsai: another decoder, so beside jdllm in a table of its own
                                      (benchmarks.overhead_bonsai)

All decode the same requests greedily with D2F and the same float32 weights in one process; tokens and forward passes
must be equal or the run fails. After a warm-up the engines take turns, each first equally often; times are the median
over the rounds, and only stepping is timed.

    device busy       union of the operations' intervals / unprofiled wall time (benchmarks.device_share)
    dispatched/step   operations that Python called: operators in PyTorch, executables in jdllm
    computed/needed   window positions that an engine computed, padding included, over those that the decoder needs
    peak MB           weights, caches and what a run needs on top. PyTorch's allocator was watched; XLA's is what the
                      compiler laid out for the largest program used. Not told of CUDA graphs, whose temporaries lie in
                      pools of their own.

What these numbers show on a CPU and what not: docs/overhead.md.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch._dynamo.exc import TorchDynamoException

import jdllm.checkpoint
from benchmarks import overhead_bonsai, overhead_plot, tables
from benchmarks.cases import Case
from benchmarks.contenders import (
    BatchedPyTorch,
    Contender,
    Jdllm,
    PyTorch,
    Work,
    check_equal,
    count_work,
    log,
    time_runs,
)
from benchmarks.device_share import PROFILED, busy_share
from benchmarks.machine import provenance
from benchmarks.torch_batch import CapturedGraphs
from benchmarks.torch_loop import TorchModel
from jdllm import runtime, tokenizer
from jdllm.checkpoint import CheckpointError
from jdllm.config import ConfigError, ModelConfig, RequestError
from jdllm.decoders import decode_config
from jdllm.models.llada import Params
from jdllm.runtime import UsageError
from jdllm.tokenizer import Tokenizer
from jdllm.train.tasks import MAX_LINES, held_out

BATCHES = (1, 2, 4, 8, 16)
STEPS_PER_DISPATCH = (1, 4)
MOST_ROUNDS = 30

LONGEST_PROFILE = 15.0
"""Seconds of a run above which PyTorch is not profiled: its profiler then takes minutes for millions of operators."""


def open_case(folder: Path, count: int, max_tokens: int | None = None) -> tuple[Case, Params]:
    """Held-out orders as chats for a checkpoint, the one with the longest answer first, decoded as the checkpoint
    recommends; and its weights on the device.

    Raises:
        UsageError: the PyTorch loop cannot run this model.
    """
    loaded = jdllm.checkpoint.load(folder, dtype="float32")
    model = loaded.config
    if model.shifted_logits:
        raise UsageError(
            f"--model: {folder.name} shifts its logits ({model.family}), which the PyTorch loop does not know"
        )
    words = tokenizer.load(folder, model)
    given: dict[str, Any] = {"early_stop": False}
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    decode = decode_config(given, model.family, runtime.decode_defaults(loaded.meta))
    # The official loop generates whole blocks only.
    decode = dataclasses.replace(decode, max_tokens=decode.max_tokens // decode.block_size * decode.block_size)
    if not decode.max_tokens:
        raise UsageError(f"--max-tokens: fewer than the block of {decode.block_size}")
    requests = tuple((tuple(ids), decode) for ids in _prompts(words, model, count))
    longest = max(len(prompt) for prompt, _ in requests) + decode.max_tokens
    if longest > model.max_sequence_length:
        raise UsageError(
            f"--max-tokens: {longest} positions with the prompt, the model has {model.max_sequence_length}"
        )
    weights = {name: np.asarray(weight) for name, weight in loaded.params.items()}
    return Case(folder.name, model, weights, requests), loaded.params


def _prompts(words: Tokenizer | None, model: ModelConfig, count: int) -> list[list[int]]:
    """Held-out orders as chats; random ids where there is no tokenizer or no chat template."""
    tasks = sorted(held_out("test", max(count, MAX_LINES)), key=lambda task: -len(task.answer))
    messages = [task.message for task in tasks[:count]]
    if words is not None and words.chat_template is not None:
        return [words.encode_chat([{"role": "user", "content": message}]) for message in messages]
    rng = np.random.default_rng(0)
    return [rng.integers(0, min(model.mask_id, model.eos_id), 64).tolist() for _ in messages]


def measure(case: Case, batch: int, device: str, seconds: float, most: int, params: Params | None = None) -> list[Any]:
    """One row per engine, for the first ``batch`` requests."""
    where = f"{case.name}, batch {batch}"
    requests = case.requests[:batch]
    network = TorchModel(case.params, case.model, device=device)
    eager = PyTorch(case, requests, network=network)
    eager.prepare()
    eager.run()  # its warm-up, which also tells the work
    work = count_work(case, eager.requests)
    log(f"{where}: {work.steps} steps, {work.needed} positions needed")
    contenders: list[Contender] = [eager]
    refused: list[dict[str, Any]] = []
    for how in ("eager", "compiled", "graphs")[: 3 if device == "cuda" else 2]:
        batched = BatchedPyTorch(network, requests, how)
        if reason := _warm_up(batched):
            log(f"  {batched.name}: {reason}")
            refused.append({"engine": batched.name, "batch": batch, "unavailable": reason})
        else:
            contenders.append(batched)
    for steps in STEPS_PER_DISPATCH:
        contenders.append(Jdllm(case, requests, work, steps, params))
        _warm_up(contenders[-1])
    for contender in contenders:
        check_equal(contender, work, f"{where}, {contender.name}")
    times = time_runs(contenders, seconds, most)
    return [_row(c, batch, work, t, where) for c, t in zip(contenders, times, strict=True)] + refused


def _warm_up(contender: Contender) -> str | None:
    """One whole run; why torch.compile cannot work here, if it cannot."""
    contender.prepare()
    begin = time.perf_counter()
    try:
        contender.run()
        log(f"  {contender.name}: first run {time.perf_counter() - begin:.1f} s")
    except TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"torch.compile failed: {next(iter(lines), type(error).__name__)}"[:200]
    return None


def _row(contender: Contender, batch: int, work: Work, times: list[float], where: str) -> dict[str, Any]:
    check_equal(contender, work, f"{where}, {contender.name}")
    median = statistics.median(times)
    row: dict[str, Any] = {
        "engine": contender.name,
        "batch": batch,
        "ms_per_step": 1e3 * median / work.steps,
        "ms_per_step_min": 1e3 * min(times) / work.steps,
        "repetitions": len(times),
        "steps": work.steps,
        "tokens": work.tokens,
        "positions_computed": contender.computed(),
        "positions_needed": work.needed,
        "tokens_per_second": work.tokens / median,
        "device_busy": None,
        "dispatched_per_step": None,
        "peak_bytes": None,
    }
    if isinstance(contender, Jdllm):
        launches = contender.launches() / work.steps
        row |= {"dispatched_per_step": launches, "peak_bytes": contender.peak_bytes()}
        return {**row, "device_busy": busy_share(contender.busy_seconds, median)}
    if median > LONGEST_PROFILE:
        return row
    traces = [contender.trace() for _ in range(PROFILED)]
    dispatched, peak = traces[0].dispatched / work.steps, traces[0].peak_bytes
    row |= {"dispatched_per_step": dispatched, "peak_bytes": None if _hides_memory(contender) else peak}
    seconds = iter(trace.busy_seconds for trace in traces)
    return {**row, "device_busy": busy_share(lambda: next(seconds), median)}


def _hides_memory(contender: PyTorch | BatchedPyTorch) -> bool:
    """A replayed graph allocates nothing: its temporaries lie in a pool from its capture on."""
    return isinstance(contender, BatchedPyTorch) and isinstance(contender.batch.forward, CapturedGraphs)


def table(results: dict[str, Any]) -> str:
    """The rows as Markdown, and a line on the machine."""
    header = [
        "batch",
        "engine",
        "ms a step",
        "device busy",
        "dispatched/step",
        "computed/needed",
        "tokens/s",
        "peak MB",
    ]
    rows = [_cells(row) for row in sorted(results["rows"], key=lambda r: r["batch"])]
    machine, versions = results["machine"], results["versions"]
    note = (
        f"{results['model']}, {results['requests']} held-out orders, float32; {machine['cpu']}, {machine['cpus']} "
        f"CPUs, device {machine['device']}; jax {versions['jax']}, torch {versions['torch']} "
        f"({results['threads']} threads); commit {results['commit']}; `{results['command']}`"
    )
    reasons = {row["engine"]: row["unavailable"] for row in results["rows"] if "unavailable" in row}
    parts = [tables.markdown(header, rows), *(f"{engine}: {reason}" for engine, reason in reasons.items())]
    if results.get("bonsai"):
        parts.append(overhead_bonsai.table(results["bonsai"]))
    return "\n\n".join([*parts, note])


def _cells(row: dict[str, Any]) -> list[object]:
    if "unavailable" in row:
        return [row["batch"], f"{row['engine']} (not here)", *[None] * 6]
    dispatched, peak = row["dispatched_per_step"], row["peak_bytes"]
    return [
        row["batch"],
        row["engine"],
        f"{row['ms_per_step']:.2f}",
        tables.busy(row["device_busy"]),
        None if dispatched is None else f"{dispatched:.2f}" if dispatched < 10 else f"{dispatched:.0f}",
        f"{row['positions_computed'] / row['positions_needed']:.2f}",
        f"{row['tokens_per_second']:.0f}",
        None if peak is None else f"{peak / 1e6:.1f}",
    ]


def _prepare_device(device: str) -> None:
    """Make both frameworks use the device asked for, with float32 products that are float32, and tell threads.

    Raises:
        UsageError: one of the two does not see it.
    """
    if device == "cuda":
        # Both frameworks live on one GPU, and both profilers want CUPTI for themselves while they run.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("TEARDOWN_CUPTI", "1")
        flag = "--xla_enable_command_buffers_during_profiling=true"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: this build of PyTorch sees no CUDA device")
    else:
        jax.config.update("jax_platforms", "cpu")
    backend = jax.default_backend()
    if (device == "cuda") != (backend == "gpu"):
        raise UsageError(f"--device {device}: JAX runs on {backend}")
    jax.config.update("jax_default_matmul_precision", "highest")
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description="overhead of a denoising step")
    add = parser.add_argument
    add("--model", help="folder of a converted checkpoint; default: the model that comes with jdllm")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--batch", nargs="+", type=int, default=list(BATCHES), help="default: 1 2 4 8 16")
    add("--max-tokens", type=int, help="default: the checkpoint's")
    add("--seconds", type=float, default=6, help="of timing for each batch (default 6)")
    add("--bonsai", type=Path, metavar="PATH", help="a checkout of jax-ml/bonsai, whose LLaDA runs too")
    add("--json", type=Path, help="write the results to this file")
    add("--plot", type=Path, help="write a PNG")
    options = parser.parse_args(arguments)
    try:
        if options.plot:
            overhead_plot.require()  # now rather than after minutes of measuring
        _prepare_device(options.device)
        case, params = open_case(runtime.model_folder(options.model), max(options.batch), options.max_tokens)
        rows = []
        for batch in options.batch:
            rows += measure(case, batch, options.device, options.seconds, MOST_ROUNDS, params)
        results: dict[str, Any] = {
            **provenance("benchmarks.overhead"),
            "model": case.name,
            "requests": max(options.batch),
            "decode": dataclasses.asdict(case.requests[0][1]),
            "threads": torch.get_num_threads(),
            "rows": rows,
        }
        if options.bonsai:
            results["bonsai"] = overhead_bonsai.measure(options.bonsai, case, options.seconds, MOST_ROUNDS)
    except (UsageError, ConfigError, CheckpointError, RequestError) as error:
        raise SystemExit(f"benchmarks.overhead: {error}") from None
    if options.json:
        tables.write(options.json, results)
    if options.plot:
        overhead_plot.draw(rows, options.plot)
    print(table(results))


if __name__ == "__main__":
    main()
