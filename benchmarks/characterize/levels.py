"""Fig. 2, the levels: how many forward passes D2F makes for an answer of n blocks, on a model with random weights.

The paper (2608.23807) decodes with ``skip_threshold`` 1. No probability is above 1, so a fully activated block commits
one token a pass and any other none; a block is fully activated once its predecessor has ``s`` tokens, s being the
larger need of the two thresholds. Blocks therefore begin s passes apart and the last takes B:

    NFE(n) = s (n - 1) + B          s = max(ceil(block_add_threshold B), ceil(decoded_token_threshold B), 1)

whatever the weights are. The paper counts iterations of the official loop, the last of which finds nothing left to do
and makes no forward pass: its step counts are ours plus one, 29 (n - 1) + 33, that is 178 + 29 k for n = 6 + k.

Beside it the same at ``skip_threshold`` 0.9: with random weights no probability is above that either, so the levels
stay; with a head SURE times as large many are, and the counts leave the law.
"""

from typing import Any

from benchmarks import tables
from benchmarks.characterize.runs import Progress, run_batch
from benchmarks.step_law import law, stride
from jdllm.config import DecodeConfig, EngineConfig, ModelConfig
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.models import llada

PAPER: dict[str, Any] = {
    "block_add_threshold": 0.5,
    "decoded_token_threshold": 0.9,
    "skip_threshold": 1.0,
    "early_stop": False,
}
"""The paper's decode settings beside its block size (all existing blocks are decoded to their last mask)."""

BLOCK, MOST_BLOCKS, LOWER_SKIP, SURE = 32, 16, 0.9, 30.0

MODEL = ModelConfig(
    family="llada",
    vocab_size=160,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    d_ff=64,
    max_sequence_length=544,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    mask_id=155,
    eos_id=151,
    pad_id=151,
)
PROMPT = (1, 2, 3, 4, 5)


def paper_steps(nfe: int) -> int:
    """The paper's count: the iteration that ends the loop makes no forward pass and is counted."""
    return nfe + 1


def measure(progress: Progress, most: int = MOST_BLOCKS, seed: int = 0) -> dict[str, Any]:
    """Answers of 1 to ``most`` blocks, all in one batch: max_tokens is n blocks, and nothing stops them earlier."""
    engine = Engine(llada.init(MODEL, seed), MODEL, EngineConfig(most, len(PROMPT) + BLOCK * most))
    engine.buckets = _buckets(most)
    engine.compile()
    plain = engine.params
    weights = {"plain": plain, "sure": {**plain, "head": plain["head"] * SURE}}
    counts: dict[tuple[str, float], list[int]] = {}
    for name, params in weights.items():
        engine.params = params  # the programs take any weights of these shapes
        for skip in (1.0, LOWER_SKIP):
            progress(len(counts), 4, f"{name} weights, skip {skip}")
            counts[name, skip] = _count(engine, most, skip)
    progress(4, 4, "counted")
    decode = DecodeConfig(**PAPER, block_size=BLOCK)
    rows = [
        {
            "n": n,
            "tokens": BLOCK * n,
            "nfe": counts["plain", 1.0][n - 1],
            "law": law(n, decode),
            "paper_steps": paper_steps(counts["plain", 1.0][n - 1]),
            "paper_law": paper_steps(law(n, decode)),
            "nfe_sure": counts["sure", 1.0][n - 1],
            "nfe_lower_skip": counts["plain", LOWER_SKIP][n - 1],
            "nfe_sure_lower_skip": counts["sure", LOWER_SKIP][n - 1],
        }
        for n in range(1, most + 1)
    ]
    return {"block_size": BLOCK, **PAPER, "lower_skip": LOWER_SKIP, "stride": stride(decode), "rows": rows}


def _buckets(rows: int) -> list[Bucket]:
    """At skip 1 a window is one block or two. What is wider waits, which changes no count."""
    sizes = {(min(some, rows), blocks) for some, blocks in ((1, 2), (4, 2), (rows, 1), (rows, 2))}
    return sorted(Bucket(some, blocks * BLOCK * some) for some, blocks in sizes)


def _count(engine: Engine, most: int, skip: float) -> list[int]:
    """Forward passes of answers of 1 to ``most`` blocks, in one batch. The longest has the lowest slot, so that fewer
    rows are computed as the others end."""
    settings = {**PAPER, "skip_threshold": skip, "block_size": BLOCK, "stop_ids": ()}
    decodes = [DecodeConfig(**settings, max_tokens=BLOCK * n) for n in range(most, 0, -1)]
    answers = run_batch(engine, [PROMPT] * most, decodes).answers[::-1]
    assert [answer.blocks for answer in answers] == list(range(1, most + 1))
    return [answer.nfe for answer in answers]


def text(data: dict[str, Any]) -> str:
    """The counts as Markdown."""
    rows, lower = data["rows"], data["lower_skip"]
    header = ["blocks", "tokens", "NFE", "law", "paper's count", "its law", "NFE, large head"]
    header += [f"NFE, skip {lower}", f"NFE, large head, skip {lower}"]
    names = ("n", "tokens", "nfe", "law", "paper_steps", "paper_law", "nfe_sure", "nfe_lower_skip")
    cells = [[row[name] for name in (*names, "nfe_sure_lower_skip")] for row in rows]
    held = sum(row["nfe"] == row["nfe_sure"] == row["law"] for row in rows)
    note = (
        f"NFE(n) = {data['stride']} (n - 1) + {data['block_size']}; the paper counts one more, the iteration that ends "
        f"its loop. The law holds in {held} of {len(rows)} rows for both sets of weights."
    )
    return f"{tables.markdown(header, cells)}\n\n{note}"
