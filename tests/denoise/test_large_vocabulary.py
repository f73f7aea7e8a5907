"""No float32 [N, V]: what the compiled step of a real vocabulary holds besides its state, nothing allocated."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.presets import LLADA_8B
from jdllm.config import ModelConfig
from jdllm.denoise.head import MOST_LOGITS
from jdllm.denoise.state import abstract_state
from jdllm.denoise.step import steps
from jdllm.denoise.window import Bucket
from jdllm.models import llada

BUCKET = Bucket(16, 2048)


def temporary_bytes(model: ModelConfig) -> int:
    state = abstract_state(model, 16, 1024, jnp.float32)
    params = llada.abstract_params(model, jnp.float32)
    held = jax.ShapeDtypeStruct((16,), jnp.bool)
    program = jax.jit(partial(steps, model=model, bucket=BUCKET), donate_argnums=1).lower(params, state, held).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_logits_are_never_held_for_all_positions():
    """LLaDA-8B's widths on two layers (layers reuse their temporaries), 16 rows of 1024 positions, every kind of row.
    2048 window positions would have 1 GB of float32 logits, of which sampling would make several copies. What the whole
    vocabulary adds to a small one is less than three times what is held at once."""
    model = dataclasses.replace(LLADA_8B, n_layers=2)
    small = dataclasses.replace(model, vocab_size=4096, mask_id=4095, eos_id=4094, pad_id=4094)
    held, logits = 4 * MOST_LOGITS, 4 * BUCKET.packed * model.vocab_size
    assert logits > 7 * held
    assert temporary_bytes(model) - temporary_bytes(small) < 3 * held
    assert temporary_bytes(model) < logits
