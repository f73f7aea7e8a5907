"""Candidates and confidences against the official code's numbers; sampling against the softmax; ties."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import SCRIPT_MODEL

from jdllm.config import CONFIDENCES, DecodeConfig
from jdllm.denoise.state import Rows, row_numbers
from jdllm.denoise.unmask import accepted, candidates


def one_row(nfe: int = 0, **settings) -> Rows:
    rows = dataclasses.replace(row_numbers(1, DecodeConfig(**settings), SCRIPT_MODEL), nfe=np.int32(nfe))
    return jax.tree.map(lambda x: jnp.asarray(x)[None], rows)


def find(logits, rows, mask_id=-1, positions=None):
    m = len(logits)
    positions = jnp.arange(m) if positions is None else positions
    return tuple(np.asarray(x) for x in candidates(jnp.asarray(logits), rows, jnp.zeros(m, int), positions, mask_id))


@pytest.mark.parametrize(("key", "settings"), [("c0", {}), ("c1", {"top_k": 5}), ("c2", {"top_p": 0.7})])
@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_greedy_equals_the_reference(golden, key, settings, confidence):
    a = golden.arrays({"file": "logits/sampling.npz"})
    token, probability, other = find(a["logits"], one_row(confidence=confidence, **settings))
    np.testing.assert_array_equal(token, a[f"{key}_token"])
    np.testing.assert_allclose(probability, a[f"{key}_top_probability"], atol=1e-6)
    name = {"probability": "default", "margin": "margin_confidence", "neg_entropy": "neg_entropy"}[confidence]
    np.testing.assert_allclose(other, a[f"{key}_{name}"], atol=1e-5)


def test_filtered_distributions_equal_the_reference(golden):
    """The probability of whatever was sampled is the reference's, after temperature, then top-p, then top-k."""
    a = golden.arrays({"file": "logits/sampling.npz"})
    entry = next(e for e in golden.manifest["logits"] if e["kind"] == "filtered_distributions_and_confidences")
    seen = 0
    for combination in entry["settings"]["combinations"]:
        if combination["temperature"]:
            probabilities = a[f"{combination['key']}_probs"]
            settings = {k: v for k, v in combination.items() if k != "key" and v is not None}
            for step in range(8):
                token, probability, _ = find(a["logits"], one_row(nfe=step, **settings))
                np.testing.assert_allclose(probability, probabilities[np.arange(12), token], atol=1e-6)
                assert (probability > 0).all()
                seen += 1
    assert seen >= 24


def test_b7_large_logits_sample_the_softmax():
    """No overflow at a logit of 120; frequencies within three sigma of softmax(logits / T)."""
    draws, temperature = 4000, 0.8
    logits = np.array([120.0, 119.0, 118.5, 100.0, -40.0], np.float32)
    rows = one_row(temperature=temperature, seed=3)
    token, probability, _ = find(np.tile(logits, (draws, 1)), rows)
    wanted = np.exp((logits - 120) / temperature)
    wanted /= wanted.sum()
    assert np.isfinite(probability).all()
    np.testing.assert_allclose(probability, wanted[token], rtol=1e-5)
    counts = np.bincount(token, minlength=5) / draws
    assert (np.abs(counts - wanted) <= 3 * np.sqrt(wanted * (1 - wanted) / draws) + 1e-9).all()


def test_sampling_depends_on_seed_step_and_position_alone():
    logits = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    logits[:] = logits[0]
    draw = lambda seed, step, place: find(logits, one_row(nfe=step, temperature=1.0, seed=seed), positions=place)[0]
    places = jnp.array([3, 4, 5, 6, 7, 8])
    again = draw(1, 2, places)
    np.testing.assert_array_equal(again, draw(1, 2, places))
    np.testing.assert_array_equal(again[::-1], draw(1, 2, places[::-1]))
    changed = [(draw(2, 2, places) != again).any(), (draw(1, 3, places) != again).any()]
    assert all(changed)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"top_k": 1}, {"top_p": 0.1}])
def test_the_mask_id_is_never_a_candidate(settings):
    """Its probability stays in the distribution, as in the reference; only the choice passes it by."""
    logits = np.zeros((40, 8), np.float32)
    logits[:, 5] = 9.0
    logits[:, 2] = 4.0
    token, probability, _ = find(logits, one_row(**settings), mask_id=5)
    assert (token != 5).all()
    if not settings:
        full = np.exp(logits[0]) / np.exp(logits[0]).sum()
        assert (token == 2).all()
        np.testing.assert_allclose(probability, full[2], rtol=1e-5)


def test_ties_go_to_the_lowest_token_id():
    token, _, _ = find(np.zeros((3, 9), np.float32), one_row())
    np.testing.assert_array_equal(token, 0)


def decide(masked, block, previous, spare, sure, confidence):
    given = (jnp.asarray(x) for x in (masked, block, previous, spare, sure, confidence))
    return np.asarray(accepted(*given, blocks=64)).tolist()


def test_b13_ties_go_to_the_lowest_position():
    chosen = decide([True] * 5, [0] * 5, [-1] * 5, [0] * 5, [False] * 5, [0.5, 0.9, 0.9, 0.9, 0.1])
    assert chosen == [False, True, False, False, False]


def test_case_11_semi_activated_block():
    """A block whose predecessor is not decoded enough commits nothing, or exactly what is sure."""
    masked, block, previous = [True] * 6, [8, 8, 12, 12, 12, 12], [-1, -1, 8, 8, 8, 8]
    confidence = [0.1, 0.2, 0.8, 0.7, 0.6, 0.5]
    spare = [1] * 6  # block 12 is activated once block 8 has at most one mask; it has two
    assert decide(masked, block, previous, spare, [False] * 6, confidence) == [False, True] + [False] * 4
    sure = [False] * 3 + [True] + [False] * 2
    assert decide(masked, block, previous, spare, sure, confidence) == [False, True, False, True, False, False]
    spare = [2] * 6
    assert decide(masked, block, previous, spare, [False] * 6, confidence) == [False, True, True, False, False, False]
