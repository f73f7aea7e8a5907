"""Low-rank adapters on the matrices of every layer, as a flat dict beside the weights that they change."""

import jax
import jax.numpy as jnp

from jdllm.config import ModelConfig
from jdllm.models import llada

Adapter = llada.Params
"""``layers.i.q.a`` float32 [in, R] and ``layers.i.q.b`` float32 [R, out] for every adapted matrix."""

RANK = 16
ALPHA = 16.0
MATRICES = ("q", "k", "v", "attn_out", "gate", "up")
"""All but the down projection: its name in a LLaDA file, ``ff_out``, is the output head's too, and PEFT's
``target_modules`` would adapt both."""


def init(cfg: ModelConfig, seed: int) -> Adapter:
    """``a`` random, ``b`` zero: the adapted model starts as the base model."""
    key = jax.random.key(seed)
    adapter: Adapter = {}
    for name, shape in llada.weight_shapes(cfg).items():
        if name.startswith("layers.") and name.split(".")[-1] in MATRICES:
            key, draw = jax.random.split(key)
            adapter[f"{name}.a"] = jax.random.normal(draw, (shape[0], RANK)) * shape[0] ** -0.5
            adapter[f"{name}.b"] = jnp.zeros((RANK, shape[1]))
    return adapter


def merge(params: llada.Params, adapter: Adapter) -> llada.Params:
    """Weights with W + (alpha / r) A B in place of W."""
    merged = dict(params)
    for name in {key.rsplit(".", 1)[0] for key in adapter}:
        merged[name] = params[name] + ALPHA / RANK * (adapter[f"{name}.a"] @ adapter[f"{name}.b"])
    return merged
