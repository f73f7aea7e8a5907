"""Reading the source: files, dtypes, the mask id."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jdllm.convert.tensors import read_header


def test_g9_bf16_is_bit_exact(base, run, read, tmp_path):
    made = base(dtype=ml_dtypes.bfloat16)
    assert run(made.write(), tmp_path / "out")[0] == 0
    for weight in made.weights:
        want = made.tensors[weight.tensor]
        got = read(tmp_path / "out", weight.name)
        assert got.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got.view(np.uint16), (want.T if weight.transposed else want).view(np.uint16))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_every_dtype_to_every_dtype(base, run, read, tmp_path, stored, dtype, shards):
    made = base(dtype=stored, vocab_size=157, embedding_size=157)
    flags = ["--dtype", dtype] if dtype else []
    assert run(made.write(shards), tmp_path / "out", *flags)[0] == 0
    target = np.dtype(stored if dtype is None else {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype])
    assert json.loads((tmp_path / "out" / "jdllm.json").read_text())["dtype"] == target.name
    for weight in made.weights:
        want = made.tensors[weight.tensor].astype(target)
        np.testing.assert_array_equal(read(tmp_path / "out", weight.name), want.T if weight.transposed else want)


def test_large_weights_in_many_chunks(base, run, read, tmp_path, monkeypatch):
    """Chunks that do not divide the rows, slices of a few columns."""
    monkeypatch.setattr("jdllm.convert.orbax_format.CHUNK_BYTES", 1000)
    monkeypatch.setattr("jdllm.convert.orbax_format.SLICE_BYTES", 100)
    made = base(vocab_size=157, embedding_size=157, mlp_hidden_size=53)
    assert run(made.write(), tmp_path / "out")[0] == 0
    for weight in made.weights:
        want = made.tensors[weight.tensor]
        np.testing.assert_array_equal(read(tmp_path / "out", weight.name), want.T if weight.transposed else want)
    assert len(list((tmp_path / "out" / "weights" / "head").iterdir())) > 10


def test_mixed_dtypes_become_float32_and_it_is_said(base, run, tmp_path):
    made = base(dtype=ml_dtypes.bfloat16)
    made.tensors["model.transformer.ln_f.weight"] = made.tensors["model.transformer.ln_f.weight"].astype(np.float32)
    code, _, err = run(made.write(), tmp_path / "out")
    assert code == 0 and "stored in bfloat16 and float32; the result is float32" in err


def test_g10_missing_shard_is_named(base, refuse, tmp_path):
    folder = base().write(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuse(folder, tmp_path / "out", words="model-00002-of-00003.safetensors")


def test_g10_stray_file_is_ignored_with_a_note(base, run, read, tmp_path):
    made = base()
    folder = made.write(shards=3)
    save_file({"model.transformer.ln_f.weight": np.zeros(32, np.float32)}, folder / "model.safetensors")
    code, _, err = run(folder, tmp_path / "out")
    assert code == 0 and "model.safetensors is ignored" in err
    np.testing.assert_array_equal(read(tmp_path / "out", "norm"), made.tensors["model.transformer.ln_f.weight"])


def test_index_and_shards_must_agree(base, refuse, tmp_path):
    folder = base().write(shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, tmp_path / "out", words=[name, "index"])
    index["weight_map"][name] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, tmp_path / "out", words="same folder")


def test_pickles_are_refused(base, refuse, tmp_path):
    folder = base().write()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse(folder, tmp_path / "out", words=["pytorch_model.bin", "pickle", "safe_serialization=True"])


def test_sources_that_are_none(base, refuse, tmp_path):
    refuse(tmp_path / "nothing", tmp_path / "out", words="does not exist")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", tmp_path / "out", words="config.json")
    folder = base().write()
    (folder / "model.safetensors").unlink()
    refuse(folder, tmp_path / "out", words="neither model.safetensors nor")
    refuse(folder / "config.json", tmp_path / "out", words="not a folder")
    (folder / "config.json").write_text("{")
    refuse(folder, tmp_path / "out", words="not valid JSON")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-5], "cut short"),
        (lambda data: data[:4], "cut short"),
        (lambda data: b"PK" + data, "cut short"),
        (lambda data: data[:8] + b"!" + data[9:], "not JSON"),
        (lambda data: data.replace(b'"F32"', b'"I32"', 1), "dtype I32"),
        (lambda data: data.replace(b'"F32"', b'"F16"', 1), "bytes, but F16"),
    ],
)
def test_damaged_files_are_named(base, refuse, tmp_path, damage, words):
    folder = base().write()
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refuse(folder, tmp_path / "out", words=[str(file), words])


def test_headers_agree_with_the_safetensors_library(base):
    made = base(dtype=np.float16)
    found = read_header(made.write() / "model.safetensors")
    assert found.keys() == made.tensors.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.read(), made.tensors[name])
        np.testing.assert_array_equal(tensor.read(3, 7), made.tensors[name][3:7])


@pytest.mark.parametrize("entry", [{"dtype": "F32"}, 3, {"dtype": [], "shape": ["a"], "data_offsets": [0, -4]}])
def test_malformed_header_entries(base, refuse, tmp_path, entry):
    folder = base().write()
    header = json.dumps({"x": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    refuse(folder, tmp_path / "out", words="entry for x is malformed")


@pytest.mark.parametrize(("field", "value"), [("alibi", True), ("unheard_of", True), ("d_model", "32")])
def test_unusable_config_fields_are_named(base, refuse, tmp_path, field, value):
    made = base()
    made.hf[field] = value
    refuse(made.write(), tmp_path / "out", words=[field, "config.json"])


def _tokenizer(folder, mask):
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": mask} if mask else None}))
    added = [{"id": 155, "content": "<|mdm_mask|>"}, {"id": 154, "content": "<|other|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {}}}))


def test_f5_mask_id_of_the_config_wins(base, run, tmp_path):
    folder = base().write()
    _tokenizer(folder, None)
    assert run(folder, tmp_path / "out")[0] == 0
    assert json.loads((tmp_path / "out" / "jdllm.json").read_text())["model"]["mask_id"] == 155


def test_f5_mask_id_conflict_is_an_error(base, refuse, run, tmp_path):
    folder = base().write()
    _tokenizer(folder, "<|other|>")
    refuse(folder, tmp_path / "out", words=["mask_token_id 155", "<|other|>", "154"])
    _tokenizer(folder, "<|mdm_mask|>")
    assert run(folder, tmp_path / "out")[0] == 0


def test_f5_mask_id_in_the_tokenizer_alone(base, run, tmp_path):
    made = base()
    del made.hf["mask_token_id"]
    folder = made.write()
    _tokenizer(folder, "<|mdm_mask|>")
    code, _, err = run(folder, tmp_path / "out")
    assert code == 0 and "mask_token_id 155 is the tokenizer's" in err


def test_f5_mask_id_nowhere_names_what_to_add(base, refuse, tmp_path):
    made = base()
    del made.hf["mask_token_id"]
    refuse(made.write(), tmp_path / "out", words=["mask_token_id", "add"])


def test_values_of_the_wrong_kind_are_no_traceback(base, refuse, tmp_path):
    made = base()
    made.hf["mlp_hidden_size"] = "wide"
    refuse(made.write(), tmp_path / "out", words=["config.json", "wide"])
