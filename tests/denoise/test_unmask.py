"""Candidates and confidences against the official code's numbers; sampling against the softmax; ties."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scripted import SCRIPT_MODEL

from jdllm.config import CONFIDENCES, DecodeConfig
from jdllm.denoise.request import request
from jdllm.denoise.state import Rows, unpack_numbers
from jdllm.denoise.unmask import accepted, candidates


def one_row(nfe: int = 0, **settings) -> Rows:
    asked = request([1], DecodeConfig(**settings), SCRIPT_MODEL, 256)
    rows = unpack_numbers(jnp.asarray(asked.progress)[None], jnp.asarray(asked.settings)[None])
    return dataclasses.replace(rows, nfe=jnp.array([nfe]))


def find(logits, rows, mask_id=-1, positions=None):
    m = len(logits)
    positions = jnp.arange(m) if positions is None else positions
    found = candidates(jnp.asarray(logits), rows, jnp.zeros(m, int), positions, mask_id)
    return tuple(np.asarray(x) for x in found[:3])


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


def decide(masked, block, activated, sure, confidence, count=1, factor=0.0):
    n = len(masked)
    given = (jnp.asarray(x) for x in (masked, block, activated, sure, confidence, [count] * n, [factor] * n))
    return np.asarray(accepted(*given, blocks=64)).tolist()


def test_b13_ties_go_to_the_lowest_position():
    confidence = [0.5, 0.9, 0.9, 0.9, 0.1]
    assert decide([True] * 5, [0] * 5, [True] * 5, [False] * 5, confidence) == [False, True, False, False, False]
    assert decide([True] * 5, [0] * 5, [True] * 5, [False] * 5, confidence, count=2) == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_case_11_semi_activated_block():
    """A block that is not activated commits nothing, or exactly what is sure."""
    masked, block = [True] * 6, [8, 8, 12, 12, 12, 12]
    confidence = [0.1, 0.2, 0.8, 0.7, 0.6, 0.5]
    activated = [True] * 2 + [False] * 4
    assert decide(masked, block, activated, [False] * 6, confidence) == [False, True] + [False] * 4
    sure = [False] * 3 + [True] + [False] * 2
    assert decide(masked, block, activated, sure, confidence) == [False, True, False, True, False, False]
    assert decide(masked, block, [True] * 6, [False] * 6, confidence) == [False, True, True, False, False, False]


@pytest.mark.parametrize(("confidence", "wanted"), [([0.9, 0.6, 0.2], 1), ([0.9, 0.8, 0.2], 3), ([0.9, 0.8], 2)])
def test_case_20_factor(confidence, wanted):
    """Factor 1: demanded are nothing, 2/3, 3/4; a failure at the last rank alone is taken as well."""
    n = len(confidence)
    order = np.random.default_rng(0).permutation(n)
    given = np.array(confidence)[order]
    chosen = decide([True] * n, [3] * n, [True] * n, [False] * n, given.tolist(), factor=1.0)
    assert sorted(given[np.array(chosen)], reverse=True) == confidence[:wanted]
