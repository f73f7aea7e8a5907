"""Every field of a LLaDA config.json is honoured, without effect, or refused by name."""

import json
from pathlib import Path

import pytest

from jdllm.config import ConfigError, model_config

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture
def hf():
    return json.loads((GOLDEN / "llada-tiny" / "config.json").read_text())


def test_real_config():
    real = json.loads((GOLDEN / "real_layouts" / "llada-8b.json").read_text())["config"]
    cfg = model_config(real)
    assert (cfg.vocab_size, cfg.d_model, cfg.n_layers, cfg.n_heads, cfg.n_kv_heads) == (126464, 4096, 32, 32, 32)
    assert (cfg.d_ff, cfg.head_dim, cfg.rope_theta, cfg.max_sequence_length) == (12288, 128, 500000.0, 4096)
    assert (cfg.mask_id, cfg.eos_id, cfg.pad_id) == (126336, 126081, 126081)
    assert not (cfg.weight_tying or cfg.scale_logits or cfg.input_emb_norm or cfg.qkv_bias or cfg.linear_bias)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"mlp_hidden_size": None, "mlp_ratio": 3}, "d_ff", 192),
        ({"mlp_hidden_size": 100}, "d_ff", 100),
        ({"embedding_size": 512}, "vocab_size", 512),
        ({"embedding_size": None, "vocab_size": 380}, "vocab_size", 380),
        ({"n_kv_heads": None}, "n_kv_heads", 4),
        ({"n_kv_heads": None, "multi_query_attention": True}, "n_kv_heads", 1),
        ({"n_kv_heads": 2}, "n_kv_heads", 2),
        ({"include_qkv_bias": True}, "qkv_bias", True),
        ({"include_bias": True, "bias_for_layer_norm": None}, "norm_bias", True),
        ({"include_bias": True, "bias_for_layer_norm": False}, "norm_bias", False),
        ({"weight_tying": True}, "weight_tying", True),
        ({"scale_logits": True}, "scale_logits", True),
        ({"input_emb_norm": True}, "input_emb_norm", True),
        ({"rope_theta": 10000.0}, "rope_theta", 10000.0),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps", 1e-6),
    ],
)
def test_honoured(hf, change, field, value):
    assert getattr(model_config({**hf, **change}), field) == value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"alibi": True}, "alibi"),
        ({"rope": False}, "rope"),
        ({"block_type": "sequential"}, "block_type"),
        ({"activation_type": "gelu"}, "activation_type"),
        ({"layer_norm_type": "default"}, "layer_norm_type"),
        ({"attention_layer_norm": True}, "attention_layer_norm"),
        ({"layer_norm_with_affine": False}, "layer_norm_with_affine"),
        ({"block_group_size": 2}, "block_group_size"),
        ({"a_new_field": 1}, "a_new_field"),
        ({"model_type": "gpt2"}, "model_type"),
        ({"n_heads": 5}, "n_heads"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"n_kv_heads": 4, "multi_query_attention": True}, "multi_query_attention"),
        ({"d_model": "64"}, "d_model"),
        ({"d_model": None}, "d_model"),
        ({"mask_token_id": 400}, "mask_id"),
        ({"embedding_size": 300}, "embedding_size"),
    ],
)
def test_refused_by_name(hf, change, named):
    with pytest.raises(ConfigError, match=named):
        model_config({**hf, **change})
