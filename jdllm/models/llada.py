"""LLaDA (a bidirectional Llama) and Dream (a bidirectional Qwen2): which weights they have, and their arithmetic, which
is one, with biases here and there. That Dream's logits are shifted is for whoever decodes them.

``LLaDA`` is the Flax module that says which weights exist, in which shape, and how they are initialised; conversion and
training start from it. The arithmetic is pure functions over a flat dict of its leaves, ``layers.3.q`` and so on: one
layer is ``layer``, to which the caller passes its own attention, so that the whole-sequence pass here and the cached
step of jdllm.denoise share every other line.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jdllm.config import ModelConfig
from jdllm.models.layers import add_bias, attention, matmul, rms_norm, rope_tables, rotate

Params = dict[str, Array]
"""Flat weights: ``embed`` [V, D]; ``layers.i.{attn_norm, q, k, v, attn_out, ff_norm, gate, up, down}``, matrices
[in, out]; ``norm`` [D]; ``head`` [D, V] unless tied; a bias is its owner's name with ``_bias`` behind it. For serving
there may be adapters (jdllm.adapters.stack), and ``unused`` bool [V], ids that stand for no token."""

Attend = Callable[[Array, Array, Array], Array]
"""(q [..., Q, H], k [..., K, H], v [..., K, H]) of this layer, already rotated -> attention output [..., Q, H]."""


def weight_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, in the order of the forward pass."""
    D, F, V, H = cfg.d_model, cfg.d_ff, cfg.vocab_size, cfg.head_dim
    heads, kv_heads = cfg.n_heads * H, cfg.n_kv_heads * H
    shapes: dict[str, tuple[int, ...]] = {"embed": (V, D)}

    def norm(name: str) -> None:
        shapes[name] = (D,)
        if cfg.norm_bias:
            shapes[f"{name}_bias"] = (D,)

    def matrix(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[name] = (rows, columns)
        if bias:
            shapes[f"{name}_bias"] = (columns,)

    for i in range(cfg.n_layers):
        at = f"layers.{i}."
        norm(at + "attn_norm")
        matrix(at + "q", D, heads, cfg.qkv_bias)
        matrix(at + "k", D, kv_heads, cfg.qkv_bias)
        matrix(at + "v", D, kv_heads, cfg.qkv_bias)
        matrix(at + "attn_out", heads, D, cfg.linear_bias)
        norm(at + "ff_norm")
        matrix(at + "gate", D, F, cfg.linear_bias)
        matrix(at + "up", D, F, cfg.linear_bias)
        matrix(at + "down", F, D, cfg.linear_bias)
    norm("norm")
    if not cfg.weight_tying:
        matrix("head", D, V, cfg.linear_bias)
    return shapes


class LLaDA(nnx.Module):
    """The weights of a model as Flax parameters, initialised for training from scratch: matrices at 1/sqrt(fan-in),
    embeddings at 0.5, the head at 0.3/sqrt(fan-in), norms at one, biases at zero."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.weights = nnx.Dict(
            {name: nnx.Param(_initial(name, shape, rngs.params())) for name, shape in weight_shapes(cfg).items()}
        )

    def params(self) -> Params:
        return {name: weight.get_value() for name, weight in self.weights.items()}

    def __call__(self, tokens: Array, mask: Array | None = None) -> Array:
        return logits(self.params(), self.cfg, tokens, mask)


def _initial(name: str, shape: tuple[int, ...], key: Array) -> Array:
    if name.endswith("_bias"):
        return jnp.zeros(shape)
    if len(shape) == 1:
        return jnp.ones(shape)
    scale = {"embed": 0.5, "head": 0.3 * shape[0] ** -0.5}.get(name, shape[0] ** -0.5)
    return jax.random.normal(key, shape) * scale


def init(cfg: ModelConfig, seed: int) -> Params:
    """Random float32 weights."""
    return LLaDA(cfg, nnx.Rngs(seed)).params()


def abstract_params(cfg: ModelConfig, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the weights, nothing allocated."""
    leaves = jax.eval_shape(lambda: init(cfg, 0))
    return {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in leaves.items()}


def layer_params(params: Params, cfg: ModelConfig) -> Iterator[Params]:
    """The weights of each layer in turn, under their short names."""
    grouped: list[Params] = [{} for _ in range(cfg.n_layers)]
    for name, weight in params.items():
        if name.startswith("layers."):
            _, index, short = name.split(".")
            grouped[int(index)][short] = weight
    return iter(grouped)


def embed(params: Params, cfg: ModelConfig, tokens: Array) -> Array:
    """int32 [...] -> [..., D]."""
    x = params["embed"][tokens]
    return x * jnp.asarray(cfg.d_model**0.5, x.dtype) if cfg.input_emb_norm else x


def layer(
    p: Params, cfg: ModelConfig, x: Array, rope: tuple[Array, Array], attend: Attend, adapter: Array | None = None
) -> Array:
    """One transformer layer on x [..., D]; rope as rope_tables gives it for the positions of x.

    Args:
        adapter: int32 [...], which of the adapters among the weights (jdllm.adapters) each position sees, 0 for none.
    """
    lead = x.shape[:-1]

    def linear(x: Array, name: str) -> Array:
        out = add_bias(matmul(x, p[name]), p.get(f"{name}_bias"))
        if adapter is None or f"{name}_lora_a" not in p:
            return out
        own = adapter[..., None] == p[f"{name}_lora_of"]
        return out + jnp.where(own, x @ p[f"{name}_lora_a"], 0) @ p[f"{name}_lora_b"]

    h = rms_norm(x, p["attn_norm"], p.get("attn_norm_bias"), cfg.rms_norm_eps)
    q = linear(h, "q").reshape(*lead, cfg.n_heads, cfg.head_dim)
    k = linear(h, "k").reshape(*lead, cfg.n_kv_heads, cfg.head_dim)
    v = linear(h, "v").reshape(*lead, cfg.n_kv_heads, cfg.head_dim)
    out = attend(rotate(q, rope), rotate(k, rope), v).reshape(*lead, cfg.n_heads * cfg.head_dim)
    x = x + linear(out, "attn_out")
    h = rms_norm(x, p["ff_norm"], p.get("ff_norm_bias"), cfg.rms_norm_eps)
    return x + linear(jax.nn.silu(linear(h, "gate")) * linear(h, "up"), "down")


def head(params: Params, cfg: ModelConfig, x: Array) -> Array:
    """Final norm and output head: [..., D] -> float32 logits [..., V]."""
    h = rms_norm(x, params["norm"], params.get("norm_bias"), cfg.rms_norm_eps)
    kernel = params["embed"].T if cfg.weight_tying else params["head"]
    out = add_bias(jnp.matmul(h, kernel, preferred_element_type=jnp.float32), params.get("head_bias"))
    return out * cfg.d_model**-0.5 if cfg.scale_logits else out


def hidden(params: Params, cfg: ModelConfig, tokens: Array, mask: Array | None = None) -> Array:
    """A pass over whole sequences without cache, up to the last layer's output.

    Args:
        tokens: int32 [B, S].
        mask: bool [B, S, S] (or [1, S, S]), True where a position (second axis) sees another (third); None: all.

    Returns:
        [B, S, D], before the final norm.
    """
    length = tokens.shape[1]
    mask = jnp.ones((1, length, length), bool) if mask is None else mask
    rope = rope_tables(jnp.arange(length)[None], cfg.head_dim, cfg.rope_theta)
    x = embed(params, cfg, tokens)
    for p in layer_params(params, cfg):
        x = layer(p, cfg, x, rope, lambda q, k, v: attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask))
    return x


def logits(params: Params, cfg: ModelConfig, tokens: Array, mask: Array | None = None) -> Array:
    """Float32 logits [B, S, V] of whole sequences; arguments as in ``hidden``."""
    return head(params, cfg, hidden(params, cfg, tokens, mask))
