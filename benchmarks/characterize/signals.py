"""What can be known of a request before it is decoded: the model's first look at its first block, from one forward pass
over prompt and masks with D2F's attention, without the engine."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdllm.config import ModelConfig
from jdllm.denoise.unmask import most_probable
from jdllm.models import llada


@dataclasses.dataclass(frozen=True)
class Signals:
    """Early signals of one request.

    Attributes:
        prompt: tokens of the prompt.
        confidence: mean over the first block of the best token's probability.
        highest: the highest of them, the token that the first pass commits.
        entropy: mean entropy over the first block, in nats.
    """

    prompt: int
    confidence: float
    highest: float
    entropy: float


def first_look(params: llada.Params, model: ModelConfig, block_size: int, length: int) -> Callable[..., Signals]:
    """A function of prompt ids, compiled once for canvases of ``length`` positions."""
    program = jax.jit(partial(_first_pass, model=model, block_size=block_size))

    def look(prompt: Sequence[int]) -> Signals:
        tokens = np.full((1, length), model.mask_id, np.int32)
        tokens[0, : len(prompt)] = prompt
        confidence, highest, entropy = np.asarray(program(params, tokens, np.int32(len(prompt)))).tolist()
        return Signals(len(prompt), confidence, highest, entropy)

    return look


def _first_pass(params: llada.Params, tokens: Array, prompt: Array, *, model: ModelConfig, block_size: int) -> Array:
    """float32 [3]: confidence, highest, entropy (Signals).

    Args:
        tokens: int32 [1, S], masks behind the prompt.
        prompt: int32 [], its length; at least one block follows.
    """
    position = jnp.arange(tokens.shape[1])
    end = jnp.where(position < prompt, prompt, prompt + block_size)  # what a position sees: its own block and before
    hidden = llada.hidden(params, model, tokens, (position[None, :] < end[:, None])[None])
    first = prompt - 1 if model.shifted_logits else prompt  # Dream's position before predicts
    logits = llada.head(params, model, jax.lax.dynamic_slice_in_dim(hidden[0], first, block_size))
    _, probability, _, _ = most_probable(logits, model.mask_id)
    logprobs = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)
    return jnp.stack([jnp.mean(probability), jnp.max(probability), jnp.mean(entropy)])
