"""Initial weights from which copying is learnt at once.

What this model does rests on finding a word in the prompt by its neighbours and copying it. From random weights that
had not formed after 2.6 M tokens: every word has to be learnt in the embedding and in the head apart, and nothing in a
LLaDA, which has no biases, lets a head attend by position alone. So training starts from weights in which the parts are
there, roughly, and drills (jdllm.train.tasks) make them work within 0.5 M tokens:

- the head is the transposed embedding; all embeddings share one constant coordinate, and the mask's is that and one
  coordinate of its own;
- in the first layer one attention head looks one position to the left and one to the right, by that constant;
- in the second layer half of the heads have keys equal to queries (look for positions with the same neighbours, but no
  masked ones) and outputs equal to transposed values (pass on the word that stands there).

The scales are those at which an untrained model ranks the right word of a drill highest.
"""

import jax.numpy as jnp
import numpy as np

from jdllm.config import ModelConfig
from jdllm.models import llada

CONSTANT = 2.0
"""The shared coordinate, beside others of standard deviation 0.5."""

AVOID = 2.0
"""How strongly copying heads avoid masked positions."""

FREQUENCIES = 6
"""Rotary frequencies, the fastest, by which a head tells one position from the next."""


def initial(cfg: ModelConfig, seed: int) -> llada.Params:
    """Float32 weights."""
    params = {name: np.array(weight) for name, weight in llada.init(cfg, seed).items()}
    embed, size = params["embed"], cfg.head_dim
    embed[:, 0] = CONSTANT
    embed[:, 1] = 0.0
    embed[cfg.mask_id, 2:] = 0.0
    embed[cfg.mask_id, 1] = 0.5 * cfg.d_model**0.5
    params["head"] = embed.T * (2.4 * cfg.d_model**-0.5)
    params["head"][:2] = 0.0
    for name, weight in params.items():
        if name.split(".")[-1] in ("q", "k", "v", "gate", "up"):
            weight[:2] = 0.0
        elif name.endswith(".down"):
            weight *= 0.3
    for head, offset in enumerate((-1, 1)):
        columns = slice(head * size, (head + 1) * size)
        query, key = _looks_at(cfg, offset)
        for name, direction in (("q", query), ("k", key)):
            weight = params[f"layers.0.{name}"]
            weight[:, columns] *= 0.1
            weight[0, columns] = direction
    copying = slice(0, cfg.n_heads // 2 * size)
    q, k, v, out = (params[f"layers.1.{name}"] for name in ("q", "k", "v", "attn_out"))
    q[:, copying] *= 2.5
    k[:, copying] = q[:, copying]
    # The slowest rotary frequency, which hardly turns: every query avoids masked keys, its own among them.
    slowest = np.arange(cfg.n_heads // 2) * size + size // 2 - 1
    q[0, slowest], k[1, slowest] = AVOID, -AVOID
    out[copying] = 8.0 * v[:, copying].T
    return {name: jnp.asarray(weight) for name, weight in params.items()}


def _looks_at(cfg: ModelConfig, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """What the constant coordinate gives to query and key, float32 [H] each, so that after rotation a query scores the
    key at ``offset`` positions from it highest: the key is turned back by as much."""
    half = cfg.head_dim // 2
    frequencies = cfg.rope_theta ** (-np.arange(half) / half)
    used = 1.3 * (np.arange(half) < FREQUENCIES)
    query = np.concatenate([used, np.zeros(half)])
    key = np.concatenate([used * np.cos(offset * frequencies), -used * np.sin(offset * frequencies)])
    return query.astype(np.float32), key.astype(np.float32)
