"""bonsai's LLaDA (jax-ml/bonsai, snapshot 3628425) from a checkout, as shipped and under one jit, beside jdllm.

bonsai has LLaDA's own sampler only, so this is a table of its own: one request, one block, one token a step, against
jdllm's ``llada`` decoder on the same weights; tokens must be equal. As shipped, ``generate`` calls the model's modules
eagerly, operation by operation, and compiles its ranking anew in every call. Under one jit the same ``generate`` is
traced whole, all its steps in one program: what it could be without the cost of dispatch. A run of jdllm is timed from
insertion to eviction. Nothing of bonsai is kept here.
"""

import dataclasses
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tables
from benchmarks.cases import Case
from benchmarks.contenders import SETTLE_SECONDS, log
from benchmarks.device_share import PROFILED, trace_jax
from jdllm.buckets import choose_bucket
from jdllm.config import DecodeConfig, EngineConfig, ModelConfig
from jdllm.engine import Engine
from jdllm.runtime import UsageError

TOKENS = 8
"""Generated in as many steps; under one jit each step is traced by itself."""

_NAMES = {
    "q": "q_proj.kernel",
    "k": "k_proj.kernel",
    "v": "v_proj.kernel",
    "attn_out": "attn_out.kernel",
    "gate": "ff_proj.kernel",
    "up": "up_proj.kernel",
    "down": "ff_out.kernel",
    "attn_norm": "attn_norm.weight",
    "ff_norm": "ff_norm.weight",
}
_TOP_NAMES = {"embed": "wte.embedding", "norm": "ln_f.weight", "head": "ff_out.kernel"}


@dataclasses.dataclass(frozen=True)
class Runner:
    """``run``: decodes the request to its end and returns the generated ids. ``peak_bytes``: of weights and the largest
    program, as XLA laid it out; None where there is no program of a step, but many small ones."""

    name: str
    run: Callable[[], list[int]]
    peak_bytes: int | None = None


def measure(checkout: Path, case: Case, seconds: float, most: int) -> list[dict[str, Any]]:
    """One row for each way of running bonsai, and one for jdllm.

    Raises:
        UsageError: the checkout cannot be imported, or its LLaDA cannot hold these weights.
        SystemExit: it generated other tokens than jdllm.
    """
    prompt = list(case.requests[0][0])
    runners = [*_bonsai(checkout, case, prompt), *(_jdllm(case, prompt, steps) for steps in (TOKENS, 1))]
    expected = runners[-1].run()
    for runner in runners[:-1]:
        log(f"  {runner.name}: first run")
        if (ids := runner.run()) != expected:
            raise SystemExit(f"{runner.name} and jdllm differ:\n{ids}\n{expected}")
    times: list[list[float]] = [[] for _ in runners]
    order, until = list(range(len(runners))), time.perf_counter() + seconds
    while len(times[0]) < most and (len(times[0]) < 2 or time.perf_counter() < until):
        for i in order:
            time.sleep(SETTLE_SECONDS)
            begin = time.perf_counter()
            runners[i].run()
            times[i].append(time.perf_counter() - begin)
        order = order[1:] + order[:1]
    rows = []
    for runner, taken in zip(runners, times, strict=True):
        median = statistics.median(taken)
        traces = [trace_jax(runner.run) for _ in range(PROFILED)]
        busy, launched = statistics.median(trace.busy_seconds for trace in traces), traces[-1].launched
        rows.append(
            {
                "engine": runner.name,
                "ms_per_step": 1e3 * median / TOKENS,
                "repetitions": len(taken),
                "device_busy": busy / median,
                "dispatched_per_step": None if launched is None else launched / TOKENS,
                "tokens_per_second": TOKENS / median,
                "peak_bytes": runner.peak_bytes,
            }
        )
    return rows


def _bonsai(checkout: Path, case: Case, prompt: list[int]) -> list[Runner]:
    modeling = _import(checkout)
    from flax import nnx

    # bonsai's layers ask for shardings by name, which takes a mesh of explicit axes, also for one device.
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=explicit)
    with jax.set_mesh(mesh):
        model = modeling.LLaDAModel(_config(modeling, case.model), rngs=nnx.Rngs(0))
        _assign(model, case.params)
    given = jnp.asarray([prompt], jnp.int32), jnp.ones((1, len(prompt)), bool)
    settings = {"steps": TOKENS, "gen_length": TOKENS, "block_length": TOKENS, "mask_id": case.model.mask_id}
    graph, weights = nnx.split(model)

    def whole(weights: Any, prompt: jax.Array, mask: jax.Array) -> jax.Array:
        return modeling.generate(nnx.merge(graph, weights), prompt, mask, **settings, key=jax.random.key(0))

    with jax.set_mesh(mesh):
        program = jax.jit(whole).lower(weights, *given).compile()
    memory: Any = program.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

    def ids(generate: Callable[[], jax.Array]) -> list[int]:
        with jax.set_mesh(mesh):
            return np.asarray(generate())[0, len(prompt) :].tolist()

    return [
        Runner(
            "bonsai, as shipped",
            lambda: ids(lambda: modeling.generate(model, *given, **settings, key=jax.random.key(0))),
        ),
        Runner("bonsai, under one jit", lambda: ids(lambda: program(weights, *given)), peak),
    ]


def _import(checkout: Path) -> Any:
    if not (checkout / "bonsai" / "models" / "llada" / "modeling.py").is_file():
        raise UsageError(f"--bonsai: {checkout} has no bonsai/models/llada/modeling.py")
    sys.path.insert(0, str(checkout.resolve()))
    try:
        modeling: Any = importlib.import_module("bonsai.models.llada.modeling")
    except ModuleNotFoundError as error:
        raise UsageError(f"--bonsai: its LLaDA needs {error.name}, which is not installed") from None
    finally:
        sys.path.pop(0)
    # Its progress bar draws to the terminal in every step, and is no part of the work.
    modeling.trange = range
    return modeling


def _config(modeling: Any, model: ModelConfig) -> Any:
    if model.weight_tying or model.scale_logits or model.input_emb_norm or model.norm_bias:
        raise UsageError("--bonsai: its LLaDA has no weight tying, scaled logits, scaled embeddings or biases of norms")
    return modeling.ModelConfig(
        dtype=jnp.float32,
        d_model=model.d_model,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        n_layers=model.n_layers,
        embedding_dropout=0.0,
        max_sequence_length=model.max_sequence_length,
        rope_theta=model.rope_theta,
        include_qkv_bias=model.qkv_bias,
        include_bias=model.linear_bias,
        vocab_size=model.vocab_size,
        embedding_size=model.vocab_size,
        mlp_hidden_size=model.d_ff,
        shd_cfg=modeling.ShardingConfig.no_sharding(),
        return_hidden_states=False,
        rms_norm_eps=model.rms_norm_eps,
    )


def _assign(model: Any, params: dict[str, np.ndarray]) -> None:
    for name, weight in params.items():
        module: Any = model
        kind = name.split(".")[-1]
        if name.startswith("layers."):
            module = model.blocks[int(name.split(".")[1])]
        path = (_NAMES if name.startswith("layers.") else _TOP_NAMES).get(kind)
        if path is None:
            raise UsageError(f"--bonsai: its LLaDA has no place for {name}")
        owner, attribute = path.split(".")
        parameter = getattr(getattr(module, owner), attribute)
        assert parameter[...].shape == weight.shape, name
        parameter[...] = jnp.asarray(weight)


def _jdllm(case: Case, prompt: list[int], steps: int) -> Runner:
    decode = DecodeConfig(decoder="llada", max_tokens=TOKENS, block_size=TOKENS, early_stop=False, stop_ids=())
    canvas = len(prompt) + TOKENS
    config = EngineConfig(max_rows=1, max_length=-(-canvas // 32) * 32, steps_per_dispatch=steps)
    engine = Engine({name: jnp.asarray(weight) for name, weight in case.params.items()}, case.model, config)
    bucket = choose_bucket(engine.buckets, np.array([canvas]))  # every pass is over the whole canvas
    assert bucket is not None
    engine.buckets = [bucket]
    engine.compile()

    def run() -> list[int]:
        engine.insert(0, object(), prompt, decode)
        while True:
            for row in engine.step():
                if not row.live:
                    engine.evict(0)
                    return row.canvas_ids

    peak = sum(weight.nbytes for weight in engine.params.values()) + sum(engine.memory(bucket))
    return Runner(f"jdllm, llada decoder, {steps} a dispatch", run, peak)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    return tables.markdown(
        ["one request, LLaDA's sampler", "ms a step", "device busy", "dispatched/step", "tokens/s", "peak MB"],
        [
            [
                r["engine"],
                f"{r['ms_per_step']:.2f}",
                tables.busy(r["device_busy"]),
                None if r["dispatched_per_step"] is None else f"{r['dispatched_per_step']:.2f}",
                f"{r['tokens_per_second']:.0f}",
                None if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e6:.1f}",
            ]
            for r in rows
        ],
    )
