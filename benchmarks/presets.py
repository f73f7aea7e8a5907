"""The model shapes that the benchmarks measure or compute with."""

from jdllm.config import ModelConfig

COMPUTE_BOUND = ModelConfig(
    family="llada",
    vocab_size=32_768,
    d_model=768,
    n_layers=12,
    n_heads=12,
    n_kv_heads=12,
    d_ff=2048,
    max_sequence_length=1024,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    mask_id=32_767,
    eos_id=32_766,
    pad_id=32_766,
)
"""135 M parameters, 110 M of them in matrices that a masked position is multiplied with: a step is matrix products."""

LLADA_8B = ModelConfig(
    family="llada",
    vocab_size=126_464,
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    d_ff=12_288,
    max_sequence_length=4096,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    mask_id=126_336,
    eos_id=126_081,
    pad_id=126_081,
)
"""GSAI-ML/LLaDA-8B-Instruct, as model_config reads its config.json (a test compares the two)."""
