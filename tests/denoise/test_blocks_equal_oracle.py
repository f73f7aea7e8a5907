"""The compiled step equals the plain-Python oracle of LLaDA and Fast-dLLM before every pass, over random shapes, rules
and model outputs, for all rows of a batch at once, D2F rows among them."""

import numpy as np
from block_oracle import decode
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SCRIPT_MODEL, Script, run, scripted_engine

from jdllm.config import DecodeConfig

ROWS, LENGTH, PASSES = 4, 160, 40
MASK, EOS = SCRIPT_MODEL.mask_id, SCRIPT_MODEL.eos_id


@st.composite
def decodes(draw):
    tokens, size = draw(st.integers(1, 96)), draw(st.sampled_from([1, 3, 4, 8, 16, 32, 64, 100]))
    blocks = -(-tokens // size)
    common = {
        "max_tokens": tokens,
        "block_size": size,
        "early_stop": draw(st.booleans()),
        "stop_ids": draw(st.sampled_from([None, (), (EOS, 7)])),
    }
    most = max(1, LENGTH // blocks)
    steps = blocks * draw(st.integers(1, min(most, 2 * size)))
    rule = draw(st.sampled_from(["llada", "one", "quota", "threshold", "factor", "default", "d2f"]))
    if rule == "d2f":
        return DecodeConfig(**common, skip_threshold=0.6)
    if rule in ("llada", "one"):
        return DecodeConfig(decoder="llada", **common, steps=steps if rule == "llada" else None)
    ours = {
        "quota": {"steps": steps},
        "threshold": {"threshold": draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])), "steps": steps},
        "factor": {"factor": draw(st.sampled_from([0.3, 1.0, 2.0]))},
        "default": {},
    }[rule]
    return DecodeConfig(decoder="fast-dllm", cache=draw(st.sampled_from(["none", "prefix", "dual"])), **common, **ours)


requests = st.lists(st.tuples(st.integers(1, 64), decodes()), min_size=1, max_size=ROWS)


def random_script(seed: int, eos_share: float) -> Script:
    """Probabilities on a coarse grid, so that ties and equality with a threshold are common; they rank, too."""
    random = np.random.default_rng(seed)
    shape = (ROWS, PASSES, LENGTH)
    token = random.integers(0, 60, shape)
    token[random.random(shape) < eos_share] = EOS
    return Script(token, random.integers(0, 11, shape) / 10)


@settings(max_examples=80)
@given(requests=requests, seed=st.integers(0, 1 << 30), eos_share=st.sampled_from([0.0, 0.02, 0.3]))
def test_window_and_canvas_before_every_pass(requests, seed, eos_share):
    script = random_script(seed, eos_share)
    engine = scripted_engine(ROWS, LENGTH, PASSES)
    engine.play(script)
    asked = [([5] * length, config) for length, config in requests]
    for row, history in enumerate(run(engine, asked)):
        prompt, config = asked[row]
        if config.decoder == "d2f":
            continue
        stop_ids = (EOS,) if config.stop_ids is None else config.stop_ids
        wanted = list(decode(prompt, config, script.forward(row), MASK, stop_ids))
        got = [(h["start"], h["end"], h["nfe"], h["x"]) for h in history[:-1]]
        assert got == [(v.start, v.end, v.nfe, v.x) for v in wanted[:-1]]
        assert (history[-1]["nfe"], history[-1]["x"]) == (wanted[-1].nfe, wanted[-1].x)
