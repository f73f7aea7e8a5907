"""``--verify``: does the converted model compute what the source computes?

One prompt, float32 arithmetic at the highest matmul precision (an accelerator's default, TF32 or bfloat16 passes, would
differ by more than a conversion error). The PyTorch side reads the source's files and applies an adapter unmerged,
x W^T + scale (x A^T) B^T, so that merging is verified too. Where the result is rounded (a merge into bfloat16), the
PyTorch side is run once more with weights merged and rounded by itself: the bound applies to that run, and the first
one shows what the rounding costs.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.checkpoint import CheckpointError, load
from jdllm.convert.plan import Plan
from jdllm.models import llada

BOUND = 1e-3
"""Largest difference accepted, as a share of the largest logit: float32 sums in another order stay some ten times below
(golden checkpoints: 1e-5), a wrong scale, orientation or layout far above."""

LENGTH = 64


class VerifyError(ValueError):
    """The converted model does not compute what its source does."""


def verify(plan: Plan, folder: Path) -> str:
    """Compare the checkpoint in ``folder`` with the source that the plan was made from; one line of result.

    Raises:
        VerifyError: logits are not finite, or differ by more than BOUND.
    """
    cfg = plan.source.config
    tokens = prompt(cfg.vocab_size, cfg.mask_id, min(LENGTH, cfg.max_sequence_length))
    try:
        checkpoint = load(folder, dtype=jnp.float32)
    except CheckpointError as error:
        raise VerifyError(str(error)) from error
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(jax.jit(llada.logits, static_argnums=1)(checkpoint.params, cfg, tokens))
    if not np.isfinite(ours).all():
        raise VerifyError(f"{np.count_nonzero(~np.isfinite(ours))} of {ours.size} logits are not finite")
    what = f"{tokens.shape[1]} tokens, float32, highest matmul precision"
    if importlib.util.find_spec("torch") is None:
        return f"verified  logits are finite ({what}); torch is not installed, so they are compared with nothing"
    unmerged = _largest(ours, torch_logits(plan, tokens, rounded=False))
    judged = _largest(ours, torch_logits(plan, tokens, rounded=True)) if plan.rounds else unmerged
    bound = BOUND * float(np.abs(ours).max())
    text = f"largest difference of a logit from PyTorch {judged:.3g}, bound {bound:.3g} ({what})"
    if plan.rounds:
        text += f"; from the unrounded weights {unmerged:.3g}: the cost of {plan.dtype.name}"
    if not judged <= bound:
        raise VerifyError(text)
    return f"verified  {text}"


def prompt(vocab_size: int, mask_id: int, length: int) -> np.ndarray:
    """A prompt of fixed, evenly spread ids with masks behind it: int32 [1, length]."""
    tokens = (np.arange(length, dtype=np.int64) * 7919 + 13) % vocab_size
    tokens[length // 2 :] = mask_id
    return tokens[None].astype(np.int32)


def torch_logits(plan: Plan, tokens: np.ndarray, rounded: bool) -> np.ndarray:
    """Logits of the source in PyTorch, float32 [B, S, V].

    Args:
        rounded: merge the adapter and round to the result's dtype, instead of applying it beside the exact weights.
    """
    import torch

    from jdllm.convert import verify_torch

    weights = {weight.tensor: weight for weight in plan.source.weights}
    changes = plan.adapter.changes if plan.adapter else {}

    def values(name: str) -> torch.Tensor:
        value = torch.from_numpy(plan.source.tensors[name].read().astype(np.float32))
        module = weights[name].module
        change = changes.get(module) if name.endswith(".weight") else None
        if change is not None and (rounded or change.embedding):
            a, b = (torch.from_numpy(t.read().astype(np.float32)) for t in (change.a, change.b))
            value = value + change.scale * ((b @ a).T if change.embedding else b @ a)
        return value.to(getattr(torch, plan.dtype.name)).float() if rounded else value

    def linear(module: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ values(f"{module}.weight").T
        change = changes.get(module)
        if change is not None and not rounded:
            a, b = (torch.from_numpy(t.read().astype(np.float32)) for t in (change.a, change.b))
            out = out + change.scale * (x @ a.T) @ b.T
        return out + values(f"{module}.bias") if f"{module}.bias" in weights else out

    with torch.no_grad():
        return verify_torch.logits(plan.source.config, torch.from_numpy(tokens).long(), values, linear).numpy()


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())
