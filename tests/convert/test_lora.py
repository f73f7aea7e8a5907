"""Merging PEFT adapters. alpha differs from r throughout, so that a forgotten scale shows."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jdllm.config import model_config
from jdllm.convert import names
from jdllm.convert.lora import open_adapter

BLOCK = "model.transformer.blocks."
LAYOUTS = Path(__file__).parents[1] / "data" / "golden" / "real_layouts"
BF16 = ml_dtypes.bfloat16


def _check(made, folder, read, scales, dtype=np.float32):
    """Every weight is the base's, plus scale * B A where ``scales`` has its module; cast once."""
    for weight in made.base.weights:
        want = made.base.tensors[weight.tensor].astype(np.float32)
        if weight.module in scales:
            want = made.merged(weight.module, scales[weight.module])
        want = want.astype(dtype)
        got = read(folder, weight.name)
        np.testing.assert_allclose(
            got.astype(np.float32), (want.T if weight.transposed else want).astype(np.float32), atol=1e-6, rtol=0,
            err_msg=weight.name,
        )  # fmt: skip


def _modules(made):
    return {key.split(".lora_")[0].removeprefix("base_model.model.") for key in made.tensors}


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_g1_rslora_scale(base, adapter, run, read, tmp_path, rslora, scale):
    source = base()
    made = adapter(source, r=4, alpha=8, use_rslora=rslora)
    code, out, _ = run(source.write(), tmp_path / "out", "--lora", made.write())
    assert code == 0 and "8 of 8 merged, max |delta| " in out
    _check(made, tmp_path / "out", read, dict.fromkeys(_modules(made), scale))
    record = json.loads((tmp_path / "out" / "jdllm.json").read_text())
    assert record["decoder"] == "d2f"
    assert record["adapter"]["r"] == 4 and record["adapter"]["alpha"] == 8 and record["adapter"]["rslora"] is rslora
    assert record["adapter"]["targets"] == ["attn_out", "k_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["ff_out"]),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("bias", "all"),
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("init_lora_weights", "pissa"),
        ("use_qalora", True),
        ("layer_replication", [[0, 1]]),
        ("target_parameters", ["q_proj.weight"]),
        ("trainable_token_indices", [1, 2]),
        ("a_field_of_next_year", {"on": True}),
        ("r", 0),
        ("lora_alpha", "8"),
        ("rank_pattern", {"q_proj": -1}),
        ("rank_pattern", {"(": 4}),
        ("target_modules", None),
        ("target_modules", 5),
    ],
)
def test_g1_g5_g6_what_is_not_plain_lora_is_refused_by_name(base, adapter, refuse, tmp_path, field, value):
    source = base()
    made = adapter(source, **({} if field in ("r",) else {"lora_dropout": 0.1}))
    made.config[field] = value
    refuse(source.write(), tmp_path / "out", "--lora", made.write(), words=[field, "adapter_config.json"])


def test_rank_and_alpha_patterns(base, adapter, run, read, tmp_path):
    source = base()
    made = adapter(source, r=4, alpha=8)
    rng = np.random.default_rng(3)
    for i in range(2):
        key = f"base_model.model.{BLOCK}{i}.q_proj"
        made.tensors[f"{key}.lora_A.weight"] = rng.normal(0, 0.2, (2, 32)).astype(np.float32)
        made.tensors[f"{key}.lora_B.weight"] = rng.normal(0, 0.2, (32, 2)).astype(np.float32)
    made.config["rank_pattern"] = {"q_proj": 2}
    made.config["alpha_pattern"] = {r"blocks\.1\.v_proj": 12, "^model.transformer.blocks.0.k_proj": 1, "proj": 99}
    assert run(source.write(), tmp_path / "out", "--lora", made.write())[0] == 0
    scales = dict.fromkeys(_modules(made), 2.0)
    scales |= {f"{BLOCK}{i}.q_proj": 4.0 for i in range(2)}
    scales |= {f"{BLOCK}1.v_proj": 3.0, f"{BLOCK}0.k_proj": 0.25}
    _check(made, tmp_path / "out", read, scales)


@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("adapted", [np.float32, np.float16, BF16])
def test_g2_dtype_per_tensor(base, adapter, run, read, tmp_path, stored, adapted):
    source = base(dtype=stored)
    made = adapter(source, dtype=adapted)
    assert run(source.write(), tmp_path / "out", "--lora", made.write(), "--dtype", "float32")[0] == 0
    _check(made, tmp_path / "out", read, dict.fromkeys(_modules(made), 2.0))


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.removeprefix("base_model.model.model."),
        lambda key: "base_model.model." + key,
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.replace("base_model.model.model.", "base_model.model.").replace(".weight", ".d2f.weight"),
    ],
)
def test_g4_known_prefixes_and_adapter_names(base, adapter, run, read, tmp_path, rename):
    source = base()
    made = adapter(source)
    tensors = made.tensors
    made.tensors = {rename(key): value for key, value in tensors.items()}
    assert run(source.write(), tmp_path / "out", "--lora", made.write())[0] == 0
    made.tensors = tensors
    _check(made, tmp_path / "out", read, dict.fromkeys(_modules(made), 2.0))


def test_g4_missing_and_unused_tensors_are_listed(base, adapter, refuse, tmp_path):
    source = base()
    folder = source.write()
    made = adapter(source)
    q = f"base_model.model.{BLOCK}0.q_proj"

    lonely = dict(made.tensors)
    del lonely[f"{q}.lora_B.weight"]
    whole, made.tensors = made.tensors, lonely
    refuse(folder, tmp_path / "out", "--lora", made.write(), words=["incomplete", f"{q}.lora_A.weight"])

    made.tensors = {key: value for key, value in whole.items() if not key.startswith(q)}
    refuse(folder, tmp_path / "out", "--lora", made.write(), words=["targets", f"{BLOCK}0.q_proj"])

    for odd in (f"base_model.model.{BLOCK}7.q_proj.lora_A.weight", f"{q}.lora_magnitude_vector", "x.lora_A.weight"):
        made.tensors = {**whole, odd: np.zeros((4, 32), np.float32)}
        refuse(folder, tmp_path / "out", "--lora", made.write(), words=["fit no module", odd])

    up = f"base_model.model.{BLOCK}0.up_proj"
    extra = {f"{up}.lora_A.weight": np.zeros((4, 32), np.float32), f"{up}.lora_B.weight": np.zeros((64, 4), np.float32)}
    made.tensors = {**whole, **extra}
    refuse(folder, tmp_path / "out", "--lora", made.write(), words=["does not target", f"{BLOCK}0.up_proj"])

    made.tensors = {**whole, f"{q}.lora_A.weight": np.zeros((3, 32), np.float32)}
    refuse(folder, tmp_path / "out", "--lora", made.write(), words=["[3, 32]", "expected [4, 32]"])

    made.tensors = {**whole, f"{q}.lora_A.default.weight": whole[f"{q}.lora_A.weight"]}
    refuse(folder, tmp_path / "out", "--lora", made.write(), words=["two tensors", f"{BLOCK}0.q_proj"])


def test_g4_not_an_adapter_folder(base, adapter, refuse, tmp_path):
    source = base()
    folder = source.write()
    refuse(folder, tmp_path / "out", "--lora", tmp_path / "no", words="does not exist")
    refuse(folder, tmp_path / "out", "--lora", folder, words="adapter_config.json")
    made = adapter(source).write()
    (made / "adapter_model.safetensors").rename(made / "adapter_model.bin")
    refuse(folder, tmp_path / "out", "--lora", made, words=["adapter_model.safetensors", "pickle"])
    refuse(made, tmp_path / "out", words="is an adapter; give its base model as SRC")


def test_layers_to_transform_and_pattern_targets(base, adapter, run, tmp_path):
    source = base()
    made = adapter(source)
    made.tensors = {key: value for key, value in made.tensors.items() if ".blocks.1." in key}
    made.config["layers_to_transform"] = [1]
    code, out, _ = run(source.write(), tmp_path / "out", "--lora", made.write())
    assert code == 0 and "4 of 4 merged" in out
    made.config |= {"layers_to_transform": None, "target_modules": r".*\.1\.([qkv]_proj|attn_out)"}
    code, out, _ = run(source.folder, tmp_path / "out", "--lora", made.write(), "--overwrite")
    assert code == 0 and "4 of 4 merged" in out


def test_g7_merged_in_float32_with_one_cast(base, adapter, run, read, tmp_path):
    source = base(dtype=BF16, d_model=64)
    made = adapter(source, r=32, alpha=16, dtype=BF16)
    code, out, _ = run(source.write(), tmp_path / "out", "--lora", made.write(), "--dtype", "bfloat16")
    assert code == 0
    rounding = 0.0
    for weight in source.weights:
        if weight.module in _modules(made):
            exact = made.merged(weight.module, 0.5)
            once = exact.astype(BF16)
            rounding = max(rounding, np.abs(exact - once.astype(np.float32)).max())
            np.testing.assert_array_equal(read(tmp_path / "out", weight.name), once.T)
    assert f"largest rounding error {rounding:.3g} (bfloat16)" in out
    code, out, _ = run(source.folder, tmp_path / "out", "--lora", made.folder, "--overwrite")
    assert code == 0 and "largest rounding error 0 (float32)" in out  # a merge is exact unless asked to round


@pytest.mark.parametrize("target", ["ff_out", "wte"])
def test_g8_tied_head_and_embedding_refuse_an_adapter(base, adapter, refuse, run, tmp_path, target):
    source = base(weight_tying=True)
    made = adapter(source, targets=[target])
    if target == "ff_out":  # of the head, which is no module of a tied model
        made.tensors["base_model.model.model.transformer.ff_out.lora_A.weight"] = np.ones((4, 32), np.float32)
        made.tensors["base_model.model.model.transformer.ff_out.lora_B.weight"] = np.ones((160, 4), np.float32)
        refuse(source.write(), tmp_path / "out", "--lora", made.write(), words="model.transformer.ff_out.lora_A")
    else:
        made.tensors = _embedding_adapter()
        refuse(source.write(), tmp_path / "out", "--lora", made.write(), words=["weight_tying", "wte"])
    assert run(source.folder, tmp_path / "out")[0] == 0
    assert json.loads((tmp_path / "out" / "jdllm.json").read_text())["model"]["weight_tying"] is True


def _embedding_adapter():
    rng = np.random.default_rng(5)
    key = "base_model.model.model.transformer.wte.lora_embedding_"
    return {
        f"{key}A": rng.normal(0, 0.2, (4, 160)).astype(np.float32),
        f"{key}B": rng.normal(0, 0.2, (32, 4)).astype(np.float32),
    }


def test_embedding_adapter(base, adapter, run, read, tmp_path):
    source = base()
    made = adapter(source, targets=["wte"])
    made.tensors = _embedding_adapter()
    assert run(source.write(), tmp_path / "out", "--lora", made.write(), "--verify")[0] == 0
    a, b = made.tensors.values()
    want = source.tensors["model.transformer.wte.weight"] + 2.0 * (b @ a).T
    np.testing.assert_allclose(read(tmp_path / "out", "embed"), want, atol=1e-6)


def test_g13_target_ff_out_means_head_and_down_projections_each_in_its_place(base, adapter, run, read, tmp_path):
    source = base()
    made = adapter(source, targets=["ff_out"])
    assert _modules(made) == {"model.transformer.ff_out", f"{BLOCK}0.ff_out", f"{BLOCK}1.ff_out"}
    assert run(source.write(), tmp_path / "out", "--lora", made.write())[0] == 0
    _check(made, tmp_path / "out", read, dict.fromkeys(_modules(made), 2.0))


@pytest.mark.parametrize(
    ("model", "lora", "layers", "shapes"),
    [
        ("llada-8b", "d2f-llada-lora", 32, {(4096, 4096)}),
        ("dream-7b", "d2f-dream-lora", 28, {(3584, 3584), (512, 3584)}),
    ],
)
def test_the_published_d2f_adapters_fit_their_models(tmp_path, model, lora, layers, shapes):
    """Names and shapes of the real files; tensors of one r are faked by a sparse file."""
    base = json.loads((LAYOUTS / f"{model}.json").read_text())
    layout = json.loads((LAYOUTS / f"{lora}.json").read_text())
    config = {key: layout[key] for key in ("r", "lora_alpha", "target_modules")}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    header, offset = {}, 0
    for name, shape in layout["tensors"].items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(tmp_path / "adapter_model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    found = open_adapter(tmp_path, names.weights(model_config(base["config"])), tied=False)
    assert len(found.changes) == 4 * layers
    assert {change.shape for change in found.changes.values()} == shapes
    assert {change.scale for change in found.changes.values()} == {1.0}


def test_adapter_of_another_base_is_noted(base, adapter, run, tmp_path):
    source = base()
    made = adapter(source, base_model_name_or_path="GSAI-ML/LLaDA-8B-Instruct")
    code, _, err = run(source.write(), tmp_path / "out", "--lora", made.write())
    assert code == 0 and "trained on GSAI-ML/LLaDA-8B-Instruct; SRC is base" in err
