"""The numbered D2F test cases of the reference analysis, each observed on the official code with a scripted model.

Notation: a pass is (cache length, input length, positions kept in the cache afterwards).
"""

import numpy as np
import pytest
from scripted import SCRIPT_MODEL, Script, run, scripted_engine

from jdllm.config import DecodeConfig, RequestError, need

EOS, EOT = SCRIPT_MODEL.eos_id, 61
LENGTH, PASSES = 64, 16


def play(decode, prompt=3, token=7, probability=0.99, length=LENGTH, passes=PASSES):
    """One row whose model always says the same about a position: scalars or arrays [S]. -> (passes, tokens, NFE)"""
    shape = (1, passes, length)
    engine = scripted_engine(1, shape[2], shape[1])
    engine.play(Script(np.broadcast_to(token, shape), np.broadcast_to(probability, shape)))
    history = run(engine, [([5] * prompt, decode)])[0]
    forwards = [(s["start"], len(s["x"]) - s["start"], s["settled"]) for s in history if s["live"]]
    return forwards, history[-1]["x"][prompt:], history[-1]["nfe"]


def config(max_tokens, block=4, add=0.5, dec=0.75, skip=0.9, **more):
    return DecodeConfig(
        max_tokens=max_tokens,
        block_size=block,
        block_add_threshold=add,
        decoded_token_threshold=dec,
        skip_threshold=skip,
        **{"early_stop": False, **more},
    )


low = 0.5 - 0.001 * np.arange(LENGTH)


@pytest.mark.parametrize(("add", "dec"), [(0.5, 0.75), (1.0, 1.0)])
def test_1_all_confident(add, dec):
    forwards, tokens, nfe = play(config(16, add=add, dec=dec))
    assert forwards == [(0, 7, 3), (3, 8, 7), (7, 8, 11), (11, 8, 15)]
    assert (len(tokens), nfe) == (16, 4)


def test_2_none_confident():
    forwards, _, nfe = play(config(16), probability=low)
    assert nfe == 13
    assert [length for _, length, _ in forwards] == [7, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4]
    assert [cache for cache, _, _ in forwards] == [0, 3, 3, 3, 3, 7, 7, 7, 11, 11, 11, 15, 15]


def test_3_a_block_every_step():
    token = np.arange(LENGTH) % 50
    forwards, tokens, nfe = play(config(16, add=0.0), token=token, probability=low)
    assert [length for _, length, _ in forwards] == [7, 8, 12, 16, 16, 12, 12, 12, 8, 8, 8, 4, 4]
    assert nfe == 13
    assert tokens == play(config(16), token=token, probability=low)[1]


def test_4_equality_is_not_above():
    assert play(config(4, skip=0.75), probability=0.75)[2] == 4


def test_5_end_of_text_in_the_first_pass():
    _, tokens, nfe = play(config(16), token=EOS)
    assert (tokens, nfe) == ([EOS] * 4, 1)


def test_6_end_of_text_first_of_a_slow_block():
    token = np.full(LENGTH, 7)
    token[3] = EOS
    _, tokens, nfe = play(config(16), token=token, probability=low)
    assert (len(tokens), nfe) == (4, 4)


def test_7_end_of_text_last_of_the_first_block():
    token = np.full(LENGTH, 7)
    token[6] = EOS
    _, tokens, nfe = play(config(16), token=token, probability=low)
    assert (len(tokens), nfe) == (8, 7)


def test_8_end_of_turn_does_not_stop():
    assert play(config(16), token=EOT)[1] == [EOT] * 16


def test_9_whole_blocks_as_the_reference_and_the_rest_exactly():
    """The reference gives 12 tokens in 3 passes for 14 tokens in blocks of 4; we give those 12 alike, and all 14."""
    assert play(config(12))[1:] == ([7] * 12, 3)
    assert play(config(14))[1:] == ([7] * 14, 4)
    assert len(play(config(3))[1]) == 3
    assert len(play(config(10))[1]) == 10


def test_10_second_block_first():
    """Block 2 is full before block 1: it waits in the input, uncached, and both are cached by one pass."""
    probability = np.where(np.arange(LENGTH) < 7, low, 0.99)
    forwards, _, nfe = play(config(8, add=0.0), probability=probability)
    assert (forwards, nfe) == ([(0, 7, 3), (3, 8, 3), (3, 8, 3), (3, 8, 3)], 4)
    slow_third = np.where((np.arange(LENGTH) < 7) | (np.arange(LENGTH) >= 11), low, 0.99)
    forwards, _, _ = play(config(12, add=0.0), probability=slow_third)
    assert (3, 12, 11) in forwards


def test_12_integer_thresholds():
    table = {(0.1, 32): 4, (0.5, 32): 16, (0.7, 64): 45, (0.9, 32): 29, (0.95, 32): 31, (0.95, 64): 61}
    table |= {(0.1, 48): 5, (0.95, 48): 46, (0.0, 32): 0, (1.0, 32): 32, (1.1, 32): 33}
    assert {key: need(*key) for key in table} == table


LAW = [(0.5, 0.9, 29), (0.9, 0.5, 29), (0.1, 0.95, 31), (0.1, 0.5, 16), (1.0, 1.0, 32)]


@pytest.mark.parametrize("prompt", [1, 5, 37])
@pytest.mark.parametrize(("add", "dec", "s"), LAW)
def test_13_levels(prompt, add, dec, s):
    """With no token over the skip threshold, n blocks of 32 take s(n-1) + 32 passes; 16 rows with n = 1..16 in one
    batch each have their own count, and the batch takes as many steps as its slowest row."""
    length = 37 + 512
    n = np.arange(1, 17)
    position = np.arange(length)
    token = np.where(position[None] >= prompt + 32 * (n[:, None] - 1), EOS, 7)[:, None]
    probability = np.broadcast_to(0.5 - 1e-4 * position, token.shape)
    engine = scripted_engine(16, length, 1, packed=2048)
    engine.play(Script(token, probability))
    decode = config(512, block=32, add=add, dec=dec, skip=1.0)
    for slot in range(16):
        engine.insert(slot, slot, [5] * prompt, decode)
    last, calls = {}, engine.counters.calls
    while len(last) < 16:
        for row in engine.step():
            if not row.live:
                last[row.handle] = row
                engine.evict(row.slot)
    for slot, row in last.items():
        blocks = slot + 1
        assert row.nfe == s * (blocks - 1) + 32
        assert len(row.canvas_ids) == 32 * blocks
    assert engine.counters.calls - calls == max(row.nfe for row in last.values())


def test_17_fallback_is_the_most_confident_and_lowest():
    probability = np.full(LENGTH, 0.5)
    shape = (1, PASSES, LENGTH)
    engine = scripted_engine(1, shape[2], shape[1])
    engine.play(Script(np.full(shape, 7), np.broadcast_to(probability, shape)))
    history = run(engine, [([5] * 3, config(4))])[0]
    filled = [[i for i, t in enumerate(s["x"]) if t == 7] for s in history]
    assert filled == [[], [3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]


def test_18_a_finished_row_does_not_change():
    engine = scripted_engine(2, LENGTH, PASSES)
    shape = (2, PASSES, LENGTH)
    probability = np.broadcast_to(low, shape).copy()
    probability[0] = 0.99
    engine.play(Script(np.full(shape, 7), probability))
    engine.insert(0, "fast", [5] * 3, config(4))
    engine.insert(1, "slow", [5] * 3, config(16))
    engine.step()
    engine.step()
    frozen = {name: np.asarray(value) for name, value in vars(engine.state.rows).items()}
    keys, tokens = np.asarray(engine.state.keys[0])[0].copy(), np.asarray(engine.state.tokens)[0].copy()
    assert not frozen["live"][0] and frozen["live"][1]
    for _ in range(5):
        engine.step()
    for name, value in vars(engine.state.rows).items():
        np.testing.assert_array_equal(np.asarray(value)[0], frozen[name][0], err_msg=name)
    np.testing.assert_array_equal(np.asarray(engine.state.keys[0])[0], keys)
    np.testing.assert_array_equal(np.asarray(engine.state.tokens)[0], tokens)


def test_early_stop_ends_at_the_settled_stop_id():
    """B8: the row ends once everything before the first stop id is decoded; the text is that of decoding all."""
    token = np.full(LENGTH, 7)
    token[5] = EOS
    probability = np.where(np.arange(LENGTH) < 6, 0.99, 0.1)
    for early, passes in ((True, 1), (False, 2)):
        _, tokens, nfe = play(config(16, early_stop=early), token=token, probability=probability)
        assert nfe == passes
        assert tokens[:3] == [7, 7, EOS]


def test_b1_never_over_the_threshold_ends():
    _, tokens, nfe = play(config(4), probability=0.3)
    assert (len(tokens), nfe) == (4, 4)


def test_levels_are_refused_where_they_could_never_end():
    with pytest.raises(RequestError, match="decoded_token_threshold"):
        config(16, dec=1.1)
    with pytest.raises(RequestError, match="block_add_threshold"):
        config(16, add=1.1)
