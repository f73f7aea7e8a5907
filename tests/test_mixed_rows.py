"""Unlike decoders, adapters and settings in one batch: what a row gives does not hang on who is beside it."""

import dataclasses
import random

import numpy as np
import pytest
from jax._src import test_util as jtu

from jdllm.batch import Asked, decode_all
from jdllm.config import DecodeConfig, EngineConfig
from jdllm.convert.adapter import read_adapter
from jdllm.decoders import slots_needed, sure_above
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.serving import schedulers
from jdllm.serving.schedulers import Block, Deficit, Exclusive, PerRequest

LENGTH, ROWS = 160, 6
GOLDEN_ADAPTER = "llada-tiny-d2f-lora"


@pytest.fixture(scope="module")
def engine(golden):
    """Base weights with the D2F adapter, and a second one, beside them."""
    model = golden.config("llada-tiny")
    adapter = read_adapter("d2f", golden.folder / GOLDEN_ADAPTER, model)
    half = dataclasses.replace(adapter, name="half", pairs={n: (a, b / 2) for n, (a, b) in adapter.pairs.items()})
    made = Engine(golden.params("llada-tiny"), model, EngineConfig(ROWS, LENGTH), [half, adapter], range(374, 384))
    made.buckets = [Bucket(ROWS, 128), Bucket(ROWS, ROWS * LENGTH)]
    made.compile()
    return made


def run(engine, requests, slots=range(ROWS), hold=None):
    """(ids, nfe, logprobs, committed) of each request, all started together as slots allow."""
    engine.reset()
    waiting, out = list(enumerate(requests)), {}
    while len(out) < len(requests):
        while waiting:
            free = [slot for slot in engine.free_slots if slot in slots]
            if len(free) < slots_needed(waiting[0][1][1]):
                break
            index, (prompt, decode) = waiting.pop(0)
            engine.insert(free[0], ("row", index), prompt, decode, free[-1])
        for row in engine.step(hold):
            if not row.live:
                assert not row.failed
                out[row.handle[1]] = (row.canvas_ids, row.nfe, row.logprobs.tolist(), row.committed.tolist())
                engine.evict(row.slot)
    return [out[i] for i in range(len(requests))]


def random_requests(count: int, seed: int) -> list[tuple[list[int], DecodeConfig]]:
    """Every decoder with many settings, on LLaDA."""
    r = random.Random(seed)
    found = []
    for _ in range(count):
        tokens, size = r.randint(1, 40), r.choice([4, 8, 16])
        blocks = -(-tokens // size)
        settings = {
            "max_tokens": tokens,
            "block_size": size,
            "temperature": r.choice([0, 0, 0.7]),
            "seed": r.randint(0, 9),
            "early_stop": r.random() < 0.5,
            "adapter": r.randint(0, 2),
        }
        kind = r.choice(["d2f", "llada", "quota", "threshold", "factor"])
        if kind == "d2f":
            settings |= {"skip_threshold": r.choice([0.3, 0.9, 1.0]), "confidence": r.choice(["margin", "probability"])}
            settings |= {"top_k": r.choice([0, 5]), "top_p": r.choice([1.0, 0.8])}
        elif kind == "llada":
            settings |= {"decoder": "llada", "steps": blocks * r.randint(1, 4), "cfg_scale": r.choice([0.0, 0.0, 0.5])}
            settings |= {"remasking": r.choice(["random", "low_confidence"]), "logits_eos_inf": r.random() < 0.3}
        else:
            settings |= {"decoder": "fast-dllm", "cache": r.choice(["none", "prefix", "dual"])}
            settings |= {
                "quota": {"steps": blocks * r.randint(1, 4)},
                "threshold": {"threshold": r.choice([0.3, 0.9])},
                "factor": {"factor": r.choice([0.5, 1.0])},
            }[kind]
        prompt = [r.randrange(0, 360) for _ in range(r.randint(1, 60))]
        found.append((prompt, DecodeConfig(**settings)))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_row_is_bit_equal_alone_and_among_any_neighbours(engine, seed):
    """Tokens, passes, and the log-probabilities to the last bit, in the same bucket."""
    engine_buckets, engine.buckets = engine.buckets, engine.buckets[-1:]
    try:
        requests = random_requests(8, seed)
        together = run(engine, requests)
        order = random.Random(seed).sample(range(8), 8)
        shuffled = run(engine, [requests[i] for i in order], slots=[1, 3, 4])
        assert [shuffled[order.index(i)] for i in range(8)] == together
        assert [run(engine, [request])[0] for request in requests] == together
    finally:
        engine.buckets = engine_buckets


@pytest.mark.parametrize(
    "policy", [PerRequest(), Deficit(96), Exclusive(0.5), Block()], ids=lambda policy: type(policy).__name__
)
def test_schedulers_that_hold_rows_change_no_token(engine, policy):
    """And keep their promises on the real engine: one row a step, a budget, two phases."""
    asked = random_requests(8, 11)
    steps = []

    def hold(passes):
        found = []
        for one in passes:
            prompt, decode = asked[one.handle[1]]
            size, done = decode.block_size, max(0, one.prefix - len(prompt))
            left = max(1, -(-decode.max_tokens // size) - done // size)
            found.append(schedulers.Pass(one.slot, one.width, one.refresh, one.slot, one.nfe, left))
        held = set(policy.hold(found))
        steps.append([one for one in found if one.key not in held])
        assert steps[-1] or not found
        return held

    engine_buckets, engine.buckets = engine.buckets, engine.buckets[-1:]
    try:
        assert run(engine, asked, hold=hold) == run(engine, asked)
    finally:
        engine.buckets = engine_buckets
    if isinstance(policy, PerRequest):
        assert all(len(step) <= 1 for step in steps)
    if isinstance(policy, Exclusive):
        assert all(len({one.refresh for one in step}) <= 1 for step in steps)
    if isinstance(policy, Deficit):
        refreshed = sum(one.width for step in steps for one in step if one.refresh and len(step) > 1)
        assert 0 < refreshed <= policy.budget * len(steps)


def test_thresholds_that_change_on_the_way(engine):
    """From the first pass on: as if asked for. Later: the passes before are those of the old threshold, and rows that
    are not named go on as they were."""
    prompt = [5, 9, 200]
    d2f = lambda value: DecodeConfig(max_tokens=40, block_size=8, skip_threshold=value, early_stop=False)
    fast = lambda value: DecodeConfig(decoder="fast-dllm", max_tokens=40, block_size=8, threshold=value)
    high, low = [(prompt, d2f(1.0)), (prompt, fast(1.0))], [(prompt, d2f(0.01)), (prompt, fast(0.01))]
    slow, quick = run(engine, high), run(engine, low)
    for after in (0, 3):
        engine.reset()
        for slot, (ids, decode) in enumerate([*high, *high]):
            engine.insert(slot, slot, ids, decode)
        for _ in range(after):
            engine.step()
        engine.read()
        engine.set_thresholds({slot: sure_above(high[slot][1], 0.01) for slot in (0, 1)})
        done = {}
        while len(done) < 4:
            done |= {row.slot: row for row in engine.step() if not row.live and row.slot not in done}
        for slot in (0, 1):
            assert done[slot + 2].canvas_ids == slow[slot][0] and done[slot + 2].nfe == slow[slot][1]
            if not after:
                assert done[slot].canvas_ids == quick[slot][0] and done[slot].nfe == quick[slot][1]
            else:
                first = np.asarray(slow[slot][3])
                early = (first > 0) & (first <= after)
                assert (done[slot].committed[early] == first[early]).all() and done[slot].nfe < slow[slot][1]


def test_a_slot_that_ends_is_filled_in_the_next_call(engine):
    """No call is lost between two requests in one slot."""
    asked = [([i + 1], DecodeConfig(max_tokens=8, block_size=4)) for i in range(4)]
    engine.reset()
    calls, passes = engine.counters.calls, 0
    for _, row in decode_all(OneSlot(engine), [Asked(("row", i), *one) for i, one in enumerate(asked)]):
        passes += row.nfe
    assert engine.counters.calls - calls == passes


class OneSlot:
    """An engine that shows its first slot alone."""

    def __init__(self, engine):
        self.insert, self.evict, self.read, self.dispatch = engine.insert, engine.evict, engine.read, engine.dispatch
        self.engine = engine

    @property
    def free_slots(self):
        return self.engine.free_slots[: self.engine.free_slots[:1] == [0]]


def test_no_compile_over_many_mixed_requests(engine):
    run(engine, random_requests(2, 100))
    with jtu.count_jit_compilation_cache_miss() as misses:
        run(engine, random_requests(60, 7))
    assert misses() == 0


@pytest.mark.slow
def test_no_compile_over_a_thousand_mixed_requests(engine):
    run(engine, random_requests(2, 100))
    with jtu.count_jit_compilation_cache_miss() as misses:
        run(engine, random_requests(1000, 8))
    assert misses() == 0


def test_base_and_adapter_rows_share_a_step(golden, engine):
    """The golden traces of the base model (bidirectional) and of its D2F adapter (block-causal), in one batch, with the
    adapter unmerged: tokens and passes of the official code, which runs it unmerged too."""
    traces = [t for a in ("llada_vanilla", "fast_dllm_llada", "d2f:llada") for t in golden.traces(a)]
    traces = [t for t in traces if t.model == "llada-tiny" and t.decode.max_tokens]
    random.Random(0).shuffle(traces)
    number = {None: 0, GOLDEN_ADAPTER: 2}
    asked = [(t.prompt, dataclasses.replace(t.decode, adapter=number[t.adapter])) for t in traces]
    assert {t.adapter for t in traces} == number.keys()
    for trace, (ids, nfe, _, _) in zip(traces, run(engine, asked), strict=True):
        assert (ids, nfe) == (trace.expected_ids, trace.nfe), trace.name


def test_merged_and_unmerged_agree(golden):
    """Largest difference of the logits at most 3e-4 in float32, the tolerance of the
    golden logits."""
    from jdllm.adapters import stack
    from jdllm.models import llada
    from jdllm.models.layers import attention, rope_tables

    model = golden.config("llada-tiny")
    merged, base = golden.params("llada-tiny", GOLDEN_ADAPTER), golden.params("llada-tiny")
    beside = {**base, **stack([read_adapter("d2f", golden.folder / GOLDEN_ADAPTER, model)])}
    tokens = np.random.default_rng(0).integers(0, 360, (1, 40))

    def logits(params, adapter):
        rope = rope_tables(np.arange(40)[None], model.head_dim, model.rope_theta)
        see = np.ones((1, 40, 40), bool)
        x = llada.embed(params, model, tokens)
        for p in llada.layer_params(params, model):
            attend = lambda q, k, v: attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), see)
            x = llada.layer(p, model, x, rope, attend, np.full((1, 40), adapter))
        return np.asarray(llada.head(params, model, x))

    np.testing.assert_allclose(logits(beside, 1), logits(merged, 0), atol=3e-4)
    np.testing.assert_array_equal(logits(beside, 0), np.asarray(llada.logits(base, model, tokens)))


def test_logprobs_and_passes_are_those_of_the_commit(engine):
    """Greedy rows: the log-probability of a position is that of its token in the pass that committed it, which a
    threshold shows; earlier passes had less."""
    decode = DecodeConfig(decoder="fast-dllm", max_tokens=24, block_size=8, threshold=0.5, early_stop=False)
    ids, nfe, logprobs, committed = run(engine, [([5, 6, 7], decode)])[0]
    passes = np.array(committed[3:27])
    assert passes.min() == 1 and passes.max() == nfe
    assert (np.array(logprobs[3:27]) < 0).all()
    for n in range(1, nfe + 1):  # all but the best position of a pass reached the threshold
        low = np.sort(np.exp(np.array(logprobs[3:27])[passes == n]))[:-1]
        assert (low >= 0.5 - 1e-6).all()
    assert not any(committed[:3]) and not any(logprobs[:3])
    assert len(ids) == 24


def test_ids_without_a_token_are_never_sampled(engine):
    """Ten ids of this vocabulary stand for nothing; at a high temperature they would come soon."""
    asked = [([5], DecodeConfig(max_tokens=60, temperature=100.0, seed=s, stop_ids=())) for s in range(12)]
    ids = np.concatenate([row[0] for row in run(engine, asked)])
    assert ids.max() < 374 and (ids != engine.model.mask_id).all()


@pytest.mark.parametrize("decoder", ["d2f", "llada", "fast-dllm"])
@pytest.mark.parametrize("tokens", [0, 20])
def test_infill(engine, decoder, tokens):
    """Masks inside the prompt are filled in place, every other prompt token is untouched."""
    mask = engine.model.mask_id
    prompt = [5, 6, mask, mask, 8, 9, mask, 11]
    given = np.array(prompt) != mask
    decode = DecodeConfig(decoder=decoder, max_tokens=tokens, block_size=8, infill=True, early_stop=False)
    engine.reset()
    engine.insert(0, "a", prompt, decode)
    while not (rows := engine.step()) or rows[0].live:
        pass
    filled = rows[0].tokens[: len(prompt)]
    np.testing.assert_array_equal(filled[given], np.array(prompt)[given])
    assert (filled != mask).all() and not rows[0].failed
    assert len(rows[0].canvas_ids) == tokens and mask not in rows[0].canvas_ids
    assert (rows[0].committed[: len(prompt)] > 0).tolist() == (~given).tolist()


@pytest.mark.parametrize("decoder", ["d2f", "llada", "fast-dllm"])
def test_without_infill_a_mask_id_is_ordinary_input(engine, decoder):
    mask = engine.model.mask_id
    engine.reset()
    engine.insert(0, "a", [5, mask, 8], DecodeConfig(decoder=decoder, max_tokens=8, block_size=8, early_stop=False))
    while not (rows := engine.step()) or rows[0].live:
        pass
    assert rows[0].tokens[:3].tolist() == [5, mask, 8] and mask not in rows[0].canvas_ids


@pytest.mark.parametrize("decoder", ["d2f", "llada", "fast-dllm"])
def test_min_tokens_keeps_stop_ids_away(engine, decoder):
    """A model that says nothing but the stop id: not before min_tokens, and at once from there on."""
    stop = run(engine, [([5], DecodeConfig(decoder=decoder, max_tokens=24, block_size=8, stop_ids=()))])[0][0][3]
    asked = [
        (
            [5],
            DecodeConfig(
                decoder=decoder, max_tokens=24, block_size=8, stop_ids=(stop,), min_tokens=n, early_stop=False
            ),
        )
        for n in (0, 12, 24)
    ]
    for (ids, *_), least in zip(run(engine, asked), (0, 12, 24), strict=True):
        assert stop not in ids[:least]
    assert stop in run(engine, asked[:1])[0][0]


@pytest.mark.parametrize("steps", [3])
def test_several_steps_a_dispatch_give_the_same(golden, engine, steps):
    """Schedules, guidance and evictions when three steps go by between two reports."""
    model = golden.config("llada-tiny")
    several = Engine(golden.params("llada-tiny"), model, EngineConfig(ROWS, LENGTH, steps_per_dispatch=steps))
    several.buckets = [Bucket(ROWS, ROWS * LENGTH, steps)]
    several.compile()
    requests = [(p, dataclasses.replace(d, adapter=0, temperature=0.0)) for p, d in random_requests(16, 5)]
    one_by_one = [row[:2] for row in run(engine, requests)]
    assert [row[:2] for row in run(several, requests)] == one_by_one
    assert several.counters.calls < engine.counters.calls


def test_a_guided_row_starts_however_few_positions_a_step_has(golden):
    """It and its shadow step together: the widest bucket takes two whole canvases."""
    model = golden.config("llada-tiny")
    config = EngineConfig(2, 64, max_packed=64)
    tight = Engine(golden.params("llada-tiny"), model, config)
    tight.compile()
    decode = DecodeConfig(decoder="llada", max_tokens=32, block_size=8, steps=8, cfg_scale=1.0, early_stop=False)
    tight.insert(0, "a", [5] * 8, decode)
    for _ in range(20):
        rows = tight.step()
        if rows and not rows[0].live:
            break
    assert rows[0].nfe == 8 and not rows[0].failed


def test_the_shadow_of_a_guided_row_is_its_own(engine):
    engine.reset()
    guided = DecodeConfig(decoder="llada", max_tokens=8, block_size=8, cfg_scale=1.0)
    with pytest.raises(ValueError, match="one above"):
        engine.insert(0, "a", [5], guided, shadow=0)
    with pytest.raises(ValueError, match="one above"):
        engine.insert(3, "a", [5], guided, shadow=2)
    with pytest.raises(ValueError, match="none above"):
        engine.insert(ROWS - 1, "a", [5], guided)
    engine.insert(0, "a", [5], guided, shadow=3)
    assert engine.free_slots == [1, 2, 4, 5]
    with pytest.raises(ValueError, match="slot 3 shadows another"):
        engine.evict(3)
    with pytest.raises(ValueError, match="slot 3 is taken"):
        engine.insert(3, "b", [5], DecodeConfig())
    engine.evict(0)
    assert engine.free_slots == list(range(ROWS))


def test_sampled_rows_of_llada_rank_by_the_probability_before_temperature(engine):
    """At T > 0 the token is drawn, its confidence is not tempered: with a threshold, what is committed beside the best
    has that probability. The seed alone decides."""
    settings = {"decoder": "fast-dllm", "max_tokens": 32, "block_size": 16, "threshold": 0.6, "temperature": 1.0}
    asked = [([5, 6, 7], DecodeConfig(early_stop=False, seed=seed, **settings)) for seed in (1, 2, 1)]
    first, other, again = run(engine, asked)
    assert first == again and first != other
    passes, logprobs = np.array(first[3][3:35]), np.array(first[2][3:35])
    for n in range(1, first[1] + 1):
        assert (np.sort(np.exp(logprobs[passes == n]))[:-1] >= 0.6 - 1e-6).all()


def test_one_number_that_is_not_a_number_ends_a_row(tiny):
    """A single masked position without a confidence: whatever the rule, the row fails instead of staying."""
    from scripted import Script, scripted_engine
    from scripted import run as play

    shape = (4, 40, 160)
    probability = np.full(shape, 0.5)
    probability[:, :, 6] = np.nan
    scripted = scripted_engine(4, 160, 40)
    for settings in (
        {"decoder": "fast-dllm", "steps": 2},
        {"decoder": "fast-dllm"},
        {"decoder": "llada", "steps": 2},
        {"decoder": "llada"},
        {},
    ):
        scripted.play(Script(np.full(shape, 7), probability))
        decode = DecodeConfig(max_tokens=8, block_size=8, early_stop=False, **settings)
        (history,) = play(scripted, [([1, 2, 3], decode)])
        assert bool(scripted.state.rows.failed[0]) and len(history) < 20


def test_a_nucleus_of_unused_ids_alone_still_samples_a_token():
    import jax.numpy as jnp
    from scripted import SCRIPT_MODEL

    from jdllm.denoise.request import request
    from jdllm.denoise.state import unpack_numbers
    from jdllm.denoise.unmask import candidates

    logits = np.zeros((40, 12), np.float32)
    logits[:, 9], logits[:, 4], logits[:, 0] = 9.0, 5.0, -5.0
    unused = jnp.asarray(np.isin(np.arange(12), [0, 9]))
    for settings in ({"top_k": 1}, {"top_p": 0.1}):
        asked = request([1], DecodeConfig(temperature=1.0, **settings), SCRIPT_MODEL, 256)
        rows = unpack_numbers(jnp.asarray(asked.progress)[None], jnp.asarray(asked.settings)[None])
        found = candidates(jnp.asarray(logits), rows, jnp.zeros(40, int), jnp.arange(40), 11, unused)
        assert (np.asarray(found[0]) == 4).all()


def test_bfloat16_rows_end_and_hold_tokens(golden):
    """Nothing is promised of its tokens but that they are tokens; adapters are cast with the weights."""
    import jax.numpy as jnp

    model = golden.config("llada-tiny")
    half = {name: w.astype(jnp.bfloat16) for name, w in golden.params("llada-tiny").items()}
    adapter = read_adapter("d2f", golden.folder / GOLDEN_ADAPTER, model)
    made = Engine(half, model, EngineConfig(ROWS, LENGTH), [adapter, adapter])
    made.buckets = [Bucket(ROWS, ROWS * LENGTH)]
    made.compile()
    for (prompt, decode), (ids, *_) in zip(requests := random_requests(8, 1), run(made, requests), strict=True):
        assert model.mask_id not in ids and 0 < len(ids) <= decode.max_tokens and prompt
