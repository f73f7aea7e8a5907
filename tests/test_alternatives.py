"""The most probable tokens beside each committed one."""

import dataclasses

import jax
import numpy as np
import pytest

from jdllm.config import MAX_ALTERNATIVES, DecodeConfig, EngineConfig, RequestError
from jdllm.engine import Engine
from jdllm.models import llada

LENGTH, ROWS = 96, 3
PROMPT = [5, 17, 40, 8]
FEW = DecodeConfig(decoder="llada", max_tokens=12, block_size=4, early_stop=False)


def watch(engine, requests):
    """Decode requests side by side; of each the final canvas, passes of commitment, log-probabilities, and what
    ``alternatives`` said, read after every step. Positions are only ever added to it."""
    engine.reset()
    for slot, (prompt, decode) in enumerate(requests):
        engine.insert(slot, slot, prompt, decode)
    seen, out = {}, {}
    while len(out) < len(requests):
        for row in engine.step():
            ids, logprobs = engine.alternatives(row.slot)
            known = row.committed > 0
            if row.slot in seen:
                before, *told = seen[row.slot]
                np.testing.assert_array_equal(ids[before], told[0][before])
                np.testing.assert_array_equal(logprobs[before], told[1][before])
            seen[row.slot] = known, ids, logprobs
            if not row.live:
                out[row.slot] = (row.tokens, row.committed, row.logprobs, ids, logprobs)
                engine.evict(row.slot)
    return [out[slot] for slot in range(len(requests))]


@pytest.fixture(scope="module")
def engine(golden):
    made = Engine(
        golden.params("llada-tiny"), golden.config("llada-tiny"), EngineConfig(ROWS, LENGTH), (), range(374, 384)
    )
    made.buckets = made.buckets[-1:]
    made.compile()
    return made


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_they_are_the_highest_of_the_pass_that_committed(engine, golden, scale):
    """LLaDA's sampler sees the whole canvas in every pass, so a pass can be repeated without a cache."""
    decode = dataclasses.replace(FEW, alternatives=MAX_ALTERNATIVES, cfg_scale=scale)
    tokens, committed, logprobs, ids, values = watch(engine, [(PROMPT, decode)])[0]
    model, params, length = engine.model, golden.params("llada-tiny"), len(PROMPT) + FEW.max_tokens
    forward = jax.jit(lambda x: llada.logits(params, model, x[None])[0])
    for position in range(len(PROMPT), length):
        canvas = np.where(committed[:length] < committed[position], tokens[:length], model.mask_id)
        hidden = np.array(canvas)
        hidden[: len(PROMPT)] = model.mask_id
        canvas[: len(PROMPT)] = PROMPT
        logits = np.asarray(forward(canvas)[position], np.float64)
        if scale:
            alone = np.asarray(forward(hidden)[position], np.float64)
            logits = alone + (scale + 1) * (logits - alone)
        expected = logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()
        allowed = [i for i in range(374) if i != model.mask_id]
        best = sorted(allowed, key=lambda i: -expected[i])[:MAX_ALTERNATIVES]
        np.testing.assert_allclose(values[position], expected[best], atol=2e-4)
        np.testing.assert_allclose(expected[ids[position]], expected[best], atol=2e-4)
        assert ids[position][0] == tokens[position] and values[position][0] == pytest.approx(
            logprobs[position], abs=1e-5
        )


def test_a_row_that_asks_decodes_as_one_that_does_not(engine):
    d2f = DecodeConfig(max_tokens=24, block_size=8, skip_threshold=0.3, early_stop=False)
    sampled = dataclasses.replace(FEW, temperature=0.8, seed=3)
    plain = [(PROMPT, d2f), ([9] * 20, sampled), ([7, 7], FEW)]
    asking = [(prompt, dataclasses.replace(decode, alternatives=5)) for prompt, decode in plain]
    without, among = watch(engine, plain), watch(engine, [asking[0], plain[1], asking[2]])
    for one, other in zip(without, among, strict=True):
        for a, b in zip(one[:3], other[:3], strict=True):
            np.testing.assert_array_equal(a, b)
    alone = watch(engine, asking[:1])[0]
    for a, b in zip(alone, among[0], strict=True):
        done = alone[1] > 0
        np.testing.assert_array_equal(a[done], b[done])


def test_nothing_of_an_earlier_request_is_shown(engine):
    """Positions that a request was given, such as text behind its masks, have none."""
    long = dataclasses.replace(FEW, max_tokens=30, block_size=30, alternatives=5)
    watch(engine, [(PROMPT, long)])
    mask = engine.model.mask_id
    infill = DecodeConfig(decoder="llada", max_tokens=0, infill=True, early_stop=False, alternatives=5)
    _, committed, _, _, values = watch(engine, [([5, mask, 17, 40], infill)])[0]
    assert (committed[:4] > 0).tolist() == [False, True, False, False]
    assert np.isfinite(values[1, :5]).all() and np.isneginf(values[[0, 2, 3]]).all() and np.isneginf(values[4:]).all()


def test_more_than_there_are_is_refused_by_name():
    with pytest.raises(RequestError, match="alternatives"):
        DecodeConfig(alternatives=MAX_ALTERNATIVES + 1)
