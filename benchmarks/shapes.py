"""python -m benchmarks.shapes: what a denoising step of LLaDA-8B costs, from shapes alone; nothing is allocated.

The step is a decoding step of D2F: two blocks of 32 positions in flight in every row, half of them masked, at the end
of the canvas (where attention is most). Weights, cache and arithmetic are bfloat16.

FLOPs and bytes needed, by formula
    benchmarks.flops; every weight read once, of the embedding only the rows looked up, keys and values of the whole
    canvas read once and those of the window written.
FLOPs and bytes of XLA
    ``cost_analysis`` of the step compiled for this machine's CPU. XLA's CPU backend computes bfloat16 by way of copies
    in float32, which would be counted as traffic and as memory, so the program compiled is the float32 one, and its
    bytes are halved. It is compiled with one and with two layers; layers are unrolled and alike, so the rest is a
    straight line. Of a branch XLA counts one side, of a loop one turn (the output head may run in turns).
Temporary memory
    ``memory_analysis`` of the same float32 program with two layers: an upper bound for bfloat16. It must not grow from
    one layer to two, or the run fails.
Rows that fit
    (139 GiB - weights - temporary memory of this batch) / (keys and values of a row).
Lowers for
    the whole bfloat16 step, all layers, lowered for cuda and for tpu.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import tables
from benchmarks.flops import layer_matrix_elements, step_flops, visible_pairs
from benchmarks.machine import provenance
from benchmarks.presets import LLADA_8B
from jdllm.config import ModelConfig
from jdllm.denoise.state import abstract_state
from jdllm.denoise.step import steps
from jdllm.denoise.window import Bucket
from jdllm.models import llada

DEVICE_BYTES = 139 * 2**30
"""An H200's memory."""

BLOCK_SIZE, BLOCKS_IN_FLIGHT = 32, 2
PLATFORMS = ("cuda", "tpu")


def step_costs(model: ModelConfig, rows: int, canvas: int) -> dict[str, Any]:
    """Everything about one step of ``rows`` rows on canvases of ``canvas`` positions."""
    window = min(BLOCK_SIZE * BLOCKS_IN_FLIGHT, canvas)
    bucket = Bucket(rows=rows, packed=rows * window)
    one, two = (_compiled_costs(dataclasses.replace(model, n_layers=n), bucket, canvas) for n in (1, 2))
    if two["temporary"] > 1.05 * one["temporary"]:
        raise SystemExit(f"temporary memory grows with the layers: {one['temporary']} and {two['temporary']} bytes")

    def all_layers(name: str) -> float:
        return one[name] + (model.n_layers - 1) * (two[name] - one[name])

    pairs = rows * visible_pairs(canvas % BLOCK_SIZE, BLOCK_SIZE, canvas - window, canvas)
    weights = _bytes(llada.abstract_params(model, jnp.bfloat16))
    kv_row = _kv_bytes(model, canvas)
    return {
        "batch": rows,
        "canvas": canvas,
        "window": window,
        "flops_needed": step_flops(model, rows * window, pairs, rows * window // 2),
        "flops_xla": all_layers("flops"),
        "bytes_needed": _bytes_needed(model, rows, canvas, window),
        "bytes_xla": all_layers("bytes") / 2,
        "temporary_bytes": two["temporary"],
        "kv_bytes_per_row": kv_row,
        "weight_bytes": weights,
        "rows_that_fit": max(0, int((DEVICE_BYTES - weights - two["temporary"]) // kv_row)),
        "lowers_for": _lowered_platforms(model, bucket, canvas),
    }


def _program(model: ModelConfig, bucket: Bucket, canvas: int, dtype: Any) -> jax.stages.Traced:
    params = llada.abstract_params(model, dtype)
    state = abstract_state(model, bucket.rows, canvas, dtype)
    held = jax.ShapeDtypeStruct((bucket.rows,), jnp.bool)
    return jax.jit(partial(steps, model=model, bucket=bucket), donate_argnums=1).trace(params, state, held)


def _compiled_costs(model: ModelConfig, bucket: Bucket, canvas: int) -> dict[str, float]:
    compiled = _program(model, bucket, canvas, jnp.float32).lower().compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return {"flops": cost["flops"], "bytes": cost["bytes accessed"], "temporary": memory.temp_size_in_bytes}


def _lowered_platforms(model: ModelConfig, bucket: Bucket, canvas: int) -> list[str]:
    """Lowering raises where an operation has no rule for the platform."""
    traced = _program(model, bucket, canvas, jnp.bfloat16)
    for platform in PLATFORMS:
        traced.lower(lowering_platforms=(platform,))
    return list(PLATFORMS)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _kv_bytes(model: ModelConfig, positions: int) -> int:
    """Keys and values of ``positions`` positions in all layers, bfloat16."""
    return 2 * 2 * model.n_layers * positions * model.n_kv_heads * model.head_dim


def _bytes_needed(model: ModelConfig, rows: int, canvas: int, window: int) -> int:
    head = model.d_model * model.vocab_size
    looked_up = rows * window * model.d_model
    return 2 * (layer_matrix_elements(model) + head + looked_up) + rows * _kv_bytes(model, canvas + window)


def table(results: dict[str, Any]) -> str:
    """The rows as Markdown, and a line on what they are of."""
    rows = tables.markdown(
        [
            "batch",
            "canvas",
            "TFLOP needed",
            "TFLOP (XLA)",
            "GB needed",
            "GB (XLA)",
            "temporary GB",
            "K/V MB a row",
            "rows in 139 GiB",
            "lowers for",
        ],
        [
            [
                r["batch"],
                r["canvas"],
                f"{r['flops_needed'] / 1e12:.2f}",
                f"{r['flops_xla'] / 1e12:.2f}",
                f"{r['bytes_needed'] / 1e9:.1f}",
                f"{r['bytes_xla'] / 1e9:.1f}",
                f"{r['temporary_bytes'] / 1e9:.2f}",
                f"{r['kv_bytes_per_row'] / 1e6:.0f}",
                r["rows_that_fit"],
                ", ".join(r["lowers_for"]),
            ]
            for r in results["rows"]
        ],
    )
    note = (
        f"{results['model']}, weights {results['rows'][0]['weight_bytes'] / 1e9:.1f} GB bfloat16, windows of "
        f"{results['rows'][0]['window']} positions a row; jax {results['versions']['jax']}; "
        f"commit {results['commit']}; `{results['command']}`"
    )
    return f"{rows}\n\n{note}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description="cost of a LLaDA-8B step")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--canvas", nargs="+", type=int, default=[1024, 4096])
    options = parser.parse_args(arguments)
    rows = []
    for canvas in options.canvas:
        for batch in options.batch:
            print(f"batch {batch}, canvas {canvas}", file=sys.stderr, flush=True)
            rows.append(step_costs(LLADA_8B, batch, canvas))
    results = {**provenance("benchmarks.shapes"), "model": "LLaDA-8B", "rows": rows}
    if options.json:
        tables.write(options.json, results)
    print(table(results))


if __name__ == "__main__":
    main()
