"""Floating-point operations that a denoising step needs, counted from its positions; a multiply-add is two.

    layers     2 x (elements of the layer matrices) a position
    attention  4 x (query heads x head size) x (layers) a visible pair: scores and weighted values
    head       2 x D x V a masked position

Needed means needed by the decoder's rules: the blocks behind the cache, keys that the block-causal mask lets a position
see, logits at masked positions. Padding, invisible keys and logits nobody reads are no work done. Norms, rotary
embedding, softmax and the embedding look-up are left out (about 1 % at width 768).
"""

from jdllm.config import ModelConfig


def layer_matrix_elements(model: ModelConfig) -> int:
    """Elements of the matrices of all layers: q, k, v, attention output, gate, up, down."""
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    attention = 2 * model.d_model * heads + 2 * model.d_model * kv_heads
    return model.n_layers * (attention + 3 * model.d_model * model.d_ff)


def step_flops(model: ModelConfig, positions: int, visible_pairs: int, masked: int) -> int:
    """Operations of a forward pass over ``positions`` whose queries see ``visible_pairs`` keys in all."""
    attention = 4 * model.n_layers * model.n_heads * model.head_dim
    head = 2 * model.d_model * model.vocab_size
    return 2 * layer_matrix_elements(model) * positions + attention * visible_pairs + head * masked


def visible_pairs(prompt_length: int, block_size: int, start: int, end: int) -> int:
    """Keys seen under the block-causal mask by the positions ``start`` to ``end`` of one row, summed: each sees all up
    to the end of its own block."""
    pairs = 0
    while start < end:
        block = (start - prompt_length) // block_size if start >= prompt_length else -1
        block_end = min(end, prompt_length + (block + 1) * block_size)
        pairs += (block_end - start) * block_end
        start = block_end
    return pairs
