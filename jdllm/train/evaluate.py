"""Held-out exact match of the shipped model, by decoder, answer length and threshold.

The base model is measured with LLaDA's sampler (jdllm.train.decode), the D2F model with the engine that serves it.
"""

import dataclasses
import json
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path

import jdllm.checkpoint
from jdllm.config import DecodeConfig, EngineConfig, ModelConfig
from jdllm.engine import Engine
from jdllm.models import llada
from jdllm.train import decode, tokenizer
from jdllm.train.decode import Decoded
from jdllm.train.tasks import Task, held_out

BUCKETS = (20, 40, 60, 80, 120)
"""Upper ends of the answer lengths, in tokens, that are told apart."""

SKIP_THRESHOLDS = (0.95, 0.9, 0.7, 0.5, 0.3, 0.1)
BLOCK_SIZE = 16
MAX_TOKENS = 128

DecodeAll = Callable[[Sequence[list[int]]], list[Decoded]]


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
    base_checkpoint, d2f_checkpoint = jdllm.checkpoint.load(base), jdllm.checkpoint.load(d2f)
    results: list[Result] = []

    def measure(decoder: str, decode_all: DecodeAll, by_length: bool) -> None:
        rows = score(tasks, decoder, decode_all, by_length)
        for row in rows:
            print(format_row(row), flush=True)
        results.extend(rows)

    def sampler(**settings: float | int | None) -> DecodeAll:
        return lambda prompts: llada_in_batches(base_checkpoint.params, base_checkpoint.config, prompts, **settings)

    print(HEADER)
    measure("base, threshold 0.9", sampler(), by_length=True)
    measure("base, 2 tokens a step", sampler(threshold=None, quota=2), by_length=False)
    engine = start_engine(d2f_checkpoint.params, d2f_checkpoint.config)
    default = DecodeConfig(max_tokens=MAX_TOKENS, block_size=BLOCK_SIZE)
    measure("d2f", partial(d2f_decode, engine, default), by_length=True)
    for skip in SKIP_THRESHOLDS:
        settings = dataclasses.replace(default, skip_threshold=skip)
        measure(f"d2f, skip {skip}", partial(d2f_decode, engine, settings), by_length=False)
    for size in (8, 32):
        settings = dataclasses.replace(default, block_size=size)
        measure(f"d2f, blocks of {size}", partial(d2f_decode, engine, settings), by_length=False)
    without = start_engine(base_checkpoint.params, base_checkpoint.config)
    measure("d2f without its adapter", partial(d2f_decode, without, default), by_length=False)
    return results


def score(tasks: Sequence[Task], decoder: str, decode_all: DecodeAll, by_length: bool) -> list[Result]:
    """Exact match over all answers and, if asked, over each range of lengths: all ids up to the end of turn."""
    text = tokenizer.build()
    prompts = [text.encode(tokenizer.prompt_text(task.message)).ids for task in tasks]
    answers = [text.encode(task.answer + tokenizer.EOT).ids for task in tasks]
    scored = [(len(a), d.ids == a, d.nfe) for a, d in zip(answers, decode_all(prompts), strict=True)]
    groups = {"all": scored}
    if by_length:
        for low, high in zip((0, *BUCKETS), BUCKETS, strict=False):
            groups[f"{low + 1}-{high} tokens"] = [s for s in scored if low < s[0] <= high]
    return [_result(decoder, name, group) for name, group in groups.items() if group]


def _result(decoder: str, answers: str, scored: Sequence[tuple[int, bool, int]]) -> Result:
    n = len(scored)
    tokens, exact, nfe = (sum(column) / n for column in zip(*scored, strict=True))
    return Result(decoder, answers, n, exact, tokens, nfe, max(s[2] for s in scored))


def llada_in_batches(
    params: llada.Params, cfg: ModelConfig, prompts: Sequence[list[int]], **settings: float | int | None
) -> list[Decoded]:
    """llada_decode on 25 prompts of similar length at a time."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out: dict[int, Decoded] = {}
    for start in range(0, len(order), 25):
        chosen = order[start : start + 25]
        decoded = decode.llada_decode(params, cfg, [prompts[i] for i in chosen], **settings)  # type: ignore[arg-type]
        out.update(zip(chosen, decoded, strict=True))
    return [out[i] for i in range(len(prompts))]


def start_engine(params: llada.Params, cfg: ModelConfig, max_rows: int = 1) -> Engine:
    """An engine for canvases of this task, compiled. Of one row, which compiles soonest; more give the same answers."""
    engine = Engine(params, cfg, EngineConfig(max_rows=max_rows, max_length=256))
    engine.compile()
    return engine


def d2f_decode(
    engine: Engine, settings: DecodeConfig, prompts: Sequence[list[int]], max_rows: int = 1
) -> list[Decoded]:
    """Run prompts through the engine's slots, each taking the next free one."""
    waiting = list(range(len(prompts)))[::-1]
    free = list(range(max_rows))
    out: dict[Hashable, Decoded] = {}
    while len(out) < len(prompts):
        while free and waiting:
            index = waiting.pop()
            engine.insert(free.pop(), index, prompts[index], settings)
        for row in engine.step():
            if not row.live:
                out[row.handle] = Decoded(row.ids, row.nfe)
                engine.evict(row.slot)
                free.append(row.slot)
    return [out[i] for i in range(len(prompts))]


HEADER = f"{'decoder':26}{'answers':16}{'n':>5}{'exact':>8}{'tokens':>8}{'NFE':>7}{'max':>5}{'tokens/NFE':>12}"


def format_row(row: Result) -> str:
    """A line of the table under HEADER."""
    return (
        f"{row.decoder:26}{row.answers:16}{row.count:5}{row.exact:8.1%}{row.tokens:8.1f}{row.nfe:7.1f}"
        f"{row.most_nfe:5}{row.tokens_per_step:12.1f}"
    )


def write_json(path: Path, results: Sequence[Result]) -> None:
    """The table as a list of objects."""
    rows = [dataclasses.asdict(row) | {"tokens_per_step": row.tokens_per_step} for row in results]
    path.write_text(json.dumps(rows, indent=2) + "\n")
