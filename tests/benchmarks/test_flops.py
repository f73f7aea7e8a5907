"""The operation count against counts by hand."""

import dataclasses

import numpy as np
import pytest

from benchmarks.flops import layer_matrix_elements, step_flops, visible_pairs
from benchmarks.presets import COMPUTE_BOUND, LLADA_8B
from jdllm.models.llada import weight_shapes

SMALL = dataclasses.replace(
    COMPUTE_BOUND, vocab_size=10, d_model=4, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=3, mask_id=9, eos_id=8, pad_id=8
)


def test_small_model_by_hand():
    # A layer: q 4x4, k 4x2, v 4x2, attention output 4x4, gate 4x3, up 4x3, down 3x4.
    assert layer_matrix_elements(SMALL) == 2 * (16 + 8 + 8 + 16 + 12 + 12 + 12)
    # 5 positions; 7 pairs of 2 heads of size 2 in 2 layers; 3 masked positions of 10 logits.
    assert (
        step_flops(SMALL, positions=5, visible_pairs=7, masked=3)
        == 2 * 168 * 5 + 7 * 2 * (2 + 2) * 2 * 2 + 2 * 4 * 10 * 3
    )


@pytest.mark.parametrize("model", [SMALL, COMPUTE_BOUND, LLADA_8B])
def test_matrix_elements_are_those_of_the_weights(model):
    matrices = [s for n, s in weight_shapes(model).items() if len(s) == 2 and n.startswith("layers.")]
    assert layer_matrix_elements(model) == sum(rows * columns for rows, columns in matrices)


@pytest.mark.parametrize(
    "prompt, block, start, end", [(3, 4, 0, 7), (3, 4, 3, 15), (5, 1, 0, 9), (1, 8, 1, 9), (6, 4, 0, 6)]
)
def test_visible_pairs_against_the_mask(prompt, block, start, end):
    index = np.array([0 if i < prompt else 1 + (i - prompt) // block for i in range(end)])
    assert visible_pairs(prompt, block, start, end) == (index[None] <= index[start:, None]).sum()
