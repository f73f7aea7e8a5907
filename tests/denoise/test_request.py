"""What a slot holds at the start of a request."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.config import DecodeConfig, RequestError
from jdllm.denoise.request import behind, request, with_seed
from jdllm.denoise.state import PROGRESS, SETTINGS, pack_row, unpack_numbers

LENGTH = 64
LLADA = [
    {},
    {"block_size": 5, "min_tokens": 3, "stop_ids": (7, 8)},
    {"decoder": "llada", "steps": 8, "block_size": 8},
    {"decoder": "llada", "cfg_scale": 1.5, "logits_eos_inf": True},
    {"decoder": "llada", "confidence_eos_eot_inf": True, "eot_id": 9},
    {"decoder": "fast-dllm", "factor": 1.25, "cache": "none"},
    {"decoder": "fast-dllm", "steps": 8, "cache": "dual", "block_size": 8, "remasking": "random"},
]
DREAM = [
    {},
    {"decoder": "dream", "steps": 7, "alg": "origin"},
    {"decoder": "dream", "alg": "confidence_threshold", "threshold": 0.7},
    {"decoder": "fast-dllm", "steps": 8, "block_size": 8},
]


@given(
    settings=st.sampled_from([("llada", one) for one in LLADA] + [("dream", one) for one in DREAM]),
    prompt=st.lists(st.integers(0, 120), min_size=1, max_size=LENGTH - 16),
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
)
def test_a_prompt_moves_all_that_lies_behind_it(tiny, settings, prompt, seed):
    family, given = settings
    model = dataclasses.replace(tiny, family=family, shifted_logits=family == "dream")
    decode = DecodeConfig(**{"max_tokens": 16, **given}, seed=seed)
    alone = request((), decode.with_seed(0), model, LENGTH)
    before = jax.tree.map(np.copy, alone)
    chex.assert_trees_all_equal(behind(alone, prompt, seed), request(prompt, decode, model, LENGTH))
    chex.assert_trees_all_equal(alone, before)


def test_another_seed(tiny):
    decode = DecodeConfig(max_tokens=16, temperature=0.5)
    packed = request([1, 2], decode, tiny, LENGTH)
    for seed in (0, 3, -1, (1 << 64) - 1):
        assert decode.with_seed(seed) == dataclasses.replace(decode, seed=seed)
        chex.assert_trees_all_equal(
            with_seed(packed, seed), request([1, 2], dataclasses.replace(decode, seed=seed), tiny, LENGTH)
        )
    assert decode.seed == 0


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, True, 1.0, None])
def test_a_seed_that_is_none(seed):
    with pytest.raises(RequestError) as told:
        DecodeConfig().with_seed(seed)
    with pytest.raises(RequestError) as as_ever:
        DecodeConfig(seed=seed)
    assert str(told.value) == str(as_ever.value) and told.value.field == "seed"


def test_a_packed_row_reads_as_it_was_written(tiny):
    """Each kind of number: whole, true or false, with a fraction, without a sign, several."""
    packed = request(
        [1, 2, 3], DecodeConfig(skip_threshold=0.7, temperature=0.3, seed=5, stop_ids=(4, 5)), tiny, LENGTH
    )
    row = unpack_numbers(packed.progress[None], packed.settings[None])
    assert bool(row.live[0]) and not bool(row.failed[0]) and row.live.dtype == bool
    assert int(row.prompt_length[0]) == 3 and row.stop_ids[0].tolist()[:2] == [4, 5]
    assert float(row.sure_above[0]) == float(np.float32(0.7)) and float(row.temperature[0]) == float(np.float32(0.3))
    assert row.seed.dtype == np.uint32 and row.demoted_ids.shape == (1, 2)
    assert packed.settings.dtype == packed.progress.dtype == np.int32
    with pytest.raises(KeyError):
        pack_row(PROGRESS, {})
    assert pack_row(SETTINGS, dict.fromkeys(SETTINGS, 1)).shape == packed.settings.shape
