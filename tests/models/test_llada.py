"""LLaDA's arithmetic against the official code's numbers and against plain float64 NumPy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import DecodeConfig
from jdllm.denoise.request import request
from jdllm.denoise.state import empty_state
from jdllm.denoise.step import _forward
from jdllm.denoise.window import Bucket, pack
from jdllm.models import llada
from jdllm.models.layers import attention, rms_norm, rope_tables, rotate

PAIRS = [("llada-tiny", None), ("llada-tiny", "llada-tiny-d2f-lora")]
PAIRS += [("llada-tiny-gqa", None), ("llada-tiny-gqa", "llada-tiny-gqa-lora")]


def entries(golden, kind):
    found = golden.logits(kind)
    assert found
    return [(e, golden.config(e["model"]), golden.params(e["model"], e["adapter"]), golden.arrays(e)) for e in found]


def assert_logits(entry, actual, wanted):
    tolerance = entry["tolerance"]["float32"]
    np.testing.assert_allclose(actual, wanted, atol=tolerance["atol"], rtol=tolerance["rtol"], err_msg=entry["name"])
    ordered = np.sort(wanted, axis=-1)
    clear = ordered[..., -1] - ordered[..., -2] > 1e-3
    np.testing.assert_array_equal(np.argmax(actual, -1)[clear], np.argmax(wanted, -1)[clear])


def test_full_bidirectional(golden):
    for entry, cfg, params, a in entries(golden, "full_bidirectional"):
        assert_logits(entry, np.asarray(llada.logits(params, cfg, a["input_ids"])), a["logits"])


def test_long_input(golden):
    for entry, cfg, params, a in entries(golden, "full_bidirectional_selected_positions"):
        actual = np.asarray(llada.logits(params, cfg, np.atleast_2d(a["input_ids"])))[:, a["positions"]]
        assert_logits(entry, actual.reshape(a["logits"].shape), a["logits"])


def test_block_causal(golden):
    for entry, cfg, params, a in entries(golden, "block_causal"):
        actual = llada.logits(params, cfg, a["input_ids"], jnp.asarray(a["allowed"], bool)[None])
        assert_logits(entry, np.asarray(actual), a["logits"])


@pytest.mark.parametrize("kind", ["padded_left", "padded_right"])
@pytest.mark.parametrize("pad", [None, 0, 361, 370])
def test_a1_padding_is_not_seen(golden, kind, pad):
    """Whatever ids sit in the padding, real positions have the reference's logits."""
    for entry, cfg, params, a in entries(golden, kind):
        real = a["attention_mask"].astype(bool)
        ids = a["input_ids"] if pad is None else np.where(real, a["input_ids"], pad)
        actual = llada.logits(params, cfg, ids, jnp.asarray(real)[:, None, :] & jnp.ones((1, ids.shape[1], 1), bool))
        assert_logits(entry, np.asarray(actual)[real], a["logits"][real])


def test_cached_windows(golden):
    """The chain of passes of D2F decoding, through the step's own forward: only the window is computed, and the cache
    keeps what earlier passes wrote."""
    for entry, cfg, params, a in entries(golden, "kv_cache_block_causal"):
        settings = entry["settings"]
        S = 32
        decode = DecodeConfig(max_tokens=S - settings["prompt_length"], block_size=settings["block_size"])
        state = empty_state(cfg, 1, S, jnp.float32)
        for i, stage in enumerate(settings["stages"]):
            whole = np.ravel(a[f"s{i}_whole_sequence"])
            asked = request(whole[: settings["prompt_length"]].tolist(), decode, cfg, S)
            state = dataclasses.replace(
                state,
                progress=asked.progress[None],
                settings=asked.settings[None],
                tokens=jnp.full((1, S), cfg.mask_id).at[0, : len(whole)].set(whole),
            )
            length, start = np.array([stage["input_end"]]), np.array([stage["input_start"]])
            rows = dataclasses.replace(state.rows, length=length, end=length, start=start)
            bucket = Bucket(1, S)
            packing = pack(rows, jnp.zeros(1, bool), bucket, S)
            hidden, keys, values = _forward(params, state, rows, packing, cfg)
            state = dataclasses.replace(state, keys=keys, values=values)
            width = stage["input_end"] - stage["input_start"]
            actual = np.asarray(llada.head(params, cfg, hidden[:width]))
            assert_logits(entry, actual, a[f"s{i}_logits"].reshape(actual.shape))


def test_prompt_does_not_see_what_follows(golden):
    """Block-causal: hidden states of the prompt are the same whatever the generated part holds."""
    cfg, params = golden.config("llada-tiny"), golden.params("llada-tiny")
    block = np.maximum(0, (np.arange(24) - 8) // 4 + 1)
    mask = jnp.asarray(block[None, :] <= block[:, None])[None]
    tokens = np.arange(24)[None] + 5
    other = tokens.copy()
    other[:, 8:] = cfg.mask_id
    first, second = (np.asarray(llada.hidden(params, cfg, t, mask))[:, :8] for t in (tokens, other))
    np.testing.assert_array_equal(first, second)


def test_bfloat16_is_as_good_as_the_official_code(golden):
    """Mean difference from the float32 logits at most 1.5 times that of the official code in bf16."""
    for entry, cfg, params, a in entries(golden, "full_bidirectional"):
        half = {name: w.astype(jnp.bfloat16) for name, w in params.items()}
        actual = np.asarray(llada.logits(half, cfg, a["input_ids"]))
        assert np.abs(actual - a["logits"]).mean() <= 1.5 * entry["bf16_reference"]["mean_abs_diff_to_float32"]


@pytest.mark.parametrize(("prefix", "theta"), [("llada", 500_000.0), ("dream", 1_000_000.0)])
def test_i1_rope_tables_at_real_size(golden, prefix, theta):
    a = golden.arrays({"file": "logits/rope_tables.npz"})
    sin, cos = rope_tables(jnp.asarray(a["positions"], jnp.int32), 128, theta)
    names = {n: v for n, v in a.items() if n.startswith(prefix)}
    wanted_sin = next(v for n, v in names.items() if n.endswith("sin"))
    wanted_cos = next(v for n, v in names.items() if n.endswith("cos"))
    np.testing.assert_allclose(sin, wanted_sin[:, :64], atol=1e-6)
    np.testing.assert_allclose(cos, wanted_cos[:, :64], atol=1e-6)


@pytest.mark.parametrize("position", [0, 255, 257, 259, 1023, 4095])
def test_i1_i2_rope_angles_are_float32_in_a_bf16_model(position):
    """Positions and frequencies never pass through bfloat16."""
    inverse = 500_000.0 ** -(np.arange(0, 128, 2) / 128)
    q = np.zeros((1, 1, 128), np.float32)
    q[..., :64] = 1
    tables = rope_tables(jnp.array([position]), 128, 500_000.0)
    rotated = np.asarray(rotate(jnp.asarray(q, jnp.bfloat16), tables).astype(jnp.float32))[0, 0]
    np.testing.assert_allclose(rotated[:64], np.cos(position * inverse), atol=5e-3)
    np.testing.assert_allclose(rotated[64:], np.sin(position * inverse), atol=5e-3)
    np.testing.assert_allclose(tables[1][0], np.cos(position * inverse), atol=3e-4)


def test_rms_norm(golden):
    a = golden.arrays({"file": "logits/rms_norm.npz"})
    key = {n.lower(): n for n in a}
    x, weight = a[key["x"]] if "x" in key else a["inputs"], a["weight"]
    actual = rms_norm(jnp.asarray(x), jnp.asarray(weight), None, 1e-5)
    wanted = next(v for n, v in a.items() if "llada" in n and "bf16" not in n and "bfloat16" not in n)
    np.testing.assert_allclose(actual, wanted, atol=1e-6, rtol=1e-5)


def numpy_logits(p, cfg, tokens):
    """The forward pass of one sequence in float64, every option of the config, written apart from jdllm.models."""
    p = {k: np.asarray(v, np.float64) for k, v in p.items()}

    def norm(x, name):
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_norm_eps) * p[name]
        return y + p.get(f"{name}_bias", 0)

    def dense(x, name):
        return x @ p[name] + p.get(f"{name}_bias", 0)

    H, n = cfg.head_dim, len(tokens)
    angle = np.arange(n)[:, None] * cfg.rope_theta ** -(np.arange(0, H, 2) / H)

    def rotated(x):
        a, b = x[..., : H // 2], x[..., H // 2 :]
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    x = p["embed"][tokens] * (np.sqrt(cfg.d_model) if cfg.input_emb_norm else 1)
    for i in range(cfg.n_layers):
        at = f"layers.{i}."
        h = norm(x, at + "attn_norm")
        q = rotated(dense(h, at + "q").reshape(n, cfg.n_heads, H))
        k = rotated(dense(h, at + "k").reshape(n, cfg.n_kv_heads, H))
        v = dense(h, at + "v").reshape(n, cfg.n_kv_heads, H)
        out = np.zeros((n, cfg.n_heads, H))
        for head in range(cfg.n_heads):
            group = head // (cfg.n_heads // cfg.n_kv_heads)
            scores = q[:, head] @ k[:, group].T / np.sqrt(H)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, group]
        x = x + dense(out.reshape(n, -1), at + "attn_out")
        h = norm(x, at + "ff_norm")
        gate = dense(h, at + "gate")
        x = x + dense(gate / (1 + np.exp(-gate)) * dense(h, at + "up"), at + "down")
    h = norm(x, "norm")
    out = h @ p["embed"].T if cfg.weight_tying else dense(h, "head")
    return out / np.sqrt(cfg.d_model) if cfg.scale_logits else out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 2},
        {"n_kv_heads": 1},
        {"qkv_bias": True},
        {"linear_bias": True, "norm_bias": True},
        {"weight_tying": True},
        {"scale_logits": True, "input_emb_norm": True},
    ],
)
def test_g12_every_option_against_numpy(tiny, options):
    """Also the half-split rotary layout: positions 0, 1 and 50 are in the input."""
    cfg = dataclasses.replace(tiny, **options)
    random = np.random.default_rng(0)
    params = {
        name: jnp.asarray(value + 0.1 * random.standard_normal(value.shape), jnp.float32)
        for name, value in llada.init(cfg, 1).items()
    }
    tokens = random.integers(0, cfg.vocab_size, 51)
    actual = np.asarray(llada.logits(params, cfg, tokens[None]))[0]
    np.testing.assert_allclose(actual, numpy_logits(params, cfg, tokens), atol=1e-4, rtol=1e-4)


def test_a8_a_query_without_keys_is_finite():
    q = jnp.ones((1, 2, 1, 4))
    k = v = q.swapaxes(1, 2)
    out = attention(q, k, v, jnp.zeros((1, 2, 2), bool))
    assert np.isfinite(np.asarray(out)).all()
