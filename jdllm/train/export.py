"""Write trained weights as what the converter reads: a Hugging Face LLaDA checkpoint and a PEFT adapter.

The shipped model goes through the same files and the same converter as LLaDA-8B.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jdllm.config import ModelConfig
from jdllm.models import llada
from jdllm.train import lora, tokenizer

_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "attn_out": "attn_out",
    "ff_norm": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}
"""jdllm.models.llada's short names -> LLaDA's module names."""

_TOP_NAMES = {"embed": "wte", "norm": "ln_f", "head": "ff_out"}


def write_checkpoint(folder: Path, cfg: ModelConfig, params: llada.Params) -> None:
    """config.json, model.safetensors (float32) and the tokenizer of a LLaDA without biases and with its own head.

    Args:
        params: flat weights as jdllm.models.llada has them.
    """
    tokenizer.save(folder)
    _write_json(folder / "config.json", hf_config(cfg))
    tensors = {f"model.transformer.{_module(name)}.weight": _file_layout(name, w) for name, w in params.items()}
    save_file(dict(sorted(tensors.items())), folder / "model.safetensors", {"format": "pt"})


def write_adapter(folder: Path, adapter: lora.Adapter, base_name: str) -> None:
    """adapter_config.json and adapter_model.safetensors (float32) as PEFT's save_pretrained names them."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "adapter_config.json", peft_config(base_name))
    tensors = {}
    for key, weight in adapter.items():
        name, side = key.rsplit(".", 1)
        # PEFT has lora_A [r, in] and lora_B [out, r], the transposes of ours.
        tensor = np.ascontiguousarray(np.asarray(weight, np.float32).T)
        tensors[f"base_model.model.model.transformer.{_module(name)}.lora_{side.upper()}.weight"] = tensor
    save_file(dict(sorted(tensors.items())), folder / "adapter_model.safetensors", {"format": "pt"})


def _module(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, index, short = name.split(".")
    return f"blocks.{index}.{_LAYER_NAMES[short]}"


def _file_layout(name: str, weight: Any) -> np.ndarray:
    """Linear weights lie [out, in] in the file, [in, out] in jdllm; the embedding is [V, D] in both."""
    array = np.asarray(weight, np.float32)
    return np.ascontiguousarray(array.T) if array.ndim == 2 and name != "embed" else array


def hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """LLaDA's config.json, with the keys of the published one."""
    return {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": cfg.d_model,
        "embedding_dropout": 0.0,
        "embedding_size": cfg.vocab_size,
        "eos_token_id": cfg.eos_id,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": cfg.mask_id,
        "max_sequence_length": cfg.max_sequence_length,
        "mlp_hidden_size": cfg.d_ff,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": cfg.n_heads,
        "n_kv_heads": cfg.n_kv_heads,
        "n_layers": cfg.n_layers,
        "pad_token_id": cfg.pad_id,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": cfg.rope_theta,
        "scale_logits": False,
        "transformers_version": "4.46.3",
        "use_cache": False,
        "vocab_size": cfg.vocab_size,
        "weight_tying": False,
    }


def peft_config(base_name: str) -> dict[str, Any]:
    """adapter_config.json of a plain LoRA: scale alpha / r, no biases, nothing else saved."""
    return {
        "alpha_pattern": {},
        "auto_mapping": {"base_model_class": "LLaDAModelLM", "parent_library": "model.modeling_llada"},
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": int(lora.ALPHA),
        "lora_bias": False,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.RANK,
        "rank_pattern": {},
        "revision": None,
        "target_modules": [_LAYER_NAMES[name] for name in lora.MATRICES],
        "task_type": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
