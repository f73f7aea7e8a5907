"""The cost table on a small model, and that the preset is the real LLaDA-8B."""

import dataclasses
import json

from benchmarks import golden
from benchmarks.presets import LLADA_8B
from benchmarks.shapes import step_costs
from jdllm.config import model_config

SMALL = dataclasses.replace(
    LLADA_8B, vocab_size=64, d_model=16, n_layers=3, n_heads=2, n_kv_heads=1, d_ff=32, mask_id=63, eos_id=62, pad_id=62
)


def test_preset_equals_the_real_config():
    layout = json.loads((golden.FOLDER / "real_layouts" / "llada-8b.json").read_text())
    assert model_config(layout["config"]) == LLADA_8B


def test_costs_of_a_small_model():
    costs = step_costs(SMALL, rows=2, canvas=64)
    assert costs["lowers_for"] == ["cuda", "tpu"]
    assert costs["kv_bytes_per_row"] == 2 * 2 * 3 * 64 * 1 * 8  # K and V, bfloat16, layers, positions, head, size
    assert 0 < costs["flops_needed"] < 4 * costs["flops_xla"]
    assert costs["bytes_needed"] > 0 and costs["bytes_xla"] > 0 and costs["temporary_bytes"] > 0
    assert costs["rows_that_fit"] > 1_000_000
