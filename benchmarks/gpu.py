"""python -m benchmarks.gpu (by benchmarks/gpu.sh): milliseconds of a denoising step on one GPU at LLaDA-8B's shapes.

Random bfloat16 weights are made on the device. Every row has two blocks of 32 in flight on a canvas of 1,024 positions,
of which attention sees all places whatever the row's length, so that short prompts cost what long ones do.

    step       jdllm's whole step as the engine compiles it: batch sizes, 1 and 4 steps a dispatch, with and without
               CUDA graphs (XLA's command buffers). Chained: calls in a row, waiting once. Read: the host reads each
               report before the next call. Busy: device time (benchmarks.device_share) over the chained time.
    forward    the layers alone over a filled cache: unrolled or scanned, XLA's attention or cuDNN's
    pytorch    the official loop (benchmarks.torch_loop), one request per dispatch, prompts that fill the canvas

Needs nothing but the project, jax, flax and torch. What fails is a row that says why; what no longer fits into
``--minutes`` is one too. Weight-only int8 is not in jdllm, so there is no such row.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import tables
from benchmarks.device_share import jax_busy_seconds
from benchmarks.machine import provenance
from benchmarks.presets import LLADA_8B
from benchmarks.torch_loop import TorchModel, TorchRequest, take_turns
from jdllm.config import DecodeConfig, ModelConfig
from jdllm.denoise.request import placed, request
from jdllm.denoise.state import State, abstract_state, empty_state, insert
from jdllm.denoise.step import steps
from jdllm.denoise.window import Bucket
from jdllm.models import llada
from jdllm.models.layers import rope_tables

SMALL = dataclasses.replace(
    LLADA_8B,
    vocab_size=512,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    d_ff=128,
    mask_id=511,
    eos_id=510,
    pad_id=510,
)
"""For rehearsals."""

DECODE = DecodeConfig(
    max_tokens=64,
    block_size=32,
    block_add_threshold=0.0,
    decoded_token_threshold=1.0,
    skip_threshold=1.0,
    early_stop=False,
    stop_ids=(),
)
"""Both blocks stay in flight for 32 steps: no probability is above 1, so the first block commits one position a step
and the second, not activated, none."""

PROMPT = (5,)
PACKED = 72
"""Window positions a row: a prompt of one and two blocks, rounded up."""

COMPILING = 0.6
"""Share of the time after which programs that are not compiled are given up."""

WARM, MEASURED = 4, 24
"""Steps, together fewer than the first block has positions."""

GRAPHS_OFF: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One program of jdllm's step. ``graphs``: with CUDA graphs, XLA's default on a GPU."""

    batch: int
    per_dispatch: int
    graphs: bool

    @property
    def name(self) -> str:
        return f"step, {self.per_dispatch} a dispatch" + ("" if self.graphs else ", no CUDA graphs")


def variants(batches: Sequence[int], on_gpu: bool) -> list[Variant]:
    """All four programs at batch 1, where overhead shows most; elsewhere the default one."""
    first = [Variant(1, n, graphs) for n in (1, 4) for graphs in ((True, False) if on_gpu else (True,))]
    return [*first, *(Variant(batch, 1, True) for batch in batches if batch != 1)]


class Clock:
    """What is left of the time that the script may take."""

    def __init__(self, minutes: float):
        self.end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        return self.end - time.monotonic()


def random_params(model: ModelConfig, dtype: Any) -> llada.Params:
    """Weights made on the device, matrices at 1/sqrt(fan-in)."""
    make = jax.jit(
        lambda key, shape: jax.random.normal(key, shape, dtype) * jnp.asarray(shape[0] ** -0.5, dtype), static_argnums=1
    )
    keys = jax.random.split(jax.random.key(0), len(llada.weight_shapes(model)))
    return {
        name: jnp.ones(shape, dtype) if len(shape) == 1 else make(key, shape)
        for key, (name, shape) in zip(keys, llada.weight_shapes(model).items(), strict=True)
    }


def compile_step(model: ModelConfig, canvas: int, dtype: Any, variant: Variant) -> jax.stages.Compiled:
    """As Engine.compile does it, for one bucket."""
    bucket = Bucket(variant.batch, PACKED * variant.batch, variant.per_dispatch)
    program = jax.jit(partial(steps, model=model, bucket=bucket), donate_argnums=1)
    held = jax.ShapeDtypeStruct((variant.batch,), jnp.bool)
    lowered = program.lower(
        llada.abstract_params(model, dtype), abstract_state(model, variant.batch, canvas, dtype), held
    )
    return lowered.compile(compiler_options=None if variant.graphs else GRAPHS_OFF)


def start_state(model: ModelConfig, canvas: int, dtype: Any, batch: int) -> State:
    state = empty_state(model, batch, canvas, dtype)
    put = jax.jit(insert, donate_argnums=0)
    for i in range(batch):
        state = put(state, np.int32(i), placed(request(PROMPT, DECODE, model, canvas), i, i, i))
    return state


def measure_step(
    model: ModelConfig, canvas: int, params: llada.Params, program: jax.stages.Compiled, variant: Variant
) -> dict[str, Any]:
    """ms a step chained and read, and the busy share."""
    dtype, nobody = params["embed"].dtype, jnp.zeros(variant.batch, bool)
    calls = MEASURED // variant.per_dispatch

    def prepared() -> State:
        state = start_state(model, canvas, dtype, variant.batch)
        for _ in range(WARM // variant.per_dispatch):
            state, _ = program(params, state, nobody)
        return jax.block_until_ready(state)

    def chained(state: State) -> None:
        for _ in range(calls):
            state, report = program(params, state, nobody)
        jax.block_until_ready(report)

    def read(state: State) -> None:
        for _ in range(calls):
            state, report = program(params, state, nobody)
            np.asarray(report[0])

    seconds = {run.__name__: min(_seconds(run, prepared()) for _ in range(3)) for run in (chained, read)}
    state = prepared()
    busy = jax_busy_seconds(lambda: chained(state))
    return {
        "ms_chained": 1e3 * seconds["chained"] / MEASURED,
        "ms_read": 1e3 * seconds["read"] / MEASURED,
        "busy": busy / seconds["chained"] if busy else None,
    }


def _seconds(run: Callable[[Any], None], given: Any) -> float:
    begin = time.perf_counter()
    run(given)
    return time.perf_counter() - begin


def measure_forward(
    model: ModelConfig, canvas: int, params: llada.Params, batch: int, scanned: bool, attention: Any
) -> dict[str, Any]:
    """The layers over windows of two blocks against a cache that is full and not written."""
    dtype = params["embed"].dtype
    window = 2 * DECODE.block_size
    x = jnp.ones((batch, window, model.d_model), dtype)
    rope = rope_tables(jnp.arange(canvas - window, canvas), model.head_dim, model.rope_theta)
    cache = jnp.ones((model.n_layers, 2, batch, canvas, model.n_kv_heads, model.head_dim), dtype)
    lengths = jnp.full(batch, canvas, jnp.int32)
    layers = list(llada.layer_params(params, model))

    def layer(x: jax.Array, given: tuple[llada.Params, jax.Array]) -> tuple[jax.Array, None]:
        weights, (keys, values) = given

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(
                q, keys, values, key_value_seq_lengths=lengths, implementation=attention
            )

        return llada.layer(weights, model, x, rope, attend), None

    if scanned:
        weights: Any = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        run = jax.jit(lambda weights, x, cache: jax.lax.scan(layer, x, (weights, cache))[0])
    else:
        weights = layers

        def unrolled(weights: list[llada.Params], x: jax.Array, cache: jax.Array) -> jax.Array:
            for i, own in enumerate(weights):
                x, _ = layer(x, (own, cache[i]))
            return x

        run = jax.jit(unrolled)
    run(weights, x, cache).block_until_ready()

    def chained(x: jax.Array) -> None:
        for _ in range(MEASURED):
            x = run(weights, x, cache)
        x.block_until_ready()

    return {"ms_chained": 1e3 * min(_seconds(chained, x) for _ in range(3)) / MEASURED}


def measure_torch(
    model: ModelConfig, canvas: int, device: str, batches: Sequence[int], clock: Clock
) -> list[dict[str, Any]]:
    """The official loop with random weights of its own, since nothing compares its tokens here."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, np.ndarray | torch.Tensor] = {}
    for name, shape in llada.weight_shapes(model).items():
        draw = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        weights[name] = torch.ones_like(draw) if len(shape) == 1 else draw * shape[0] ** -0.5
    network = TorchModel(weights, model, device=device)
    del weights
    rows = []
    for batch in batches:
        # As long as jdllm's attention sees: there places behind a row's end cost what others cost.
        prompt = PROMPT * (canvas - 2 * DECODE.block_size)
        requests = [TorchRequest(network, prompt, DECODE) for _ in range(batch)]
        take_turns(requests, WARM)
        _synchronize(device)
        begin, most = time.perf_counter(), max(2, 16 // batch)
        done = take_turns(requests, most)
        _synchronize(device)
        ms = 1e3 * (time.perf_counter() - begin) / done
        rows.append({"what": "pytorch, one request per dispatch", "batch": batch, "ms_read": ms})
        if clock.left() < 0:
            break
    return rows


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _attempt(
    rows: list[dict[str, Any]], what: str, batch: int, clock: Clock, run: Callable[[], dict[str, Any]]
) -> None:
    """Append a row: the numbers, or why there are none. A script that is run once must not end at its first failure."""
    begin = time.monotonic()
    if clock.left() < 0:
        found: dict[str, Any] = {"failed": "no time left"}
    else:
        try:
            found = run()
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:160]}
    rows.append({"what": what, "batch": batch, **found})
    print(f"{what}, batch {batch}: {time.monotonic() - begin:.1f} s {found}", file=sys.stderr, flush=True)


def measure(rehearse: bool, minutes: float) -> list[dict[str, Any]]:
    """All rows."""
    clock, on_gpu = Clock(minutes), jax.default_backend() == "gpu"
    model, canvas, batches = (SMALL, 128, (1, 2)) if rehearse else (LLADA_8B, 1024, (1, 8, 16, 64))
    rows = _jax_rows(model, canvas, batches, jnp.bfloat16 if on_gpu else jnp.float32, clock)
    device, kept = "cuda" if on_gpu else "cpu", len(rows)
    _attempt(rows, "pytorch", 1, clock, lambda: {"rows": measure_torch(model, canvas, device, batches, clock)})
    return [*rows[:kept], *rows[kept].get("rows", rows[kept:])]


def _jax_rows(
    model: ModelConfig, canvas: int, batches: Sequence[int], dtype: Any, clock: Clock
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    on_gpu = jax.default_backend() == "gpu"
    params = random_params(model, dtype)
    with ThreadPoolExecutor() as pool:  # programs compile side by side, and nothing is timed meanwhile
        compiling: dict[Variant, Future[jax.stages.Compiled]] = {
            variant: pool.submit(compile_step, model, canvas, dtype, variant) for variant in variants(batches, on_gpu)
        }
        wait(compiling.values(), max(0.0, clock.left() * COMPILING))
        for future in compiling.values():
            future.cancel()
        for variant, future in compiling.items():
            run = lambda v=variant, f=future: measure_step(model, canvas, params, _ready(f), v)
            _attempt(rows, variant.name, variant.batch, clock, run)
    for name, scanned, attention in (
        ("forward, unrolled, XLA attention", False, "xla"),
        ("forward, scanned, XLA attention", True, "xla"),
        ("forward, unrolled, cuDNN attention", False, "cudnn"),
    ):
        for batch in (1, min(16, batches[-1])):
            run = partial(measure_forward, model, canvas, params, batch, scanned, attention)
            _attempt(rows, name, batch, clock, run)
    return rows


def _ready(future: Future[jax.stages.Compiled]) -> jax.stages.Compiled:
    if future.cancelled() or not future.done():
        raise TimeoutError("not compiled in time")
    return future.result()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, and what failed."""
    number = lambda value: None if value is None else f"{value:.3f}"
    shown = tables.markdown(
        ["what", "batch", "ms a step, chained", "ms a step, read", "busy"],
        [
            [
                r["what"],
                r["batch"],
                number(r.get("ms_chained")),
                number(r.get("ms_read")),
                tables.busy(r.get("busy")),
            ]
            for r in rows
            if "failed" not in r
        ],
    )
    return "\n".join(
        [shown, *(f"failed: {r['what']}, batch {r['batch']}: {r['failed']}" for r in rows if "failed" in r)]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="a denoising step on one GPU")
    parser.add_argument("--rehearse", action="store_true", help="a small shape, float32 on a CPU")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin nothing new after this long (default 7)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    if not options.rehearse and jax.default_backend() != "gpu":
        raise SystemExit("benchmarks.gpu: JAX sees no GPU; --rehearse runs a small shape on a CPU")
    rows = measure(options.rehearse, options.minutes)
    if options.json:
        shape = "small" if options.rehearse else "LLaDA-8B"
        tables.write(options.json, {**provenance("benchmarks.gpu"), "shape": shape, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
