"""A converted checkpoint of random weights with the shipped model's tokenizer: a model of another size to serve."""

import dataclasses
import math
from pathlib import Path

from jdllm.config import ModelConfig
from jdllm.convert.__main__ import main as convert
from jdllm.models import llada
from jdllm.train import export, recipe, tokenizer

LARGER = dataclasses.replace(
    recipe.model(tokenizer.build()), d_model=384, n_layers=6, n_heads=6, n_kv_heads=6, d_ff=1024
)
"""About ten times the parameters of the shipped model."""


def parameters(model: ModelConfig) -> int:
    """How many it has."""
    return sum(map(math.prod, llada.weight_shapes(model).values()))


def write(folder: Path, model: ModelConfig, seed: int = 0) -> Path:
    """Write it under ``folder``; the folder to serve."""
    export.write_checkpoint(folder / "hf", model, llada.init(model, seed))
    if convert([str(folder / "hf"), str(folder / "random"), "--overwrite"]) != 0:
        raise SystemExit("conversion failed")
    return folder / "random"
