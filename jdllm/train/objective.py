"""The training objective: which positions see each other, how much of the answer is masked, and the loss.

Noise is drawn on the host with NumPy; what is compiled is only the loss.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdllm.config import ModelConfig
from jdllm.models import llada

UNSEEN = 1 << 20
"""Block number of positions behind the canvas: no position of the canvas sees them."""


def visible(blocks: Array) -> Array:
    """Block number a position, int32 [B, S] -> bool [B, S, S]: a query sees its own block and all before it. One
    block for everything is LLaDA's full attention; prompt 0 and answer blocks 1, 2, .. are D2F's block-causal mask."""
    return blocks[:, None, :] <= blocks[:, :, None]


def answer_blocks(prompt: int, canvas: int, size: int) -> np.ndarray:
    """D2F's block number of every position, int32 [canvas]: 0 in the prompt, then 1 + (i - prompt) // size."""
    positions = np.arange(canvas)
    return np.where(positions < prompt, 0, 1 + (positions - prompt) // size).astype(np.int32)


def block_noise(rng: np.random.Generator, count: int) -> np.ndarray:
    """Mask probability of each of ``count`` answer blocks, float64 [count], never decreasing, the last above 0.

    D2F trains on noise that grows from block to block, since earlier blocks are further decoded. Here it is a ramp
    with random start and width: blocks already finished (0), some under way, and fresh ones (1), as in decoding.
    """
    width = rng.uniform(0.3, 4.0)
    start = rng.uniform(-width, count - 1)
    return np.clip((np.arange(count) - start) / width, 0.0, 1.0)


def draw_mask(rng: np.random.Generator, probability: np.ndarray) -> np.ndarray:
    """Mask each position with its probability (0 in the prompt), but at least one; float64 [S] -> bool [S]."""
    masked = rng.random(len(probability)) < probability
    if not masked.any():
        masked[rng.choice(len(probability), p=probability / probability.sum())] = True
    return masked


def masked_cross_entropy(
    params: llada.Params, cfg: ModelConfig, noisy: Array, targets: Array, weights: Array, blocks: Array
) -> Array:
    """Weighted mean cross-entropy; ``weights`` float32 [B, S] is 0 where nothing is masked. The other arrays: int32
    [B, S]. Not divided by the noise level, which at this size only adds variance."""
    logits = llada.logits(params, cfg, noisy, visible(blocks))
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(losses * weights) / jnp.sum(weights)
