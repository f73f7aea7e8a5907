"""Converted models compute what their sources compute: golden logits, a plain numpy forward, PyTorch."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm import tokenizer
from jdllm.checkpoint import load
from jdllm.convert import __main__ as command
from jdllm.models import llada

FORWARD = jax.jit(llada.logits, static_argnums=1)
GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
CASES = {
    entry["name"]: entry for entry in MANIFEST["logits"] if entry["kind"] in ("full_bidirectional", "block_causal")
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """(model, adapter or None) -> its checkpoint in float32, converted once."""
    folder, made = tmp_path_factory.mktemp("converted"), {}

    def convert(model, adapter):
        name = adapter or model
        if name not in made:
            lora = ["--lora", str(GOLDEN / adapter)] if adapter else []
            assert command.main([str(GOLDEN / model), str(folder / name), "--dtype", "float32", *lora]) == 0
            made[name] = load(folder / name)
        return made[name]

    return convert


@pytest.mark.parametrize("name", CASES)
def test_golden_logits(converted, name):
    entry = CASES[name]
    checkpoint = converted(entry["model"], entry["adapter"])
    arrays = np.load(GOLDEN / entry["file"])
    mask = jnp.asarray(arrays["allowed"], bool) if entry["kind"] == "block_causal" else None
    mask = mask[None] if mask is not None and mask.ndim == 2 else mask
    tokens = jnp.asarray(arrays["input_ids"], jnp.int32)
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(FORWARD(checkpoint.params, checkpoint.config, jnp.atleast_2d(tokens), mask))
    want = arrays["logits"].reshape(ours.shape)
    tolerance = entry["tolerance"]["float32"]
    np.testing.assert_allclose(ours, want, atol=tolerance["atol"], rtol=tolerance["rtol"])


def test_all_golden_cases_are_there():
    assert len(CASES) == 12
    pairs = {"llada-tiny": "d2f-lora", "llada-tiny-gqa": "lora", "dream-tiny": "d2f-lora"}
    names = {*pairs, *(f"{model}-{lora}" for model, lora in pairs.items())}
    assert {entry["adapter"] or entry["model"] for entry in CASES.values()} == names


def test_a_converted_dream_keeps_its_tokenizer(converted):
    checkpoint = converted("dream-tiny", None)
    words = tokenizer.load(checkpoint.path, checkpoint.config)
    case = MANIFEST["tokenizers"]["dream-tiny"]["chat"][0]
    assert words.encode_chat(case["messages"]) == case["ids"]


def test_g12_rotary_halves_against_a_plain_numpy_forward(base, run, tmp_path):
    """Rotary embedding turns the first half of a head against the second half, not neighbours."""
    source = base(n_kv_heads=2)
    assert run(source.write(), tmp_path / "out")[0] == 0
    checkpoint = load(tmp_path / "out")
    tokens = (np.arange(51) * 37 + 5) % 150
    ours = np.asarray(FORWARD(checkpoint.params, checkpoint.config, jnp.asarray(tokens[None], jnp.int32)))[0]
    want = _numpy_forward(source.tensors, tokens, layers=2, heads=4, kv_heads=2, theta=500000.0)
    for position in (0, 1, 50):
        np.testing.assert_allclose(ours[position], want[position], atol=1e-4, rtol=0)


def _numpy_forward(tensors, tokens, layers, heads, kv_heads, theta):
    """float64 [S, V]."""

    def t(name):
        return tensors[f"model.transformer.{name}.weight"].astype(np.float64)

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w

    def turned(x):  # [S, heads, H]
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    x = t("wte")[tokens]
    for i in range(layers):
        at = f"blocks.{i}."
        h = norm(x, t(at + "attn_norm"))
        q, k, v = ((h @ t(at + n).T).reshape(len(x), -1, 8) for n in ("q_proj", "k_proj", "v_proj"))
        q, k = turned(q), turned(k)
        mixed = []
        for head in range(heads):
            of = head // (heads // kv_heads)
            score = np.exp(q[:, head] @ k[:, of].T / np.sqrt(8))
            mixed.append(score / score.sum(-1, keepdims=True) @ v[:, of])
        x = x + np.concatenate(mixed, -1) @ t(at + "attn_out").T
        h = norm(x, t(at + "ff_norm"))
        gate = h @ t(at + "ff_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ t(at + "up_proj").T)) @ t(at + "ff_out").T
    return norm(x, t("ln_f")) @ t("ff_out").T


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_tying": True, "scale_logits": True, "input_emb_norm": True},
        {"include_bias": True, "bias_for_layer_norm": True, "n_kv_heads": 1},
        {"include_qkv_bias": True, "rms_norm_eps": 1e-3, "rope_theta": 100.0},
    ],
)
def test_g14_verify_against_pytorch_in_the_highest_precision(base, run, tmp_path, changes):
    code, out, err = run(base(**changes).write(), tmp_path / "out", "--verify")
    assert code == 0, err
    assert "largest difference of a logit from PyTorch" in out and "float32, highest matmul precision" in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_with_an_adapter(base, adapter, run, tmp_path, dtype):
    source = base()
    lora = adapter(source, targets=["q_proj", "v_proj", "ff_out"], use_rslora=True).write()
    code, out, err = run(source.write(), tmp_path / "out", "--lora", lora, "--verify", "--dtype", dtype)
    assert code == 0, err
    assert ("the cost of bfloat16" in out) == (dtype == "bfloat16")


def test_verify_without_torch_says_so(base, run, tmp_path, monkeypatch):
    monkeypatch.setattr("jdllm.convert.verify.importlib.util.find_spec", lambda name: None)
    code, out, _ = run(base().write(), tmp_path / "out", "--verify")
    assert code == 0 and "torch is not installed" in out
