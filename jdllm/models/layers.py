"""The pieces of a transformer layer as pure functions of arrays. They know no model family, no cache, no batch layout:
leading axes are whatever the caller has."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def rms_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """RMS norm over the last axis: normalised in float32, cast back, then scaled (the order of LLaDA and Qwen2)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return add_bias(normed.astype(x.dtype) * weight, bias)


@jax.custom_vjp
def matmul(x: Array, w: Array) -> Array:
    """x [..., D] @ w [D, F]."""
    return x @ w


def _matmul_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ w, (x, w)


def _matmul_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    # Without the barrier XLA fuses what makes x and g into transposed copies of them, an eighth of a training step.
    x, w = saved
    x, g = jax.lax.optimization_barrier((x, g))
    flat = lambda a: a.reshape(-1, a.shape[-1])
    return (flat(g) @ w.T).reshape(x.shape), flat(x).T @ flat(g)


matmul.defvjp(_matmul_forward, _matmul_backward)


def add_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def rope_tables(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Sine and cosine of the rotary angles, float32 whatever the model's dtype.

    Args:
        positions: int32 [...].

    Returns:
        two arrays [..., H / 2].
    """
    # Rounded once before the division, as PyTorch's float32 power is: the tables then equal the reference's to an ulp.
    inverse = np.float32(1) / (theta ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    angles = positions.astype(jnp.float32)[..., None] * inverse
    return jnp.sin(angles), jnp.cos(angles)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotary embedding, halves rotated against each other (not neighbours), in float32.

    Args:
        x: [..., heads, H].
        tables: from rope_tables, of shape [..., H / 2].
    """
    sin, cos = (t[..., None, :] for t in tables)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Grouped-query attention, softmax in float32.

    Args:
        q: [R, T, Q, H]; k, v: [R, K, S, H]; query head h reads key head h // (Q / K).
        mask: bool [R, T, S], True where a query sees a key. A query that sees none gets the mean of all values:
            finite, and for the caller to ignore.

    Returns:
        [R, T, Q, H].
    """
    rows, length, heads, size = q.shape
    grouped = q.reshape(rows, length, k.shape[1], heads // k.shape[1], size)
    scores = jnp.einsum("RTKGH,RKSH->RKGTS", grouped, k, preferred_element_type=jnp.float32) * size**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    # Any number will do there, so no gradient passes through it.
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    # Divided by their sum after the product, which has fewer numbers.
    out = jnp.einsum("RKGTS,RKSH->RKGTH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / jnp.sum(weights, axis=-1, keepdims=True)).astype(v.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
