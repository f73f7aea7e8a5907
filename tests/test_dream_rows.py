"""Dream's decoders beyond the golden traces: corners of the schedules, chance, noise on the ranking, mixed batches."""

import random

import numpy as np
import pytest

from jdllm.config import DecodeConfig, EngineConfig
from jdllm.decoders import decode_config
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine

LENGTH, ROWS = 96, 4


@pytest.fixture(scope="module")
def engine(golden):
    made = Engine(golden.params("dream-tiny"), golden.config("dream-tiny"), EngineConfig(ROWS, LENGTH))
    made.buckets = [Bucket(ROWS, ROWS * LENGTH)]
    made.compile()
    return made


def run(engine, requests):
    engine.reset()
    waiting, out = list(enumerate(requests)), {}
    for _ in range(3000):
        for slot in engine.free_slots:
            if waiting:
                index, request = waiting.pop(0)
                engine.insert(slot, ("row", index), *request)
        for row in engine.step():
            if not row.live:
                assert not row.failed, requests[row.handle[1]]
                out[row.handle[1]] = row
                engine.evict(row.slot)
        if len(out) == len(requests):
            return [out[i] for i in range(len(requests))]
    raise AssertionError(f"{len(requests) - len(out)} rows did not end")


def decode(**settings) -> DecodeConfig:
    return decode_config({"early_stop": False, **settings}, "dream")


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("tokens", "size", "steps"), [(2, 1, None), (3, 2, None), (8, 1, 32), (8, 4, 4), (7, 4, 20)])
def test_schedules_of_short_blocks_end(engine, cache, tokens, size, steps):
    """A refresh and at least one pass a block; no more passes than the steps of each block, and none for nothing."""
    settings = {"steps": steps} if steps else {}
    asked = decode(decoder="fast-dllm", alg="entropy", cache=cache, max_tokens=tokens, block_size=size, **settings)
    (row,) = run(engine, [([5, 6, 7], asked)])
    blocks = -(-tokens // size)
    assert len(row.canvas_ids) == tokens and engine.model.mask_id not in row.canvas_ids
    assert 2 * blocks <= row.nfe <= max(2 * blocks, steps or 2 * tokens)
    if size == 1:
        assert row.nfe == 2 * blocks


@pytest.mark.parametrize("steps", [1, 4, 16])
def test_origin_decides_by_chance_and_all_in_the_last_pass(engine, steps):
    """Each position of its own, with the same chance at every step where time is even; another seed, another order."""
    asked = [([5, 6], decode(decoder="dream", alg="origin", steps=steps, max_tokens=64, seed=s)) for s in range(8)]
    rows = run(engine, asked)
    assert all(row.nfe == steps and engine.model.mask_id not in row.canvas_ids for row in rows)
    passes = np.array([row.committed[2:66] for row in rows])
    counts = np.bincount(passes.ravel(), minlength=steps + 1)[1:] / passes.size
    assert (np.abs(counts - 1 / steps) <= 3 * np.sqrt((1 / steps) * (1 - 1 / steps) / passes.size) + 0.01).all()
    assert steps == 1 or len({tuple(p) for p in passes}) == 8


def test_noise_on_the_ranking_changes_the_order_alone_and_by_the_seed(engine):
    """alg_temp: as many positions a pass as without, other ones."""
    quiet = decode(decoder="dream", steps=8, max_tokens=32)
    noisy = [decode(decoder="dream", steps=8, max_tokens=32, alg_temp=5.0, seed=s) for s in (1, 1, 2)]
    rows = run(engine, [([5, 6], d) for d in (quiet, *noisy)])
    counts = [np.bincount(row.committed[2:34]).tolist() for row in rows]
    assert counts[1:] == counts[:1] * 3
    order = [row.committed.tolist() for row in rows]
    assert order[1] == order[2] and order[1] != order[0] and order[1] != order[3]


def test_rows_are_bit_equal_alone_and_among_any_neighbours(engine):
    r = random.Random(0)
    requests = []
    for i in range(10):
        settings = r.choice(
            [
                {"decoder": "d2f", "block_size": 8, "top_k": r.choice([0, 4])},
                {"decoder": "dream", "alg": r.choice(["entropy", "topk_margin", "maskgit_plus", "origin"]), "steps": 9},
                {"decoder": "fast-dllm", "block_size": 8, "cache": r.choice(["prefix", "dual"])},
            ]
        )
        asked = decode(max_tokens=r.randint(1, 30), temperature=r.choice([0, 0.8]), seed=i, **settings)
        requests.append(([r.randrange(360) for _ in range(r.randint(1, 40))], asked))
    numbers = lambda row: (row.canvas_ids, row.nfe, row.logprobs.tolist(), row.committed.tolist())
    together = [numbers(row) for row in run(engine, requests)]
    assert [numbers(run(engine, [request])[0]) for request in requests] == together


@pytest.mark.parametrize("decoder", ["d2f", "dream", "fast-dllm"])
def test_infill(engine, decoder):
    mask = engine.model.mask_id
    prompt = [5, mask, mask, 8, mask, 11]
    asked = decode(decoder=decoder, max_tokens=0, infill=True)
    (row,) = run(engine, [(prompt, asked)])
    filled = row.tokens[:6].tolist()
    assert [filled[i] for i in (0, 3, 5)] == [5, 8, 11] and mask not in filled
