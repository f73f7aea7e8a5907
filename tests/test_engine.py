"""Slots, buckets, donation, compile counts, isolation of rows, and refusals, on a small random model."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import test_util as jtu

from jdllm.buckets import choose_bucket, make_buckets
from jdllm.config import DecodeConfig, EngineConfig, RequestError
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.models import llada

LENGTH, ROWS = 96, 4


@pytest.fixture(scope="session")
def params(tiny):
    return llada.init(tiny, 4)


@pytest.fixture(scope="session")
def compiled(tiny, params):
    engine = Engine(params, tiny, EngineConfig(max_rows=ROWS, max_length=LENGTH))
    engine.buckets = [Bucket(1, LENGTH, LENGTH), Bucket(ROWS, LENGTH, ROWS * LENGTH)]
    seen = []
    engine.compile(lambda done, total, text: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    return engine


@pytest.fixture
def engine(compiled):
    compiled.reset()
    return compiled


def requests(count: int, seed: int = 0) -> list[tuple[list[int], DecodeConfig]]:
    random = np.random.default_rng(seed)
    return [
        (
            random.integers(0, 128, random.integers(1, 40)).tolist(),
            DecodeConfig(
                max_tokens=int(random.integers(1, 50)),
                block_size=int(random.choice([4, 8, 16, 32])),
                skip_threshold=float(random.choice([0.03, 0.1, 0.9])),
                temperature=float(random.choice([0.0, 0.8])),
                top_k=int(random.choice([0, 5])),
                seed=int(random.integers(1000)),
                early_stop=bool(random.integers(2)),
            ),
        )
        for _ in range(count)
    ]


def serve(engine: Engine, asked, slots=range(ROWS)) -> list[tuple]:
    """Run requests through the slots, lowest free first; (canvas, nfe, finish reason) in the order asked."""
    waiting, done, free = list(enumerate(asked)), {}, list(slots)
    while len(done) < len(asked):
        while waiting and free:
            handle, (prompt, decode) = waiting.pop(0)
            engine.insert(free.pop(0), handle, prompt, decode)
        for row in engine.step():
            if not row.live:
                done[row.handle] = (row.canvas_ids, row.nfe, row.finish_reason)
                engine.evict(row.slot)
                free.append(row.slot)
    return [done[i] for i in range(len(asked))]


def test_a9_rows_do_not_depend_on_neighbours_slots_or_order(engine):
    """Sampled and greedy requests alone, together, in another order, with free slots between: equal tokens."""
    asked = requests(12)
    together = serve(engine, asked)
    alone = [serve(engine, [one])[0] for one in asked]
    backwards = serve(engine, asked[::-1], slots=[3, 1])[::-1]
    assert together == alone == backwards
    assert [len(canvas) for canvas, _, reason in together if reason == "length"] == [
        d.max_tokens for (_, d), (_, _, reason) in zip(asked, together, strict=True) if reason == "length"
    ]


@pytest.mark.parametrize("prompt", [1, 31, 32, 33])
def test_15_the_prompt_needs_no_alignment(engine, tiny, params, prompt):
    """Greedy tokens of a row equal a plain uncached loop over whole sequences (blocks of one: the next is always the
    most confident single mask)."""
    ids = list(range(5, 5 + prompt))
    decode = DecodeConfig(max_tokens=6, block_size=1, skip_threshold=1.0, stop_ids=())
    (canvas, nfe, _), *_ = serve(engine, [(ids, decode)])
    x = list(ids)
    for _ in range(6):
        x.append(tiny.mask_id)
        block = np.maximum(0, np.arange(len(x)) - prompt + 1)
        logits = llada.logits(params, tiny, np.array([x]), jnp.asarray(block[None, :] <= block[:, None])[None])
        row = np.array(logits)[0, -1]
        row[tiny.mask_id] = -np.inf
        x[-1] = int(row.argmax())
    assert canvas == x[prompt:]
    assert nfe == 6


def test_b10_keys_and_values_are_those_of_the_final_text(engine, tiny, params):
    """The cache of finished blocks equals one pass over the final text; nothing half-masked is kept."""
    prompt, block = list(range(7)), 4
    engine.insert(0, "a", prompt, DecodeConfig(max_tokens=12, block_size=block, skip_threshold=0.05, stop_ids=()))
    while not (rows := engine.step()) or rows[0].live:
        pass
    cached = int(engine.state.rows.cached[0])
    text = rows[0].tokens[: rows[0].length]
    assert cached >= len(prompt) + block
    number = np.maximum(0, (np.arange(len(text)) - len(prompt)) // block + 1)
    kept = {}

    def keep(layer):
        def attend(q, k, v):
            kept[layer] = (k, v)
            return llada.attention(
                q, k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.asarray(number[None, :] <= number[:, None])[None]
            )

        return attend

    rope = llada.rope_tables(jnp.arange(len(text))[None], tiny.head_dim, tiny.rope_theta)
    x = llada.embed(params, tiny, text[None])
    for i, p in enumerate(llada.layer_params(params, tiny)):
        x = llada.layer(p, tiny, x, rope, keep(i))
        for cache, fresh in zip((engine.state.keys[i], engine.state.values[i]), kept[i], strict=True):
            np.testing.assert_allclose(cache[0, :, :cached].swapaxes(0, 1), fresh[0, :cached], atol=1e-5)


def test_a8_stale_infinities_in_a_slot_do_no_harm(engine):
    """A reused slot whose old cache holds NaN, and free slots full of NaN."""
    asked = requests(3, seed=5)
    clean = serve(engine, asked)
    poison = lambda caches: tuple(jnp.full_like(c, jnp.nan) for c in caches)
    engine.reset()
    engine.state = dataclasses.replace(engine.state, keys=poison(engine.state.keys), values=poison(engine.state.values))
    assert serve(engine, asked) == clean


def test_max_tokens_is_exact(engine):
    for wanted in (1, 3, 10, 31, 33):
        decode = DecodeConfig(max_tokens=wanted, block_size=8, stop_ids=())
        (canvas, _, reason), *_ = serve(engine, [([1, 2, 3], decode)])
        assert (len(canvas), reason) == (wanted, "length")


def test_b12_no_mask_ids_are_returned(engine, tiny):
    for canvas, _, _ in serve(engine, requests(8, seed=2)):
        assert tiny.mask_id not in canvas[: len(canvas)] or canvas.index(tiny.mask_id) > canvas.index(tiny.eos_id)


def test_a_mask_id_in_a_prompt_is_ordinary_input(engine, tiny):
    decode = DecodeConfig(max_tokens=8, block_size=4)
    engine.insert(0, "a", [5, tiny.mask_id, 6], decode)
    while not (rows := engine.step()) or rows[0].live:
        pass
    assert rows[0].tokens[:3].tolist() == [5, tiny.mask_id, 6]


def test_c2_a_canvas_filled_to_the_brim(engine):
    """Prompt and answer end exactly at the last slot; one more token is refused."""
    prompt = [3] * 70
    (canvas, _, _), *_ = serve(engine, [(prompt, DecodeConfig(max_tokens=26, block_size=16, stop_ids=()))])
    assert len(canvas) == 26
    with pytest.raises(RequestError, match=r"70.*27.*97.*96") as refused:
        engine.insert(0, "b", prompt, DecodeConfig(max_tokens=27))
    assert refused.value.field == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "decode", "field"),
    [
        ([], {}, "prompt"),
        ([160], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"stop_ids": (160,)}, "stop_ids"),
    ],
)
def test_refusals_name_the_field_and_change_nothing(engine, prompt, decode, field):
    engine.insert(1, "kept", [1, 2], DecodeConfig(max_tokens=4))
    before = np.asarray(engine.state.tokens).copy()
    with pytest.raises(RequestError) as refused:
        engine.insert(0, "bad", prompt, DecodeConfig(**{"max_tokens": 8, **decode}))
    assert refused.value.field == field
    np.testing.assert_array_equal(np.asarray(engine.state.tokens), before)


@pytest.mark.parametrize(
    "bad",
    [
        {"decoder": "x"},
        {"max_tokens": -1},
        {"max_tokens": 2.0},
        {"block_size": 0},
        {"block_add_threshold": -0.1},
        {"skip_threshold": float("nan")},
        {"temperature": -1.0},
        {"temperature": "1"},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": True},
        {"confidence": "entropy"},
        {"early_stop": 1},
        {"stop_ids": (1, 2, 3, 4, 5)},
    ],
)
def test_bad_settings_are_refused_by_name(bad):
    (field,) = bad
    with pytest.raises(RequestError) as refused:
        DecodeConfig(**bad)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")


def test_reports_are_one_call_late_and_name_the_request(engine):
    """A slot evicted and refilled between two calls: the old occupant's report is not taken for the new one's."""
    engine.insert(0, "old", [1, 2, 3], DecodeConfig(max_tokens=40, block_size=4, skip_threshold=1.0))
    assert engine.step() == []
    assert [row.handle for row in engine.step()] == ["old"]
    engine.evict(0)
    engine.insert(0, "new", [4, 5], DecodeConfig(max_tokens=4, block_size=4, stop_ids=()))
    assert engine.step() == []
    rows = engine.step()
    assert [(row.handle, row.nfe, row.prompt_length) for row in rows] == [("new", 1, 2)]


def test_cancel_is_an_eviction_at_any_step(engine):
    """Neighbours of a cancelled row finish as if alone; an idle engine dispatches nothing."""
    asked = requests(2, seed=9)
    alone = serve(engine, asked[:1])
    engine.reset()
    engine.insert(0, 0, *asked[0])
    engine.insert(2, 1, *asked[1])
    engine.step()
    engine.evict(2)
    assert engine.free_slots == [1, 2, 3]
    while True:
        rows = engine.step()
        assert {row.handle for row in rows} <= {0}
        if rows and not rows[0].live:
            break
    assert (rows[0].canvas_ids, rows[0].nfe, rows[0].finish_reason) == alone[0]
    engine.evict(0)
    calls = engine.counters.calls
    assert engine.step() == [] and engine.counters.calls == calls


def test_a_taken_slot_is_refused(engine):
    engine.insert(0, "a", [1], DecodeConfig(max_tokens=4))
    with pytest.raises(ValueError, match="slot 0 is taken"):
        engine.insert(0, "b", [1], DecodeConfig(max_tokens=4))


def test_i3_i5_nothing_compiles_after_ready(engine):
    """Greedy, sampled, filtered, every confidence, every length; prompts as lists, NumPy and device arrays."""
    serve(engine, requests(2))
    with jtu.count_jit_compilation_cache_miss() as misses:
        serve(engine, requests(20, seed=3))
        extra = [DecodeConfig(max_tokens=9, confidence=c, top_p=0.5) for c in ("margin", "neg_entropy", "probability")]
        serve(engine, [(np.array([1, 2, 3]), d) for d in extra])
    assert misses() == 0


def test_state_is_donated_and_temporary_memory_is_far_below_it(tiny):
    """The caches are updated in place: aliased bytes are the state's; temporaries do not grow with layers."""
    deep = dataclasses.replace(tiny, n_layers=24)
    engine = Engine(llada.init(deep, 0), deep, EngineConfig(max_rows=4, max_length=1024))
    engine.buckets = [Bucket(4, 16, 64)]
    engine.compile()
    aliased, temporary = engine.memory(engine.buckets[0])
    state = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(engine.state))
    assert aliased == state
    assert temporary < state / 4


def test_i7_every_leaf_is_a_buffer_of_its_own(engine):
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.state)]
    assert len(set(pointers)) == len(pointers)


def test_i8_after_a_failed_call_a_reset_serves_again(engine, monkeypatch):
    asked = requests(2, seed=7)
    clean = serve(engine, asked)

    def broken(params, state):
        jax.tree.map(lambda x: x.delete(), state)
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_steps", dict.fromkeys(engine._steps, broken))
        engine.insert(0, "lost", [1], DecodeConfig(max_tokens=4))
        with pytest.raises(RuntimeError, match="injected"):
            engine.step()
    engine.reset()
    assert serve(engine, asked) == clean


def test_i9_one_program_whatever_the_block_size(engine):
    compiles = engine.counters.compiles
    serve(engine, [([1, 2], DecodeConfig(max_tokens=40, block_size=b)) for b in (4, 8, 16, 32)])
    assert engine.counters.compiles == compiles


@pytest.mark.parametrize(("rows", "length"), [(1, 64), (3, 100), (16, 1024), (64, 4096)])
def test_buckets_cover_every_batch_that_fits(rows, length):
    """The widest bucket takes one full canvas; narrow batches never get a wide program; few programs in all."""
    buckets = make_buckets(EngineConfig(max_rows=rows, max_length=length))
    assert len(buckets) <= 60
    assert all(b.window <= length and b.packed <= rows * length for b in buckets)
    random = np.random.default_rng(0)
    for _ in range(200):
        widths = random.integers(0, random.choice([9, 40, length + 1]), rows)
        bucket = choose_bucket(buckets, widths)
        if not widths.any():
            assert bucket is None
        else:
            assert bucket.window >= widths.max() or widths.sum() > max(b.packed for b in buckets)
            assert bucket.packed >= min(widths.sum(), max(b.packed for b in buckets))
            if widths.max() <= 16 and widths.sum() <= 16 * rows:
                assert bucket.packed <= max(32, 1.6 * widths.sum() + 8, 2 * rows)
