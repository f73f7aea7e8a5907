"""What Dream has of its own. Its arithmetic is LLaDA's, and test_llada.py holds the golden logits of both families."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import ConfigError, model_config
from jdllm.models import llada
from jdllm.models.layers import rms_norm

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture
def hf():
    return json.loads((GOLDEN / "dream-tiny" / "config.json").read_text())


def test_real_config():
    layout = json.loads((GOLDEN / "real_layouts" / "dream-7b.json").read_text())
    cfg = model_config(layout["config"])
    assert (cfg.family, cfg.vocab_size, cfg.max_sequence_length) == ("dream", 152064, 131072)
    assert (cfg.d_model, cfg.n_layers, cfg.n_heads, cfg.n_kv_heads, cfg.d_ff) == (3584, 28, 28, 4, 18944)
    assert (cfg.head_dim, cfg.rope_theta, cfg.rms_norm_eps) == (128, 1e6, 1e-6)
    assert (cfg.mask_id, cfg.eos_id, cfg.pad_id) == (151666, 151643, 151643)
    assert cfg.shifted_logits and cfg.qkv_bias
    assert not (cfg.weight_tying or cfg.scale_logits or cfg.input_emb_norm or cfg.linear_bias or cfg.norm_bias)
    assert sum(int(np.prod(shape)) for shape in llada.weight_shapes(cfg).values()) == layout["parameters"]


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"num_key_value_heads": None}, "n_kv_heads", 4),
        ({"num_key_value_heads": 1}, "n_kv_heads", 1),
        ({"head_dim": 16}, "head_dim", 16),
        ({"intermediate_size": 100}, "d_ff", 100),
        ({"max_position_embeddings": 64}, "max_sequence_length", 64),
        ({"tie_word_embeddings": True}, "weight_tying", True),
        ({"rope_theta": 10000.0}, "rope_theta", 10000.0),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps", 1e-5),
        ({"pad_token_id": 7}, "pad_id", 7),
        ({"model_type": "dream"}, "family", "dream"),
    ],
)
def test_honoured(hf, change, field, value):
    assert getattr(model_config({**hf, **change}), field) == value


@pytest.mark.parametrize("change", [{"sliding_window": 4096, "max_window_layers": 1}, {"use_mrope": False}])
def test_without_effect(hf, change):
    assert model_config({**hf, **change}) == model_config(hf)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"use_mrope": True}, "use_mrope"),
        ({"head_dim": 32}, "head_dim"),
        ({"attention_bias": False}, "attention_bias"),
        ({"block_size": 32}, "block_size"),
        ({"d_model": 64}, "d_model"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"num_key_value_heads": 3}, "n_kv_heads"),
        ({"eos_token_id": [360, 362]}, "eos_token_id"),
        ({"mask_token_id": 384}, "mask_id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
)
def test_refused_by_name(hf, change, named):
    with pytest.raises(ConfigError, match=named):
        model_config({**hf, **change})


@pytest.mark.parametrize("kind", ["full_bidirectional", "block_causal", "kv_cache_block_causal"])
def test_golden_logits_include_dream(golden, kind):
    adapters = {entry["adapter"] for entry in golden.logits(kind) if entry["model"] == "dream-tiny"}
    assert adapters == {None, "dream-tiny-d2f-lora"}


@pytest.mark.parametrize("kind", ["padded_left", "padded_right", "full_bidirectional_selected_positions"])
def test_golden_logits_of_batches_and_long_inputs_include_dream(golden, kind):
    assert "dream-tiny" in {entry["model"] for entry in golden.logits(kind)}


def test_hidden_states(golden):
    """Layer by layer: the embedding, what each later layer gets, and the last one after the final norm."""
    (entry,) = (e for e in golden.logits("full_bidirectional") if e["name"] == "dream-tiny/full")
    cfg, params, a = golden.config("dream-tiny"), golden.params("dream-tiny"), golden.arrays(entry)
    for depth, wanted in enumerate(a["hidden_states"][:-1]):
        shallow = dataclasses.replace(cfg, n_layers=max(depth, 1))
        kept = {n: w for n, w in params.items() if not n.startswith("layers.") or int(n.split(".")[1]) < depth}
        actual = llada.hidden(kept, shallow, a["input_ids"]) if depth else llada.embed(params, cfg, a["input_ids"])
        np.testing.assert_allclose(actual, wanted, atol=1e-4, rtol=1e-4, err_msg=f"layer {depth}")
    last = rms_norm(llada.hidden(params, cfg, a["input_ids"]), params["norm"], None, cfg.rms_norm_eps)
    np.testing.assert_allclose(last, a["hidden_states"][-1], atol=1e-4, rtol=1e-4)


def test_biases_of_the_projections_are_used(golden):
    """The golden biases are not zero, so that logits without them are far away."""
    (entry,) = (e for e in golden.logits("full_bidirectional") if e["name"] == "dream-tiny/full")
    cfg, params, a = golden.config("dream-tiny"), golden.params("dream-tiny"), golden.arrays(entry)
    for short in ("q_bias", "k_bias", "v_bias"):
        without = {name: jnp.zeros_like(w) if name.endswith(short) else w for name, w in params.items()}
        away = np.abs(np.asarray(llada.logits(without, cfg, a["input_ids"])) - a["logits"]).max()
        assert away > 0.1, short


def test_small_epsilon(golden):
    """Dream's 1e-6: whole models cannot tell it from LLaDA's 1e-5."""
    a = golden.arrays({"file": "logits/rms_norm.npz"})
    actual = rms_norm(jnp.asarray(a["x"]), jnp.asarray(a["weight"]), None, 1e-6)
    np.testing.assert_allclose(actual, a["dream_eps_1e6"], atol=1e-6, rtol=1e-5)
