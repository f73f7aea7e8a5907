"""A forward pass in plain PyTorch functions, from the source's own tensors: what a conversion is compared with.

Written for reading beside the model's definition, not for speed: whole sequences, no cache, every position sees every
other. The names of the source are written out once more, apart from convert/names.py, so that a wrong row there shows.
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

MODULES = {
    "llada": {
        "embed": "model.transformer.wte",
        "layer": "model.transformer.blocks.{}.",
        "attn_norm": "attn_norm",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "attn_out": "attn_out",
        "ff_norm": "ff_norm",
        "gate": "ff_proj",
        "up": "up_proj",
        "down": "ff_out",
        "norm": "model.transformer.ln_f",
        "head": "model.transformer.ff_out",
    },
    "dream": {
        "embed": "model.embed_tokens",
        "layer": "model.layers.{}.",
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "attn_out": "self_attn.o_proj",
        "ff_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
}


def logits(cfg: ModelConfig, tokens: Tensor, weights: Weights, linear: Linear) -> Tensor:
    """int64 [B, S] -> float32 logits [B, S, V]."""
    at = MODULES[cfg.family]
    x = weights(at["embed"] + ".weight")[tokens]
    if cfg.input_emb_norm:
        x = x * cfg.d_model**0.5
    sin, cos = _rope_tables(tokens.shape[1], cfg)
    for i in range(cfg.n_layers):
        layer = at["layer"].format(i)
        h = _norm(x, layer + at["attn_norm"], cfg, weights)
        q = _heads(linear(layer + at["q"], h), cfg.n_heads)
        k = _heads(linear(layer + at["k"], h), cfg.n_kv_heads)
        v = _heads(linear(layer + at["v"], h), cfg.n_kv_heads)
        q, k = _rotate(q, sin, cos), _rotate(k, sin, cos)
        k, v = (t.repeat_interleave(cfg.n_heads // cfg.n_kv_heads, dim=1) for t in (k, v))
        weight = torch.softmax(q @ k.transpose(-1, -2) / cfg.head_dim**0.5, dim=-1)
        attended = (weight @ v).transpose(1, 2).reshape(x.shape)
        x = x + linear(layer + at["attn_out"], attended)
        h = _norm(x, layer + at["ff_norm"], cfg, weights)
        gated = functional.silu(linear(layer + at["gate"], h)) * linear(layer + at["up"], h)
        x = x + linear(layer + at["down"], gated)
    h = _norm(x, at["norm"], cfg, weights)
    out = h @ weights(at["embed"] + ".weight").T if cfg.weight_tying else linear(at["head"], h)
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
