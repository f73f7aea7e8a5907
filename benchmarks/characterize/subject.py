"""The model that is characterized: its weights, its problems, and engines of few programs."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.characterize.levels import PAPER
from benchmarks.characterize.runs import Answer
from benchmarks.evaluate_problems import Problem, prompt_ids, read_problems, shipped_problems
from jdllm import checkpoint, runtime, tokenizer
from jdllm.config import DecodeConfig, EngineConfig, ModelConfig, RequestError
from jdllm.decoders import decode_config
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.models import llada
from jdllm.runtime import UsageError
from jdllm.tokenizer import Tokenizer

MULTIPLE = 32
"""Canvas lengths are multiples of it."""

MEASURES = {"orders": "exact", "gsm8k": "flexible"}
"""Form of problem -> what its answers are judged by (benchmarks.evaluate_problems). HumanEval's are not: code would
have to be run."""

WINDOWS = (2, 4)
"""Usual windows of a D2F row, in blocks. Compiled are that of one row, the doubles of it up to that of all rows, and
whole canvases: a batch of which rows have ended must not cost what a full one does."""


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model and what it is asked.

    Attributes:
        name, base_name: checkpoint folders; the second holds the model without its D2F adapter, for other decoders.
        params, base_params: their weights.
        prompts: of each problem, ready for the answer: a chat, of HumanEval the bare code.
        defaults: decode settings that the checkpoint recommends, with what the command line says instead.
        length: canvas positions, enough for every problem and max_tokens.
    """

    name: str
    base_name: str
    model: ModelConfig
    params: llada.Params
    base_params: llada.Params
    words: Tokenizer
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    defaults: Mapping[str, Any]
    length: int

    def d2f(self, **settings: Any) -> DecodeConfig:
        """D2F at the paper's settings but for those given."""
        return decode_config({**PAPER, **settings}, self.model.family, self.defaults)

    def other(self, decoder: str) -> DecodeConfig:
        """Another decoder at its own defaults, to the end of the canvas as the official code decodes."""
        return decode_config({"decoder": decoder, "early_stop": False}, self.model.family, self.defaults)

    def engine(self, rows: int, steps: int = 1) -> Engine:
        """A compiled engine for D2F, the same one for the same ``rows`` and ``steps`` a dispatch."""
        return self._engine(rows, steps)

    @functools.cache  # noqa: B019 (one subject lives as long as the command)
    def _engine(self, rows: int, steps: int) -> Engine:
        least, most = (blocks * self.d2f().block_size for blocks in WINDOWS)
        sizes = [least]
        while sizes[-1] < rows * most:
            sizes.append(2 * sizes[-1])
        return self._compiled(self.params, rows, [*sizes, rows * self.length], steps)

    @functools.cache  # noqa: B019
    def base_engine(self, rows: int) -> Engine:
        """The same for decoders that compute whole canvases."""
        return self._compiled(self.base_params, rows, (rows * self.length // 4, rows * self.length), 1)

    def _compiled(self, params: llada.Params, rows: int, sizes: Sequence[int], steps: int) -> Engine:
        config = EngineConfig(rows, self.length, steps)
        engine = Engine(params, self.model, config, (), self.words.unused_ids)
        most = max(config.max_packed, self.length)
        engine.buckets = [Bucket(rows, n, steps) for n in sorted({min(size, most) for size in sizes})]
        engine.compile()
        return engine

    def right(self, answers: Sequence[Answer]) -> list[bool | None]:
        """Whether each problem's answer is right; None where that is not judged."""
        return [self._right(problem, answer) for problem, answer in zip(self.problems, answers, strict=True)]

    def _right(self, problem: Problem, answer: Answer) -> bool | None:
        judged = problem.judge(self.words.decode(answer.ids), ended=not answer.truncated, run_code=False)
        return judged[MEASURES[problem.form]] if problem.form in MEASURES else None

    def accuracy(self, answers: Sequence[Answer]) -> float | None:
        """Share of right answers; None where they are not judged."""
        judged = [right for right in self.right(answers) if right is not None]
        return sum(judged) / len(judged) if judged else None


def open_subject(options: argparse.Namespace, log: Callable[[str], None]) -> Subject:
    """Load what the command line names.

    Raises:
        UsageError: naming the flag at fault.
    """
    folder = runtime.model_folder(options.model)
    shipped_base = runtime.SHIPPED / "orders-base"
    base = shipped_base if options.model is None else folder
    if options.base is not None:
        base = _folder("--base", options.base)
    log(f"loading {folder}")
    dtype = runtime.default_dtype(options.dtype)
    loaded = _load("--model", folder, dtype)
    base_loaded = loaded if base == folder else _load("--base", base, dtype)
    if base_loaded.config != loaded.config:
        raise UsageError(f"--base: {base} is a model of another shape than {folder}")
    words = tokenizer.load(folder, loaded.config)
    if words is None:
        raise UsageError(f"--model: {folder} has no tokenizer (tokenizer.json)")
    shipped = options.problems is None
    problems = shipped_problems(options.n) if shipped else read_problems(options.problems, options.form)[: options.n]
    try:
        prompts = [prompt_ids(p, (), "raw" if p.form == "humaneval" else "chat", words) for p in problems]
    except RequestError as error:
        raise UsageError(f"--problems: {error}") from None
    given = {name: getattr(options, name) for name in ("max_tokens", "block_size") if getattr(options, name)}
    defaults = {**runtime.decode_defaults(loaded.meta), **given}
    return Subject(
        name=folder.name,
        base_name=base.name,
        model=loaded.config,
        params=loaded.params,
        base_params=base_loaded.params,
        words=words,
        problems=problems,
        prompts=prompts,
        defaults=defaults,
        length=_canvas(prompts, defaults, loaded.config),
    )


def _folder(flag: str, path: str) -> Path:
    try:
        return runtime.model_folder(path)
    except UsageError as error:
        raise UsageError(str(error).replace("--model", flag)) from None


def _load(flag: str, folder: Path, dtype: str) -> checkpoint.Checkpoint:
    try:
        return checkpoint.load(folder, dtype=dtype)
    except checkpoint.CheckpointError as error:
        raise UsageError(f"{flag}: {error}") from None


def _canvas(prompts: Sequence[Sequence[int]], defaults: Mapping[str, Any], model: ModelConfig) -> int:
    """Positions for the longest prompt and its answer."""
    try:
        decode = decode_config(PAPER, model.family, defaults)
    except RequestError as error:
        raise UsageError(f"--{error.field.replace('_', '-')}: {error}") from None
    if decode.max_tokens % decode.block_size:
        raise UsageError(f"--max-tokens: {decode.max_tokens} must be whole blocks of {decode.block_size}")
    longest = max(map(len, prompts))
    if longest + decode.max_tokens > model.max_sequence_length:
        raise UsageError(
            f"--max-tokens: {decode.max_tokens} behind the longest prompt of {longest} tokens is more than the model's "
            f"{model.max_sequence_length}"
        )
    return min(-(-(longest + decode.max_tokens) // MULTIPLE) * MULTIPLE, model.max_sequence_length)
