"""Masks, noise, batches and loss against their definitions."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.train import batches, objective, recipe, tokenizer


@given(st.integers(1, 20), st.integers(1, 30), st.sampled_from([1, 4, 8, 16]))
def test_the_d2f_mask_is_block_causal(prompt, generated, size):
    blocks = objective.answer_blocks(prompt, prompt + generated, size)
    seen = np.asarray(objective.visible(blocks[None]))[0]
    block = lambda position: 0 if position < prompt else 1 + (position - prompt) // size
    for query, key in itertools.product(range(prompt + generated), repeat=2):
        assert seen[query, key] == (block(key) <= block(query))


@given(st.integers(0, 1 << 30), st.integers(1, 20))
def test_noise_never_decreases_over_the_blocks(seed, count):
    levels = objective.block_noise(np.random.default_rng(seed), count)
    assert levels.shape == (count,) and (np.diff(levels) >= 0).all()
    assert levels[0] >= 0 and 0 < levels[-1] <= 1


@given(st.integers(0, 1 << 30), st.lists(st.sampled_from([0.0, 0.01, 1.0]), min_size=1, max_size=9).filter(any))
def test_at_least_one_position_is_masked_and_none_of_probability_zero(seed, probability):
    masked = objective.draw_mask(np.random.default_rng(seed), np.array(probability))
    assert masked.any() and not masked[np.array(probability) == 0].any() and masked[np.array(probability) == 1].all()


@pytest.mark.parametrize("make_row", [batches.base_row, batches.d2f_row])
def test_batches_mask_answers_only_and_repeat_from_their_round(make_row):
    text = tokenizer.build()
    mask, assistant = text.token_to_id(tokenizer.MASK), text.token_to_id("assistant")
    stream = batches.rounds(text, make_row, 0, 0, 1)
    next(stream)
    second = next(stream)
    for batch, again in zip(second, next(batches.rounds(text, make_row, 0, 1, 1)), strict=True):
        assert all((batch[name] == again[name]).all() for name in batch)
    for batch in second:
        noisy, targets, blocks, weights = (batch[name] for name in ("noisy", "targets", "blocks", "weights"))
        assert noisy.shape[1] % batches.BUCKET == 0 and noisy.size <= batches.TOKENS
        assert ((noisy == mask) == (weights > 0)).all() and (weights.sum(axis=1) > 0).all()
        assert (noisy == targets)[weights == 0].all()
        start = np.argmax(targets == assistant, axis=1) + 3
        assert (np.argmax(weights > 0, axis=1) >= start).all()
        assert (np.diff(blocks, axis=1) >= 0).all()


def test_the_loss_counts_masked_positions_by_weight_and_ignores_what_is_behind_the_canvas():
    text = tokenizer.build()
    cfg = recipe.model(text)
    params = recipe.llada.init(cfg, 0)
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 100, (2, 8)).astype(np.int32)
    noisy = targets.copy()
    noisy[:, 4:6] = cfg.mask_id
    blocks = np.array([[0] * 6 + [objective.UNSEEN] * 2] * 2, np.int32)
    weights = np.zeros((2, 8), np.float32)
    weights[:, 4], weights[:, 5] = 1.0, 0.5
    loss = float(objective.masked_cross_entropy(params, cfg, noisy, targets, weights, blocks))
    logits = recipe.llada.logits(params, cfg, noisy[:, :6])
    each = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[:, :6, None], -1)[..., 0]
    assert loss == pytest.approx((each[:, 4].sum() + 0.5 * each[:, 5].sum()) / 3.0, rel=1e-5)
