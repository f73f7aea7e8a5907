"""Faults that people met in other projects, as tests that every decoder must pass (the numbers are those of the case
list: A batches and attention, B denoising and caches)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scripted import SCRIPT_MODEL, Script, run, scripted_engine

from jdllm.config import DecodeConfig, EngineConfig
from jdllm.decoders import shares
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.models import llada

ROWS, LENGTH, PASSES = 4, 160, 40
MASK, EOS = SCRIPT_MODEL.mask_id, SCRIPT_MODEL.eos_id
DECODERS = {
    "d2f": {},
    "llada": {"decoder": "llada"},
    "none": {"decoder": "fast-dllm", "cache": "none"},
    "prefix": {"decoder": "fast-dllm", "cache": "prefix"},
    "dual": {"decoder": "fast-dllm", "cache": "dual"},
    "factor": {"decoder": "fast-dllm", "cache": "dual", "factor": 1.0},
}
all_decoders = pytest.mark.parametrize("name", DECODERS)


def script(probability: float = 0.3, token: int = 7) -> Script:
    shape = (ROWS, PASSES, LENGTH)
    return Script(np.full(shape, token), np.full(shape, probability))


def play(requests, table: Script) -> list[list[dict]]:
    engine = scripted_engine(ROWS, LENGTH, PASSES)
    engine.play(table)
    return run(engine, requests)


@pytest.fixture(scope="module")
def tiny_engine(tiny):
    engine = Engine(llada.init(tiny, 0), tiny, EngineConfig(max_rows=3, max_length=64))
    engine.buckets = [Bucket(3, 192)]
    engine.compile()
    return engine


def serve(engine, requests):
    engine.reset()
    for slot, (prompt, decode) in enumerate(requests):
        engine.insert(slot, slot, prompt, decode)
    out = {}
    while len(out) < len(requests):
        for row in engine.step():
            if not row.live:
                out[row.slot] = row
    return [out[i] for i in range(len(requests))]


@all_decoders
def test_b1_nothing_reaches_the_threshold(name):
    """One token a step, and the row ends after as many steps. (The published factor rule always takes the last two
    together.)"""
    decode = DecodeConfig(max_tokens=4, block_size=4, early_stop=False, **DECODERS[name])
    (history,) = play([([1, 2], decode)], script())
    assert history[-1]["nfe"] == (3 if name == "factor" else 4) and history[-1]["x"][2:] == [7] * 4


def test_b4_counts_fit_the_masks():
    assert shares(10, 4) == [3, 3, 2, 2] and shares(3, 8) == [1, 1, 1, 0, 0, 0, 0, 0]
    decode = DecodeConfig(decoder="llada", max_tokens=8, block_size=4, steps=8, early_stop=False)
    (history,) = play([([1], decode)], script())
    assert history[-1]["nfe"] == 8 and MASK not in history[-1]["x"]


@all_decoders
@pytest.mark.parametrize(("tokens", "size"), [(10, 8), (10, 4), (3, 4), (6, 4), (1, 32)])
def test_a2_b5_b15_exactly_max_tokens(name, tokens, size):
    """The canvas ends there: nothing behind it is computed, seen or returned."""
    decode = DecodeConfig(max_tokens=tokens, block_size=size, early_stop=False, **DECODERS[name])
    (history,) = play([([1] * 5, decode)], script(0.95))
    assert len(history[-1]["x"]) == 5 + tokens and MASK not in history[-1]["x"]
    assert max(h["end"] for h in history[:-1]) == 5 + tokens


@all_decoders
def test_a4_a11_b6_b12_every_prompt_length_alone_and_beside_others(name, tiny_engine, tiny):
    """Prompts of 1 to 9 tokens with blocks of 4: five tokens, no mask among them, the same beside any others."""
    decode = DecodeConfig(max_tokens=5, block_size=4, early_stop=False, stop_ids=(), **DECODERS[name])
    requests = [(list(range(10, 10 + n)), decode) for n in range(1, 10)]
    alone = [serve(tiny_engine, [request])[0] for request in requests]
    together = [row for i in range(0, 9, 3) for row in serve(tiny_engine, requests[i : i + 3])]
    for one, other in zip(alone, together, strict=True):
        assert one.canvas_ids == other.canvas_ids and one.nfe == other.nfe
        assert len(one.canvas_ids) == 5 and tiny.mask_id not in one.canvas_ids


@all_decoders
def test_b8_the_first_end_of_text_ends_the_row(name):
    """It is committed while an earlier position is still masked: the row goes on until that is known, and starts no
    later block; the text is that of decoding everything and cutting."""
    table = script(0.3)
    table.token[:, :, 4] = EOS
    table.probability[:, :, 4] = 0.99
    table.confidence = table.probability
    early, late = (DecodeConfig(max_tokens=16, block_size=4, early_stop=e, **DECODERS[name]) for e in (True, False))
    first, second = play([([1, 2], early), ([1, 2], late)], table)
    cut = second[-1]["x"].index(EOS)
    assert first[-1]["x"][: cut + 1] == second[-1]["x"][: cut + 1] and first[-1]["nfe"] < 16
    assert MASK not in first[-1]["x"][:cut]
    if name != "d2f":
        assert first[-1]["x"][6:] == [MASK] * 12 and first[-1]["nfe"] < second[-1]["nfe"]


@all_decoders
def test_b17_only_mask_slots_change(name, tiny_engine, tiny):
    mask = tiny.mask_id
    prompt = [150, 72, mask, mask, 33]
    decode = DecodeConfig(max_tokens=0, block_size=4, infill=True, **DECODERS[name])
    (row,) = serve(tiny_engine, [(prompt, decode)])
    filled = row.tokens[:5].tolist()
    assert [filled[i] for i in (0, 1, 4)] == [150, 72, 33] and mask not in filled and row.canvas_ids == []


def test_a8_numbers_that_are_not_numbers_end_a_row(tiny):
    """Whatever the decoder: the row fails, instead of going on for ever or returning masks as text."""
    params = {**llada.init(tiny, 0)}
    params["embed"] = params["embed"].at[20].set(np.nan)
    engine = Engine(params, tiny, EngineConfig(max_rows=3, max_length=64))
    engine.buckets = [Bucket(3, 192)]
    engine.compile()
    for settings in DECODERS.values():
        good = DecodeConfig(max_tokens=6, block_size=4, early_stop=False, stop_ids=(), **settings)
        rows = serve(engine, [([20, 3], good), ([5, 6], good)])
        assert rows[0].failed and rows[0].finish_reason == "error"
        assert not rows[1].failed and len(rows[1].canvas_ids) == 6


def shifted_model(tiny):
    """A Dream of no layers to speak of: position i predicts the id that it holds plus one."""
    dream = dataclasses.replace(
        tiny, family="dream", shifted_logits=True, n_layers=1, d_model=160, n_heads=1, n_kv_heads=1
    )
    params = {name: 0 * w for name, w in llada.init(dream, 0).items()}
    params["embed"] = np.eye(160, dtype=np.float32)
    head = np.zeros((160, 160), np.float32)
    head[np.arange(150), np.arange(1, 151)] = 9.0
    params |= {"head": head, "norm": np.ones(160, np.float32)}
    return dream, {name: np.asarray(w) for name, w in params.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"decoder": "d2f"},
        {"decoder": "dream", "alg": "confidence_threshold"},
        {"decoder": "fast-dllm", "cache": "prefix"},
        {"decoder": "fast-dllm", "cache": "dual"},
    ],
    ids=lambda s: s["decoder"] + s.get("cache", ""),
)
def test_b3_the_position_before_predicts(tiny, settings):
    """Dream counts on from the prompt's last id, through blocks, windows and caches; the first position of a window is
    predicted by the one before it, never by the window's own end."""
    dream, params = shifted_model(tiny)
    engine = Engine({n: jnp.asarray(w) for n, w in params.items()}, dream, EngineConfig(max_rows=1, max_length=64))
    engine.buckets = [Bucket(1, 64)]
    engine.compile()
    sizes = {} if settings["decoder"] == "dream" else {"block_size": 4}
    decode = DecodeConfig(max_tokens=12, early_stop=False, stop_ids=(), **sizes, **settings)
    (row,) = serve(engine, [([3, 40], decode)])
    assert row.canvas_ids == list(range(41, 53))


def test_b9_a_refresh_on_dream_decides_its_first_position_alone(tiny):
    """Fast-dLLM's published rule, whatever the confidence: the first pass of a block commits its first position."""
    dream, params = shifted_model(tiny)
    params["head"] = params["head"] * np.float32(0.01)  # nothing is near the threshold
    engine = Engine({n: jnp.asarray(w) for n, w in params.items()}, dream, EngineConfig(max_rows=1, max_length=64))
    engine.buckets = [Bucket(1, 64)]
    engine.compile()
    decode = DecodeConfig(decoder="fast-dllm", max_tokens=8, block_size=4, early_stop=False, stop_ids=())
    (row,) = serve(engine, [([3, 40], decode)])
    assert row.committed[[2, 6]].tolist() == [1, 5] and row.nfe == 8
