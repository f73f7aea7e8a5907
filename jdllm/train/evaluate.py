"""Held-out exact match of the shipped model, by decoder, answer length and threshold, with the serving engine."""

import dataclasses
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import jdllm.checkpoint
from jdllm.batch import Asked, decode_all
from jdllm.config import DecodeConfig, EngineConfig, ModelConfig, RequestError
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.models import llada
from jdllm.train import tokenizer
from jdllm.train.tasks import Task, held_out

BUCKETS = (20, 40, 60, 80, 120)
"""Upper ends of the answer lengths, in tokens, that are told apart."""

BLOCK_SIZE = 8
MAX_TOKENS = 128
DEFAULTS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "block_size": BLOCK_SIZE}
ROWS, LENGTH = 16, 256

BASE: dict[str, dict[str, Any]] = {
    "base, fast-dllm": {"decoder": "fast-dllm"},
    "base, fast-dllm, dual cache": {"decoder": "fast-dllm", "cache": "dual"},
    "base, fast-dllm, no cache": {"decoder": "fast-dllm", "cache": "none"},
    "base, fast-dllm, factor 1": {"decoder": "fast-dllm", "factor": 1.0},
    "base, llada": {"decoder": "llada"},
    "base, llada, 2 tokens a step": {"decoder": "llada", "steps": MAX_TOKENS // 2},
    "base, d2f (no adapter)": {},
}
"""Decoders of the model alone -> their settings beside DEFAULTS."""

ADAPTED: dict[str, dict[str, Any]] = {
    "d2f": {},
    **{f"d2f, skip {skip}": {"skip_threshold": skip} for skip in (0.95, 0.9, 0.7, 0.5, 0.3, 0.1)},
    **{f"d2f, blocks of {size}": {"block_size": size} for size in (4, 16, 32)},
}
"""Decoders of the model with its D2F adapter."""

BY_LENGTH = ("base, fast-dllm", "d2f")
"""The decoders whose results are shown by the length of the answer, too."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """``ids``: the answer up to end-of-text, without it. ``nfe``: forward passes until it was settled."""

    ids: list[int]
    nfe: int


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the table. ``tokens``: mean answer length, end of turn included; ``nfe``: mean forward passes."""

    decoder: str
    answers: str
    count: int
    exact: float
    tokens: float
    nfe: float
    most_nfe: int

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.nfe


def evaluate(base: Path, d2f: Path, count: int, split: str) -> list[Result]:
    """Every decoder on ``count`` held-out orders. ``base`` and ``d2f``: converted checkpoints."""
    tasks = held_out(split, count)
    results: list[Result] = []
    print(HEADER)
    for folder, decoders in ((base, BASE), (d2f, ADAPTED)):
        checkpoint = jdllm.checkpoint.load(folder)
        engine = start_engine(checkpoint.params, checkpoint.config)
        for name, settings in decoders.items():
            decoded = decode(engine, DecodeConfig(**{**DEFAULTS, **settings}), tasks)
            rows = score(tasks, name, decoded, by_length=name in BY_LENGTH)
            for row in rows:
                print(format_row(row), flush=True)
            results += rows
    return results


def score(tasks: Sequence[Task], decoder: str, decoded: Sequence[Decoded], by_length: bool) -> list[Result]:
    """Exact match over all answers and, if asked, over each range of lengths: all ids up to the end of turn."""
    text = tokenizer.build()
    answers = [text.encode(task.answer + tokenizer.EOT).ids for task in tasks]
    scored = [(len(a), d.ids == a, d.nfe) for a, d in zip(answers, decoded, strict=True)]
    groups = {"all": scored}
    if by_length:
        for low, high in zip((0, *BUCKETS), BUCKETS, strict=False):
            groups[f"{low + 1}-{high} tokens"] = [s for s in scored if low < s[0] <= high]
    return [_result(decoder, name, group) for name, group in groups.items() if group]


def _result(decoder: str, answers: str, scored: Sequence[tuple[int, bool, int]]) -> Result:
    n = len(scored)
    tokens, exact, nfe = (sum(column) / n for column in zip(*scored, strict=True))
    return Result(decoder, answers, n, exact, tokens, nfe, max(s[2] for s in scored))


def start_engine(params: llada.Params, cfg: ModelConfig, rows: int = ROWS) -> Engine:
    """An engine for canvases of this task, of few programs, which compile sooner; more would give the same answers."""
    engine = Engine(params, cfg, EngineConfig(max_rows=rows, max_length=LENGTH))
    engine.buckets = [Bucket(rows, packed) for packed in (16 * rows, 48 * rows, LENGTH * rows)]
    engine.compile()
    return engine


def decode(engine: Engine, settings: DecodeConfig, tasks: Sequence[Task]) -> list[Decoded]:
    """Run the messages through the engine's slots, each taking the next free one."""
    text = tokenizer.build()
    asked = [Asked(i, text.encode(tokenizer.prompt_text(task.message)).ids, settings) for i, task in enumerate(tasks)]
    out: dict[Hashable, Decoded] = {}
    for handle, row in decode_all(engine, asked):
        if isinstance(row, RequestError):
            raise row
        out[handle] = Decoded(row.ids, row.nfe)
    return [out[i] for i in range(len(tasks))]


HEADER = f"{'decoder':30}{'answers':16}{'n':>5}{'exact':>8}{'tokens':>8}{'NFE':>7}{'max':>5}{'tokens/NFE':>12}"


def format_row(row: Result) -> str:
    """A line of the table under HEADER."""
    return (
        f"{row.decoder:30}{row.answers:16}{row.count:5}{row.exact:8.1%}{row.tokens:8.1f}{row.nfe:7.1f}"
        f"{row.most_nfe:5}{row.tokens_per_step:12.1f}"
    )


def write_json(path: Path, results: Sequence[Result]) -> None:
    """The table as a list of objects."""
    rows = [dataclasses.asdict(row) | {"tokens_per_step": row.tokens_per_step} for row in results]
    path.write_text(json.dumps(rows, indent=2) + "\n")
