"""What benchmarks.step decodes: models, weights, and requests whose outcome hangs on no close decision, so that the two
engines must give equal tokens."""

import dataclasses

import numpy as np

from benchmarks import golden
from benchmarks.presets import COMPUTE_BOUND
from jdllm.config import DecodeConfig, ModelConfig
from jdllm.models import llada

Request = tuple[tuple[int, ...], DecodeConfig]
"""Prompt ids and how to decode them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the requests of its largest batch; a smaller batch takes the first ones.

    Attributes:
        params: flat float32 weights, NumPy.
    """

    name: str
    model: ModelConfig
    params: dict[str, np.ndarray]
    requests: tuple[Request, ...]


TINY_ADAPTER = "llada-tiny-d2f-lora"


def tiny() -> Case:
    """3 layers of width 64 with the adapter merged: a step is overhead. The golden D2F requests, the longest first (32
    positions a block, 96 tokens), unlike in prompt, block size, thresholds and length; whole blocks, since the official
    loop generates no others."""
    params, model = golden.load("llada-tiny", TINY_ADAPTER)
    traces = [t for t in golden.traces() if t.adapter == TINY_ADAPTER and t.expected_ids]
    traces.sort(key=lambda t: -t.nfe)
    requests = tuple((t.prompt_ids, _whole_blocks(t.decode)) for t in traces[:16])
    return Case("tiny", model, params, requests)


def _whole_blocks(decode: DecodeConfig) -> DecodeConfig:
    return dataclasses.replace(decode, max_tokens=decode.max_tokens // decode.block_size * decode.block_size)


COMPUTE_BOUND_DECODE = DecodeConfig(
    max_tokens=64,
    block_size=16,
    block_add_threshold=0.0,
    decoded_token_threshold=0.0,
    skip_threshold=1.0,
    early_stop=False,
    stop_ids=(),
)
"""Up to four blocks in flight, each committing its best position in every step: 3.4 tokens a step, as D2F reaches on
trained models. No probability exceeds a threshold of 1, so with random weights no decision hangs on one, and the number
of steps (19) and the windows do not depend on the weights. What can differ is the best position and its token."""


def compute_bound(model: ModelConfig = COMPUTE_BOUND, requests: int = 16, seed: int = 0) -> Case:
    """Random weights, prompts of 16 to 64 random tokens. Queries and keys are 1.5 times as large as initialised: masked
    positions of one block differ by position alone, and under nearly uniform attention their confidences nearly tie."""
    rng = np.random.default_rng(seed)
    params = {name: np.asarray(weight) for name, weight in llada.init(model, seed).items()}
    params = {name: w * np.float32(1.5) if name.endswith((".q", ".k")) else w for name, w in params.items()}
    prompts = [rng.integers(0, model.mask_id, rng.integers(16, 65)).tolist() for _ in range(requests)]
    return Case("compute-bound", model, params, tuple((tuple(p), COMPUTE_BOUND_DECODE) for p in prompts))
