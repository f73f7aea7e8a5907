"""A LLaDA forward pass in plain PyTorch functions, from the source's own tensors: what a conversion is compared with.

Written for reading beside the model's definition, not for speed: whole sequences, no cache, every position sees every
other.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from jdllm.config import ModelConfig

Weights = Callable[[str], Tensor]
"""Name of a tensor in the checkpoint -> its values, float32."""

Linear = Callable[[str, Tensor], Tensor]
"""(module path, input [..., in]) -> output [..., out], bias and adapter included."""


def logits(cfg: ModelConfig, tokens: Tensor, weights: Weights, linear: Linear) -> Tensor:
    """int64 [B, S] -> float32 logits [B, S, V]."""
    x = weights("model.transformer.wte.weight")[tokens]
    if cfg.input_emb_norm:
        x = x * cfg.d_model**0.5
    sin, cos = _rope_tables(tokens.shape[1], cfg)
    for i in range(cfg.n_layers):
        block = f"model.transformer.blocks.{i}."
        h = _norm(x, block + "attn_norm", cfg, weights)
        q = _heads(linear(block + "q_proj", h), cfg.n_heads)
        k = _heads(linear(block + "k_proj", h), cfg.n_kv_heads)
        v = _heads(linear(block + "v_proj", h), cfg.n_kv_heads)
        q, k = _rotate(q, sin, cos), _rotate(k, sin, cos)
        k, v = (t.repeat_interleave(cfg.n_heads // cfg.n_kv_heads, dim=1) for t in (k, v))
        weight = torch.softmax(q @ k.transpose(-1, -2) / cfg.head_dim**0.5, dim=-1)
        attended = (weight @ v).transpose(1, 2).reshape(x.shape)
        x = x + linear(block + "attn_out", attended)
        h = _norm(x, block + "ff_norm", cfg, weights)
        gated = functional.silu(linear(block + "ff_proj", h)) * linear(block + "up_proj", h)
        x = x + linear(block + "ff_out", gated)
    h = _norm(x, "model.transformer.ln_f", cfg, weights)
    tied = cfg.weight_tying
    out = h @ weights("model.transformer.wte.weight").T if tied else linear("model.transformer.ff_out", h)
    return out / cfg.d_model**0.5 if cfg.scale_logits else out


def _norm(x: Tensor, module: str, cfg: ModelConfig, weights: Weights) -> Tensor:
    out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.rms_norm_eps) * weights(module + ".weight")
    return out + weights(module + ".bias") if cfg.norm_bias else out


def _heads(x: Tensor, count: int) -> Tensor:
    """[B, S, count * H] -> [B, count, S, H]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _rope_tables(length: int, cfg: ModelConfig) -> tuple[Tensor, Tensor]:
    """Sine and cosine [S, H]: each half of the head has the same angles."""
    inverse = cfg.rope_theta ** -(torch.arange(0, cfg.head_dim, 2, dtype=torch.float64) / cfg.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.sin().float(), angles.cos().float()


def _rotate(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
