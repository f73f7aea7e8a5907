"""LLaDA's own sampler, uncached, for a batch of prompts: what the base model is measured with. Not an engine."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.config import ModelConfig
from jdllm.models import llada
from jdllm.train.objective import UNSEEN, visible

BUCKET = 64


@dataclasses.dataclass(frozen=True)
class Decoded:
    """``ids``: the answer up to end-of-text, without it. ``nfe``: forward passes until it was settled."""

    ids: list[int]
    nfe: int


def llada_decode(
    params: llada.Params,
    cfg: ModelConfig,
    prompts: Sequence[Sequence[int]],
    gen_length: int = 128,
    block: int = 16,
    threshold: float | None = 0.9,
    quota: int = 1,
) -> list[Decoded]:
    """Semi-autoregressive low-confidence remasking at temperature 0 over a canvas of prompt and ``gen_length`` masks.

    Every pass sees the whole canvas. In the leftmost block with masks it commits the most confident position and,
    with a ``threshold``, all others whose probability reaches it (Fast-dLLM), without one the ``quota`` most confident
    (LLaDA). A row ends with the block that settles its text, which LLaDA, knowing no end, goes on behind.
    """
    length = -(-max(len(prompt) + gen_length for prompt in prompts) // BUCKET) * BUCKET
    tokens = np.full((len(prompts), length), cfg.eos_id, np.int32)
    blocks = np.full(tokens.shape, UNSEEN, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        tokens[i, len(prompt) : len(prompt) + gen_length] = cfg.mask_id
        blocks[i, : len(prompt) + gen_length] = 0
    nfe = np.zeros(len(prompts), int)
    live = list(range(len(prompts)))
    while live:
        best, confidence = (np.asarray(a) for a in predict(params, cfg, tokens, blocks))
        for i in list(live):
            nfe[i] += 1
            start = len(prompts[i])
            first = np.flatnonzero(tokens[i] == cfg.mask_id)[0]
            end = min(start + ((first - start) // block + 1) * block, start + gen_length)
            masked = np.flatnonzero(tokens[i, :end] == cfg.mask_id)
            order = masked[np.argsort(-confidence[i, masked], kind="stable")]
            count = quota if threshold is None else max(1, int((confidence[i, order] >= threshold).sum()))
            chosen = order[:count]
            tokens[i, chosen] = best[i, chosen]
            text = tokens[i, start:end]
            if not (text == cfg.mask_id).any() and ((text == cfg.eos_id).any() or end == start + gen_length):
                live.remove(i)
    return [
        Decoded(cut(tokens[i, len(prompt) : len(prompt) + gen_length].tolist(), cfg.eos_id), int(nfe[i]))
        for i, prompt in enumerate(prompts)
    ]


def cut(ids: list[int], eos: int) -> list[int]:
    """The ids before the first end-of-text."""
    return ids[: ids.index(eos)] if eos in ids else ids


@partial(jax.jit, static_argnames="cfg")
def predict(
    params: llada.Params, cfg: ModelConfig, tokens: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Candidate int32 [B, S] and its probability float32 [B, S] at every position; arguments int32 [B, S]."""
    logits = llada.logits(params, cfg, tokens, visible(blocks))
    return jnp.argmax(logits, axis=-1), jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
