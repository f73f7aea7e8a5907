"""Shared fixtures: the golden reference data, and small models made in memory."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings

from jdllm.config import DecodeConfig, ModelConfig, model_config
from jdllm.decoders import decode_config

GOLDEN = Path(__file__).parent / "data" / "golden"

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

jax.config.update("jax_default_matmul_precision", "highest")
# Programs are kept between local runs; a fresh clone starts without them.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@dataclasses.dataclass(frozen=True)
class Trace:
    """One generation of the official code: what went in, and what came out after every pass."""

    name: str
    model: str
    adapter: str | None
    prompt: list[int]
    decode: DecodeConfig
    expected_ids: list[int]
    nfe: int
    arrays: dict[str, np.ndarray]


class Golden:
    """The reference data, indexed by its manifest. Weights are read by this class alone, without jdllm.convert."""

    folder = GOLDEN

    def __init__(self) -> None:
        self.manifest = json.loads((GOLDEN / "manifest.json").read_text())

    def config(self, name: str) -> ModelConfig:
        return model_config(json.loads((GOLDEN / name / "config.json").read_text()))

    def params(self, name: str, adapter: str | None = None) -> dict[str, jax.Array]:
        """Flat jdllm weights in float32, the adapter merged in float32."""
        tensors = _tensors(GOLDEN / name)
        if adapter:
            settings = json.loads((GOLDEN / adapter / "adapter_config.json").read_text())
            scale = settings["lora_alpha"] / settings["r"]
            lora = _tensors(GOLDEN / adapter)
            for a_name, a in lora.items():
                if ".lora_A." in a_name:
                    target = a_name.removeprefix("base_model.model.").replace(".lora_A", "")
                    tensors[target] = tensors[target] + scale * lora[a_name.replace(".lora_A", ".lora_B")] @ a
        names = dict(q_proj="q", k_proj="k", v_proj="v", up_proj="up")
        names |= dict(attn_norm="attn_norm", attn_out="attn_out", ff_norm="ff_norm", ff_proj="gate", ff_out="down")
        names |= dict(input_layernorm="attn_norm", o_proj="attn_out", post_attention_layernorm="ff_norm")
        names |= dict(gate_proj="gate", down_proj="down")
        top = dict(wte="embed", ln_f="norm", ff_out="head", embed_tokens="embed", norm="norm", lm_head="head")
        params = {}
        for key, value in tensors.items():
            *path, module, kind = key.split(".")
            layer = next((part for part in path if part.isdigit()), None)
            name = f"layers.{layer}.{names[module]}" if layer else top[module]
            name += "_bias" if kind == "bias" else ""
            params[name] = jnp.asarray(value.T if value.ndim == 2 and name != "embed" else value)
        return params

    def logits(self, kind: str) -> list[dict[str, Any]]:
        """The entries of one kind, of every family."""
        return [entry for entry in self.manifest["logits"] if entry["kind"] == kind]

    def arrays(self, entry: dict[str, Any]) -> dict[str, np.ndarray]:
        with np.load(GOLDEN / entry["file"]) as data:
            return dict(data)

    def d2f(self, family: str = "llada") -> list[Trace]:
        """A family's D2F traces. The reference shortens max_new_tokens to whole blocks; so do these settings."""
        return self.traces(f"d2f:{family}")

    def traces(self, algorithm: str) -> list[Trace]:
        """The traces of one algorithm, as the manifest names it. A padded batch is one trace a row."""
        file = algorithm.partition(":")[0]
        with np.load(GOLDEN / "traces" / f"{file}.npz") as data:
            arrays = dict(data)
        found = []
        for t in self.manifest["traces"]:
            if t["algorithm"] == algorithm:
                found += [self._trace(row, arrays) for row in _unbatched(t)]
        return found

    def _trace(self, t: dict[str, Any], arrays: dict[str, np.ndarray]) -> Trace:
        prefix = t["arrays"]["prefix"]
        pick = lambda array: array if "row" not in t else array[:, t["row"], t["padding"] :]
        kept = t.get("prompt_left_truncated_to") or len(t["prompt_ids"])
        family = self.config(t["model"]).family
        decode = decode_config(_settings(t), family)
        if decode.confidence_eos_eot_inf:
            decode = dataclasses.replace(decode, eot_id=self.manifest["special_ids"][family]["eot"])
        return Trace(
            name=t["name"],
            model=t["model"],
            adapter=t["adapter"],
            prompt=t["prompt_ids"][-kept:],
            decode=decode,
            expected_ids=t["expected_ids"],
            nfe=t["nfe"],
            arrays={k.removeprefix(prefix): pick(v) for k, v in arrays.items() if k.startswith(prefix)},
        )


def _settings(t: dict[str, Any]) -> dict[str, Any]:
    """A trace's settings by our names."""
    s = {name: value for name, value in t["settings"].items() if value is not None and name != "max_length"}
    algorithm = t["algorithm"].partition(":")[0]
    decoder = {"llada_vanilla": "llada", "dream_vanilla": "dream"}.get(algorithm, algorithm.split("_dllm")[0])
    ours = {"decoder": "fast-dllm" if decoder == "fast" else decoder, "early_stop": False}
    if "max_new_tokens" in s:
        ours["max_tokens"] = s.pop("max_new_tokens") // s["block_size"] * s["block_size"]
    names = {"gen_length": "max_tokens", "block_length": "block_size", "sampling_strategy": "confidence"}
    ours |= {names.get(name, name): value for name, value in s.items()}
    if ours.get("confidence") == "margin_confidence":
        ours["confidence"] = "margin"
    return ours


def _unbatched(t: dict[str, Any]) -> list[dict[str, Any]]:
    if not isinstance(t["prompt_ids"][0], list):
        return [t]
    rows = []
    for i, (ids, mask) in enumerate(zip(t["prompt_ids"], t["attention_mask"], strict=True)):
        prompt = [token for token, real in zip(ids, mask, strict=True) if real]
        padded = {"name": f"{t['name']}-{i}", "row": i, "padding": len(ids) - len(prompt)}
        rows.append({**t, **padded, "prompt_ids": prompt, "expected_ids": t["expected_ids"][i]})
    return rows


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of the folder's safetensors files, float32; read by hand so that no loader under test is used."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        for name, info in json.loads(raw[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in info["data_offsets"])
                dtype = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}[info["dtype"]]
                found[name] = np.frombuffer(raw[begin:end], dtype).reshape(info["shape"]).astype(np.float32)
    return found


@pytest.fixture(scope="session")
def golden() -> Golden:
    return Golden()


@pytest.fixture(scope="session")
def tiny() -> ModelConfig:
    """FIX-TINY of the case list: 160 ids, of which 0..127 are bytes and the last four have no tokenizer entry."""
    return ModelConfig(
        family="llada",
        vocab_size=160,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=4,
        d_ff=64,
        max_sequence_length=128,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        mask_id=155,
        eos_id=151,
        pad_id=151,
    )
