"""Tiny checkpoints and adapters for them, written with the safetensors library, and the converter's command."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jdllm.config import model_config
from jdllm.convert import __main__ as command
from jdllm.convert.names import weights

TINY = {
    "model_type": "llada",
    "vocab_size": 160,
    "embedding_size": 160,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "mlp_hidden_size": 64,
    "max_sequence_length": 128,
    "rope_theta": 500000.0,
    "weight_tying": False,
    "mask_token_id": 155,
    "eos_token_id": 151,
    "pad_token_id": 151,
}
DREAM = {
    "model_type": "Dream",
    "vocab_size": 160,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "mask_token_id": 155,
    "eos_token_id": 151,
    "pad_token_id": 151,
}
D2F_TARGETS = ["q_proj", "k_proj", "v_proj", "attn_out"]


class Base:
    """A checkpoint folder: its configuration and its tensors as numpy arrays."""

    def __init__(self, folder: Path, hf: dict, dtype=np.float32):
        self.folder, self.hf = folder, hf
        rng = np.random.default_rng(0)
        self.weights = weights(model_config(self.hf))
        self.tensors = {}
        for weight in self.weights:
            scale = 0.5 if len(weight.shape) == 1 else weight.shape[-1] ** -0.5
            center = float(len(weight.shape) == 1 and weight.tensor.endswith(".weight"))
            self.tensors[weight.tensor] = (center + scale * rng.normal(size=weight.shape)).astype(dtype)

    def write(self, shards: int = 1) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.hf))
        if shards == 1:
            save_file(self.tensors, self.folder / "model.safetensors")
            return self.folder
        names, index = list(self.tensors), {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = names[i::shards]
            save_file({name: self.tensors[name] for name in part}, self.folder / file)
            index |= dict.fromkeys(part, file)
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return self.folder


class Adapter:
    """An adapter folder for a Base. ``tensors`` and ``config`` may be changed before ``write``."""

    def __init__(self, folder: Path, base: Base, targets=D2F_TARGETS, r=4, alpha=8, dtype=np.float32, **config):
        self.folder, self.base = folder, base
        self.config = {
            "peft_type": "LORA", "r": r, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none", **config
        }  # fmt: skip
        rng = np.random.default_rng(1)
        self.tensors = {}
        for weight in base.weights:
            if len(weight.shape) == 2 and weight.module.rpartition(".")[2] in targets:
                out, inner = weight.shape
                a, b = rng.normal(0, 0.2, (r, inner)), rng.normal(0, 0.2, (out, r))
                self.tensors[f"base_model.model.{weight.module}.lora_A.weight"] = a.astype(dtype)
                self.tensors[f"base_model.model.{weight.module}.lora_B.weight"] = b.astype(dtype)

    def write(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.folder / "adapter_model.safetensors")
        return self.folder

    def merged(self, module: str, scale: float) -> np.ndarray:
        """W + scale B A in float32, in PyTorch's orientation."""
        key = f"base_model.model.{module}"
        a, b = (self.tensors[f"{key}.lora_{side}.weight"].astype(np.float32) for side in "AB")
        return self.base.tensors[f"{module}.weight"].astype(np.float32) + np.float32(scale) * (b @ a)


def read_weight(checkpoint: Path, name: str) -> np.ndarray:
    """One array of a converted checkpoint, by the Zarr v2 specification alone."""
    folder = checkpoint / "weights" / name
    array = json.loads((folder / ".zarray").read_text())
    dtype = ml_dtypes.bfloat16 if array["dtype"] == "bfloat16" else array["dtype"]
    out = np.zeros(array["shape"], dtype)
    grid = [math.ceil(s / c) for s, c in zip(array["shape"], array["chunks"], strict=True)]
    for index in np.ndindex(*grid):
        chunk = np.fromfile(folder / ".".join(map(str, index)), dtype).reshape(array["chunks"])
        at = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, array["chunks"], strict=True))
        part = out[at]
        out[at] = chunk[tuple(slice(n) for n in part.shape)]
    return out


@pytest.fixture
def base(tmp_path):
    """Base(...) in a folder of its own: ``base(dtype=..., n_kv_heads=2).write()``."""
    return lambda dtype=np.float32, **changes: Base(tmp_path / "base", {**TINY, **changes}, dtype)


@pytest.fixture
def dream(tmp_path):
    """The same of a Dream."""
    return lambda dtype=np.float32, **changes: Base(tmp_path / "base", {**DREAM, **changes}, dtype)


@pytest.fixture
def adapter(tmp_path):
    return lambda base, **options: Adapter(tmp_path / "adapter", base, **options)


@pytest.fixture
def read():
    return read_weight


@pytest.fixture
def run(capsys):
    """Run the command in this process; (exit code, stdout, stderr)."""

    def call(*args) -> tuple[int, str, str]:
        try:
            code = command.main([str(arg) for arg in args])
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refuse(run, tmp_path):
    """Run the command on bad input: exit code 2, one clear line that holds all given words, nothing written."""

    def call(*args, words) -> None:
        before = sorted(path.name for path in tmp_path.iterdir())
        code, _, err = run(*args)
        assert code == 2, err
        lines = [line for line in err.splitlines() if "note:" not in line]
        assert len(lines) == 1, err
        assert lines[0].startswith("jdllm.convert: error: ")
        for word in [words] if isinstance(words, str) else words:
            assert word in lines[0]
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    return call
