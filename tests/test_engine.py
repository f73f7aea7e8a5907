"""Slots, buckets, donation, compile counts, isolation of rows, and refusals, on a small random model."""

import dataclasses
import math

import chex
import d2f_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import test_util as jtu

from jdllm import engine as engine_module
from jdllm.buckets import choose_bucket, make_buckets
from jdllm.config import DecodeConfig, EngineConfig, RequestError
from jdllm.denoise.request import request
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
    engine.buckets = [Bucket(1, LENGTH), Bucket(ROWS, ROWS * LENGTH)]
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


def test_rows_that_sit_out_steps_end_as_if_they_had_not(engine):
    """Whoever is held, and for how long; and what ``hold`` is told is what the row does when it takes part."""
    asked = requests(ROWS, seed=5)
    expected = serve(engine, asked)
    engine.reset()
    random = np.random.default_rng(0)
    before: dict[int, int] = {}

    def hold(passes):
        for one in passes:
            assert one.handle == one.slot and one.refresh == (one.nfe == 0) and 0 < one.width <= LENGTH
            assert one.nfe >= before.get(one.slot, 0)
            before[one.slot] = one.nfe
        return [one.slot for one in passes if random.random() < 0.6]

    for slot, (prompt, decode) in enumerate(asked):
        engine.insert(slot, slot, prompt, decode)
    done = {}
    with jtu.count_jit_compilation_cache_miss() as misses:
        while len(done) < len(asked):
            for row in engine.step(hold):
                assert row.nfe <= before.get(row.slot, 0) + 1
                if not row.live and row.slot not in done:
                    done[row.slot] = (row.canvas_ids, row.nfe, row.finish_reason)
    assert [done[slot] for slot in range(ROWS)] == expected and misses() == 0


def test_time_in_which_nobody_reads_is_no_cost(engine):
    engine.insert(0, "a", [1, 2, 3], DecodeConfig(max_tokens=30, skip_threshold=1.0))
    engine.step()
    engine.step()
    known, cost = engine.last_call, dict(engine.costs.table())
    engine.evict(0)  # a client that has left; its call is still in flight
    engine.step()
    assert engine.last_call is known and engine.costs.table() == cost
    engine.insert(0, "b", [1, 2, 3], DecodeConfig(max_tokens=30, skip_threshold=1.0))
    engine.step()
    engine.step()
    assert engine.last_call is not known


def test_when_all_are_held_nothing_runs(engine):
    engine.insert(0, "a", [1, 2, 3], DecodeConfig(max_tokens=8))
    calls = engine.counters.calls
    assert engine.step(lambda passes: [one.slot for one in passes]) == [] and engine.counters.calls == calls
    assert engine.step() == [] and [row.handle for row in engine.step()] == ["a"]


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
@pytest.mark.parametrize("block_size", [4, 32])
def test_15_the_prompt_needs_no_alignment(engine, tiny, params, prompt, block_size):
    """The block grid starts at the prompt's end, positions are absolute: tokens and passes of a row equal the oracle
    over uncached passes of the whole sequence."""
    ids = list(range(5, 5 + prompt))
    decode = DecodeConfig(max_tokens=40, block_size=block_size, skip_threshold=0.05, stop_ids=())
    pass_over = jax.jit(lambda tokens, mask: llada.logits(params, tiny, tokens, mask))

    def forward(x, nfe):
        tokens = np.pad(x, (0, LENGTH - len(x)))[None]
        block = np.maximum(0, (np.arange(LENGTH) - prompt) // block_size + 1)
        mask = (block[None, :] <= block[:, None]) & (np.arange(LENGTH) < len(x))
        p = np.array(jax.nn.softmax(pass_over(tokens, mask[None])[0]))
        p[:, tiny.mask_id] = 0
        return {i: (int(p[i].argmax()), p[i].max(), p[i].max()) for i in range(len(x))}

    *_, end = d2f_oracle.decode(ids, decode, forward, tiny.mask_id, ())
    (canvas, nfe, _), *_ = serve(engine, [(ids, decode)])
    assert (canvas, nfe) == (end.x[prompt:], end.nfe)


def test_b10_keys_and_values_are_those_of_the_final_text(engine, tiny, params):
    """The cache of finished blocks equals one pass over the final text; nothing half-masked is kept."""
    prompt, block = list(range(7)), 4
    engine.insert(0, "a", prompt, DecodeConfig(max_tokens=12, block_size=block, skip_threshold=0.05, stop_ids=()))
    while not (rows := engine.step()) or rows[0].live:
        pass
    cached = int(engine.state.rows.start[0])
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
    """Also of rows that end early, whose later blocks were left undecoded."""
    answers = serve(engine, requests(12, seed=2))
    assert {reason for _, _, reason in answers} == {"stop", "length"}
    for canvas, _, _ in answers:
        assert canvas and tiny.mask_id not in canvas


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
        {"cache": "x"},
        {"max_tokens": -1},
        {"max_tokens": 2.0},
        {"block_size": 0},
        {"block_add_threshold": -0.1},
        {"skip_threshold": float("nan")},
        {"temperature": -1.0},
        {"temperature": "1"},
        {"temperature": 10**400},
        {"skip_threshold": float("inf")},
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


def test_a_row_that_has_ended_leaves_its_slot_without_a_call(engine, monkeypatch):
    """Its device state is not live any more; one that is still live is ended there, and whoever comes next is right."""
    asked = requests(3, seed=11)
    alone = serve(engine, asked[2:])[0]
    engine.reset()
    calls, evict = [], engine._evict
    monkeypatch.setattr(engine, "_evict", lambda state, slot: calls.append(int(slot)) or evict(state, slot))
    engine.insert(0, "ends", *asked[0])
    engine.insert(1, "leaves", *asked[1])
    engine.step()
    engine.evict(1)
    assert calls == [1]
    while not (rows := engine.step()) or rows[0].live:
        pass
    engine.evict(0)
    assert calls == [1]
    engine.insert(0, "next", *asked[2])
    while not (rows := engine.step()) or rows[0].live:
        pass
    assert (rows[0].canvas_ids, rows[0].nfe, rows[0].finish_reason) == alone


@pytest.mark.parametrize("guidance", [0.0, 1.5])  # without and with a shadow
def test_a_request_may_be_packed_before_it_has_a_slot(engine, tiny, guidance):
    prompt, decode = [3, 4, 5], DecodeConfig(decoder="llada", max_tokens=16, steps=16, cfg_scale=guidance)
    packed = request(prompt, decode, tiny, LENGTH)
    before = jax.tree.map(np.copy, packed)
    shadow = 3 if guidance else 1
    states = []
    for given in ({}, {"packed": packed}, {"packed": packed}):  # the third: nothing was changed in it
        engine.reset()
        engine._inserted = 7
        engine.insert(0, "other", [9], DecodeConfig(max_tokens=1))
        engine.insert(1, "a", prompt, decode, shadow, **given)
        states.append(jax.tree.map(np.asarray, engine.state))
    chex.assert_trees_all_equal(*states)
    chex.assert_trees_all_equal(packed, before)


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


def deep_engine(tiny, layers: int, bucket: Bucket) -> Engine:
    deep = dataclasses.replace(tiny, n_layers=layers)
    engine = Engine(llada.init(deep, 0), deep, EngineConfig(max_rows=4, max_length=1024))
    engine.buckets = [bucket]
    engine.compile()
    return engine


def state_bytes(engine: Engine) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(engine.state))


def test_state_is_donated_and_temporary_memory_is_far_below_it(tiny):
    """The caches are updated in place: aliased bytes are the state's; temporaries do not grow with layers."""
    bucket = Bucket(4, 64)
    shallow, deep = deep_engine(tiny, 4, bucket), deep_engine(tiny, 24, bucket)
    (aliased, temporary), (_, at_four) = deep.memory(bucket), shallow.memory(bucket)
    assert aliased == state_bytes(deep)
    assert temporary < state_bytes(deep) / 4
    assert temporary < 1.1 * at_four


def test_the_widest_bucket_attends_a_few_tiles_at_a_time(tiny, monkeypatch):
    """Its scores are bounded, and its tokens are those of all tiles at once."""
    bucket = Bucket(4, 1024)
    at_once = deep_engine(tiny, 2, bucket)
    monkeypatch.setattr("jdllm.denoise.window.MOST_SCORES", bucket.tile * 1024 * tiny.n_heads)
    one_by_one = deep_engine(tiny, 2, bucket)
    scores = 4 * bucket.rows * bucket.tile * 1024 * tiny.n_heads
    assert one_by_one.memory(bucket)[1] < at_once.memory(bucket)[1] - scores // 2
    asked = [*requests(3, seed=4), ([5, 6, 7] * 200, DecodeConfig(max_tokens=40))]
    assert serve(one_by_one, asked) == serve(at_once, asked)


def test_i7_every_leaf_is_a_buffer_of_its_own(engine):
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.state)]
    assert len(set(pointers)) == len(pointers)


def test_i8_after_a_failed_call_a_reset_serves_again(engine, monkeypatch):
    asked = requests(2, seed=7)
    clean = serve(engine, asked)

    def broken(params, state, held):
        jax.tree.map(lambda x: x.delete(), state)
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_steps", dict.fromkeys(engine._steps, broken))
        engine.insert(0, "lost", [1], DecodeConfig(max_tokens=4))
        with pytest.raises(RuntimeError, match="injected"):
            engine.step()
    engine.reset()
    assert serve(engine, asked) == clean


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"top_k": 3}, {"confidence": "margin"}])
def test_a_row_whose_numbers_are_not_finite_fails_and_ends(tiny, params, engine, settings):
    """B1, B12: no endless loop and no mask text, and the slot serves again."""
    broken = {**params, "norm": jnp.full_like(params["norm"], jnp.nan)}
    decode = DecodeConfig(max_tokens=8, block_size=4, **settings)
    engine.params = broken
    try:
        engine.insert(0, "bad", [1, 2], decode)
        engine.step()
        (row,) = engine.step()
    finally:
        engine.params = params
    assert (row.live, row.failed, row.finish_reason) == (False, True, "error")
    engine.evict(0)
    engine.insert(0, "good", [1, 2], DecodeConfig(max_tokens=8, block_size=4, stop_ids=()))
    while not (rows := engine.step()) or rows[0].live:
        pass
    assert not rows[0].failed and len(rows[0].canvas_ids) == 8


@pytest.mark.parametrize("temperature", [1e-45, 3e-38, 1e-10, 100.0])
def test_any_temperature_ends(engine, temperature):
    decode = DecodeConfig(max_tokens=12, block_size=4, temperature=temperature, stop_ids=())
    (canvas, nfe, _), *_ = serve(engine, [([1, 2, 3], decode)])
    assert len(canvas) == 12 and nfe <= 12


def test_where_rows_do_not_all_fit_the_oldest_goes_first(tiny, params):
    """Low slots are refilled all the time; the row in the high slot is not starved."""
    engine = Engine(params, tiny, EngineConfig(max_rows=2, max_length=LENGTH, max_packed=32))
    engine.buckets = [Bucket(2, LENGTH)]
    engine.compile()
    wide = ([3] * 60, DecodeConfig(max_tokens=32, block_size=32, skip_threshold=1.0, stop_ids=()))
    engine.insert(0, "young-0", *wide)
    engine.evict(0)
    engine.insert(1, "old", *wide)
    engine.insert(0, "young-1", *wide)
    finished = []
    for n in range(2, 200):
        for row in engine.step():
            if not row.live:
                finished.append(row.handle)
                engine.evict(row.slot)
                engine.insert(row.slot, f"young-{n}", *wide)
        if "old" in finished:
            break
    assert finished.index("old") == 0


def test_weights_on_several_devices_are_refused(tiny, params, monkeypatch):
    class Two:
        dtype = params["embed"].dtype

        def devices(self):
            return {0, 1}

    with pytest.raises(ValueError, match="weights on 3 devices"):
        Engine({**params, "embed": Two()}, tiny, EngineConfig(max_rows=1, max_length=16))


def test_i9_one_program_whatever_the_block_size(engine):
    compiles = engine.counters.compiles
    serve(engine, [([1, 2], DecodeConfig(max_tokens=40, block_size=b)) for b in (4, 8, 16, 32)])
    assert engine.counters.compiles == compiles


@pytest.mark.parametrize(("rows", "length"), [(1, 64), (3, 100), (16, 1024), (64, 4096)])
def test_buckets_cover_every_batch_that_fits(rows, length):
    """The widest bucket takes one full canvas; narrow batches never get a wide program; few programs in all."""
    buckets = make_buckets(EngineConfig(max_rows=rows, max_length=length))
    assert len(buckets) <= 60
    assert all(b.packed <= rows * length for b in buckets)
    random = np.random.default_rng(0)
    for _ in range(200):
        widths = random.integers(0, random.choice([9, 40, length + 1]), rows)
        bucket = choose_bucket(buckets, widths)
        if not widths.any():
            assert bucket is None
        else:
            assert bucket.packed >= min(widths.sum(), max(b.packed for b in buckets))
            if widths.max() <= 16 and widths.sum() <= 16 * rows:
                assert bucket.packed <= max(32, 1.6 * widths.sum() + 8, 2 * rows)


def test_a_reset_lets_the_old_state_go_before_it_makes_the_new(engine, monkeypatch):
    """Both at once may be more than the device has."""
    held = []
    make = engine_module.empty_state
    monkeypatch.setattr(engine_module, "empty_state", lambda *a: held.append(hasattr(engine, "state")) or make(*a))
    engine.reset()
    assert held == [False]
