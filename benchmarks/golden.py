"""The tiny golden checkpoints and their D2F traces, read from the tests' data: weights and prompts that are known to
have no close decisions, so two correct engines give equal tokens."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from jdllm.config import DecodeConfig, ModelConfig, model_config

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "golden"

_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "attn_out": "attn_out",
    "ff_norm": "ff_norm",
    "ff_proj": "gate",
    "up_proj": "up",
    "ff_out": "down",
}
_TOP_NAMES = {"wte": "embed", "ln_f": "norm", "ff_out": "head"}


@dataclasses.dataclass(frozen=True)
class Trace:
    """One golden D2F request, its prompt already cut on the left as the reference cuts it.

    Attributes:
        expected_ids, nfe: what the official code generated, and in how many forward passes.
        snapshots: int [nfe, length], the canvas after each pass, -1 behind its end.
    """

    name: str
    model: str
    adapter: str | None
    prompt_ids: tuple[int, ...]
    decode: DecodeConfig
    expected_ids: tuple[int, ...]
    nfe: int
    snapshots: np.ndarray


def traces(folder: Path = FOLDER) -> list[Trace]:
    """Every D2F trace of a LLaDA, in the manifest's order."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return [_trace(entry, folder) for entry in manifest["traces"] if entry["algorithm"] == "d2f:llada"]


def _trace(entry: dict[str, Any], folder: Path) -> Trace:
    settings = entry["settings"]
    kept = entry["prompt_left_truncated_to"] or len(entry["prompt_ids"])
    confidence = {"margin_confidence": "margin"}.get(s := settings.get("sampling_strategy", "probability"), s)
    decode = DecodeConfig(
        max_tokens=settings["max_new_tokens"],
        block_size=settings["block_size"],
        block_add_threshold=settings["block_add_threshold"],
        decoded_token_threshold=settings["decoded_token_threshold"],
        skip_threshold=settings["skip_threshold"],
        top_p=settings.get("top_p") or 1.0,
        top_k=settings.get("top_k") or 0,
        confidence=confidence,
        early_stop=False,
    )
    arrays = entry["arrays"]
    snapshots = np.zeros((0, 0), int)
    if "snapshots" in arrays["keys"]:
        with np.load(folder / arrays["file"]) as file:
            snapshots = file[arrays["prefix"] + "snapshots"]
    return Trace(
        name=entry["name"],
        model=entry["model"],
        adapter=entry["adapter"],
        prompt_ids=tuple(entry["prompt_ids"][-kept:]),
        decode=decode,
        expected_ids=tuple(entry["expected_ids"]),
        nfe=entry["nfe"],
        snapshots=snapshots,
    )


def load(model: str, adapter: str | None, folder: Path = FOLDER) -> tuple[dict[str, np.ndarray], ModelConfig]:
    """Flat float32 weights of a golden checkpoint, its adapter merged, and its configuration."""
    config = model_config(json.loads((folder / model / "config.json").read_text()))
    tensors = {n: t for file in sorted((folder / model).glob("*.safetensors")) for n, t in load_file(file).items()}
    weights = {
        _flat_name(name): tensor.float().T if tensor.ndim == 2 else tensor.float() for name, tensor in tensors.items()
    }
    if adapter:
        settings = json.loads((folder / adapter / "adapter_config.json").read_text())
        scale = settings["lora_alpha"] / settings["r"]
        lora = load_file(folder / adapter / "adapter_model.safetensors")
        for name, a in lora.items():
            if name.endswith(".lora_A.weight"):
                b = lora[name.replace("lora_A", "lora_B")]
                target = name.removeprefix("base_model.model.").replace(".lora_A", "")
                weights[_flat_name(target)] += scale * (b.float() @ a.float()).T
    weights["embed"] = weights["embed"].T
    return {name: tensor.contiguous().numpy() for name, tensor in weights.items()}, config


def _flat_name(name: str) -> str:
    parts = name.removesuffix(".weight").removeprefix("model.transformer.").split(".")
    if parts[0] == "blocks":
        return f"layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}"
    return _TOP_NAMES[parts[0]]
