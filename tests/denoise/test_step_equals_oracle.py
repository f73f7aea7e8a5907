"""The compiled step equals the plain-Python oracle in every field before every pass, over random shapes, thresholds and
model outputs, for all rows of a batch at once."""

import numpy as np
import pytest
from d2f_oracle import View, decode
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SCRIPT_MODEL, Script, run, scripted_engine

from jdllm.config import DecodeConfig

ROWS, LENGTH, PASSES = 4, 160, 40
MASK, EOS = SCRIPT_MODEL.mask_id, SCRIPT_MODEL.eos_id

decodes = st.builds(
    DecodeConfig,
    max_tokens=st.integers(1, 96),
    block_size=st.sampled_from([1, 3, 4, 8, 16, 32, 64]),
    block_add_threshold=st.sampled_from([0.0, 0.1, 0.5, 0.7, 0.9, 1.0]),
    decoded_token_threshold=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95, 1.0]),
    skip_threshold=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]),
    early_stop=st.booleans(),
    stop_ids=st.sampled_from([None, (), (EOS, 7)]),
)
requests = st.lists(st.tuples(st.integers(1, 64), decodes), min_size=1, max_size=ROWS)


def random_script(seed: int, eos_share: float) -> Script:
    """Probabilities on a coarse grid, so that ties and equality with a threshold are common."""
    random = np.random.default_rng(seed)
    shape = (ROWS, PASSES, LENGTH)
    token = random.integers(0, 60, shape)
    token[random.random(shape) < eos_share] = EOS
    return Script(token, random.integers(0, 11, shape) / 10, random.integers(0, 6, shape) / 5)


def expected(prompt: list[int], config: DecodeConfig, script: Script, row: int) -> list[dict]:
    stop_ids = (EOS,) if config.stop_ids is None else config.stop_ids
    return [as_state(v) for v in decode(prompt, config, script.forward(row), MASK, stop_ids)]


def as_state(view: View) -> dict:
    return {
        "live": view.live,
        "x": view.x,
        "start": view.cache_length,
        "end": len(view.x),
        "settled": view.cache_length + view.written,
        "nfe": view.nfe,
        "stopped": view.eos,
    }


@pytest.mark.parametrize("steps", [1, 3])
@settings(max_examples=60)
@given(requests=requests, seed=st.integers(0, 1 << 30), eos_share=st.sampled_from([0.0, 0.02, 0.3]))
def test_every_field_before_every_pass(steps, requests, seed, eos_share):
    script = random_script(seed, eos_share)
    engine = scripted_engine(ROWS, LENGTH, PASSES, steps)
    engine.play(script)
    asked = [([5] * length, config) for length, config in requests]
    for row, history in enumerate(run(engine, asked)):
        wanted = expected(*asked[row], script, row)
        if steps == 1:
            assert history[:-1] == wanted[:-1]
        final, end = history[-1], wanted[-1]
        for name in ("live", "x", "start", "nfe", "stopped"):
            assert final[name] == end[name]


@settings(max_examples=20)
@given(requests=requests, seed=st.integers(0, 1 << 30))
def test_a_small_bucket_only_makes_rows_wait(requests, seed):
    """Rows that do not fit into the packed axis wait a step: more calls, the same tokens and passes."""
    script = random_script(seed, 0.02)
    engine, small = scripted_engine(ROWS, LENGTH, PASSES), scripted_engine(ROWS, LENGTH, PASSES, packed=LENGTH)
    asked = [([5] * length, config) for length, config in requests]
    finals = []
    for one in (engine, small):
        one.play(script)
        finals.append([(h[-1]["x"], h[-1]["nfe"]) for h in run(one, asked)])
    assert finals[0] == finals[1]
