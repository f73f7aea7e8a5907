"""Conversion of Dream's layout: Qwen2's names, biases on q, k and v."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from jdllm.checkpoint import load
from jdllm.convert import names

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
ATTENTION = "model.layers.0.self_attn."


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_every_tensor_lands_under_its_name(dream, run, read, tmp_path, stored):
    made = dream(dtype=stored)
    assert run(made.write(shards=3), tmp_path / "out")[0] == 0
    assert len(made.weights) == 2 * 12 + 3
    for weight in made.weights:
        want = made.tensors[weight.tensor]
        np.testing.assert_array_equal(read(tmp_path / "out", weight.name), want.T if weight.transposed else want)
    by_tensor = {weight.tensor: weight.name for weight in made.weights}
    assert by_tensor[ATTENTION + "k_proj.bias"] == "layers.0.k_bias"
    assert by_tensor["model.layers.1.mlp.down_proj.weight"] == "layers.1.down"
    assert by_tensor["lm_head.weight"] == "head"
    checkpoint = load(tmp_path / "out")
    assert checkpoint.config.shifted_logits and checkpoint.config.family == "dream"
    assert {key: checkpoint.meta[key] for key in ("family", "decoder", "adapter")} == {
        "family": "dream", "decoder": "dream", "adapter": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("drop", "add", "words"),
    [
        (ATTENTION + "q_proj.bias", None, "missing tensors: " + ATTENTION + "q_proj.bias"),
        (None, ATTENTION + "o_proj.bias", "unexpected tensors: " + ATTENTION + "o_proj.bias"),
        (None, ATTENTION + "q_norm.weight", "unexpected tensors: " + ATTENTION + "q_norm.weight"),
        ("lm_head.weight", "model.lm_head.weight", "unexpected tensors: model.lm_head.weight"),
        ("model.norm.weight", "model.transformer.ln_f.weight", "missing tensors: model.norm.weight"),
    ],
)
def test_other_tensors_are_refused_by_name(dream, refuse, tmp_path, drop, add, words):
    made = dream()
    made.tensors.pop(drop, None)
    if add:
        made.tensors[add] = np.zeros(32, np.float32)
    refuse(made.write(), tmp_path / "out", words=words)


def test_biases_of_another_size_are_refused(dream, refuse, tmp_path):
    made = dream()
    made.tensors[ATTENTION + "k_proj.bias"] = np.zeros(32, np.float32)
    refuse(made.write(), tmp_path / "out", words=[ATTENTION + "k_proj.bias is [32]", "[16]"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapter_merged_and_verified(dream, adapter, run, read, tmp_path, dtype):
    made = dream()
    lora = adapter(made, targets=TARGETS, r=4, alpha=12)
    code, out, err = run(made.write(), tmp_path / "out", "--lora", lora.write(), "--verify", "--dtype", dtype)
    assert code == 0, err
    assert "8 of 8 merged" in out and "largest difference of a logit from PyTorch" in out
    for short, name in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "attn_out")):
        want = lora.merged(ATTENTION + short, 3.0).T
        got = read(tmp_path / "out", f"layers.0.{name}").astype(np.float32)
        np.testing.assert_allclose(got, want, atol=1e-6, rtol=0 if dtype == "float32" else 2**-8)
    record = json.loads((tmp_path / "out" / "jdllm.json").read_text())
    assert (record["family"], record["decoder"], record["adapter"]["merged"]) == ("dream", "d2f", 8)


def test_an_adapter_for_llada_fits_nothing_here(dream, adapter, refuse, tmp_path):
    made = dream()
    lora = adapter(made, targets=TARGETS)
    lora.config["target_modules"] = ["q_proj", "k_proj", "v_proj", "attn_out"]
    refuse(made.write(), tmp_path / "out", "--lora", lora.write(), words=["does not target", "o_proj"])
    lora.tensors = {"base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight": np.zeros((4, 32), np.float32)}
    refuse(made.folder, tmp_path / "out", "--lora", lora.write(), words=["fit no module", "blocks.0.q_proj"])


def test_tied_embeddings(dream, adapter, run, refuse, tmp_path):
    made = dream(tie_word_embeddings=True)
    assert "lm_head.weight" not in made.tensors
    code, out, err = run(made.write(), tmp_path / "out", "--verify")
    assert code == 0 and "largest difference" in out, err
    lora = adapter(made, targets=["embed_tokens"])
    key = "base_model.model.model.embed_tokens.lora_embedding_"
    lora.tensors = {f"{key}A": np.ones((4, 160), np.float32), f"{key}B": np.ones((32, 4), np.float32)}
    refuse(made.folder, tmp_path / "new", "--lora", lora.write(), words=["weight_tying", "embed_tokens"])


def test_verify_notices_a_wrong_row_of_the_table(dream, run, tmp_path, monkeypatch):
    """gate and up have the same shape; the PyTorch side has its own list of names."""
    other = {"layers.{i}.gate": "layers.{i}.up", "layers.{i}.up": "layers.{i}.gate"}
    table = tuple(dataclasses.replace(rule, weight=other.get(rule.weight, rule.weight)) for rule in names.DREAM)
    monkeypatch.setitem(names.TABLES, "dream", table)
    code, _, err = run(dream().write(), tmp_path / "out", "--verify")
    assert code == 1 and "verify failed" in err


def test_the_mask_id_may_be_the_tokenizers_alone(dream, run, tmp_path):
    made = dream()
    del made.hf["mask_token_id"]
    folder = made.write()
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<|mask|>"}))
    (folder / "added_tokens.json").write_text(json.dumps({"<|mask|>": 155}))
    code, _, err = run(folder, tmp_path / "out")
    assert code == 0 and "mask_token_id 155 is the tokenizer's" in err
