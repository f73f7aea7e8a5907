"""The shipped model: its shape, its two training stages, and their seeds."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from jdllm.config import ModelConfig
from jdllm.models import llada
from jdllm.train import batches, lora
from jdllm.train.initial import initial
from jdllm.train.objective import masked_cross_entropy
from jdllm.train.tokenizer import EOS, MASK, special_id
from jdllm.train.trainer import Schedule, fit

SEED = 0
BASE = Schedule(steps=18_000, peak=1.2e-3)
D2F = Schedule(steps=3000, peak=1e-3)
WARM_ROUNDS = 12


def model(tokenizer: Tokenizer) -> ModelConfig:
    """About 1.0 M parameters."""
    return ModelConfig(
        family="llada",
        vocab_size=tokenizer.get_vocab_size(),
        d_model=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=4,
        d_ff=384,
        max_sequence_length=512,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        mask_id=special_id(tokenizer, MASK),
        eos_id=special_id(tokenizer, EOS),
        pad_id=special_id(tokenizer, EOS),
    )


def train_base(tokenizer: Tokenizer, folder: Path, schedule: Schedule = BASE) -> llada.Params:
    """The masked-diffusion base model with full attention, from scratch or from the checkpoint in ``folder``."""
    cfg = model(tokenizer)

    def data(first: int) -> Iterator[list[batches.Batch]]:
        return batches.rounds(tokenizer, batches.base_row, SEED, first, WARM_ROUNDS)

    loss = lambda params, batch: masked_cross_entropy(params, cfg, **batch)
    return fit(loss, initial(cfg, SEED), data, schedule, folder)


def train_d2f(tokenizer: Tokenizer, base: llada.Params, folder: Path, schedule: Schedule = D2F) -> lora.Adapter:
    """The D2F adapter on a frozen base: block-causal attention, noise growing over the blocks, plain cross-entropy on
    the data (no teacher: at this size the data teach better)."""
    cfg = model(tokenizer)

    def data(first: int) -> Iterator[list[batches.Batch]]:
        return batches.rounds(tokenizer, batches.d2f_row, SEED + 1, first, 0)

    return fit(
        lambda adapter, batch: masked_cross_entropy(lora.merge(base, adapter), cfg, **batch),
        lora.init(cfg, SEED),
        data,
        schedule,
        folder,
    )
