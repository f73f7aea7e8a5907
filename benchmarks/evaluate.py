"""python -m benchmarks.evaluate: how often a checkpoint is right, by decoder: the shipped model's held-out orders, or
problems in the form of GSM8K or HumanEval from a file.

    python -m benchmarks.evaluate
    python -m benchmarks.evaluate --form gsm8k --problems test.jsonl --model DIR --few-shot 4 --shots train.jsonl
    python -m benchmarks.evaluate --form humaneval --problems HumanEval.jsonl.gz --model DIR --prompt raw --run-code

D2F decodes ``--model``; other decoders decode ``--base``, the same model without its adapter, if it is given (of the
shipped model it always is). Settings are the checkpoint's own but for ``--set NAME=VALUE``. Prompt form, settings and
clean-up rule (benchmarks.evaluate_cleanup) stand in the output. Code that a model wrote is run only with ``--run-code``
(benchmarks.sandbox); without it HumanEval's answers are written to ``--json``, unjudged.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.evaluate_cleanup import RULES
from benchmarks.evaluate_problems import (
    FORMS,
    MEASURES,
    PROMPT_FORMS,
    STOP_TEXTS,
    Problem,
    prompt_ids,
    read_problems,
    shipped_problems,
)
from jdllm import runtime, tokenizer
from jdllm.config import MAX_LENGTH, ConfigError, DecodeConfig, ModelConfig, RequestError
from jdllm.decoders import TABLE, check, decode_config, slots_needed, threshold
from jdllm.generate import Line, canvas_length, run_lines
from jdllm.runtime import SHIPPED, UsageError
from jdllm.tokenizer import Tokenizer

DECODERS = tuple(dict.fromkeys(name for name, _ in TABLE))
PROGRESS_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer and what was said of it.

    Attributes:
        judged: measure -> right or not, and what was looked at (Problem.judge).
        tokens: of the answer, end of turn left out; nfe: forward passes.
    """

    id: str
    text: str
    tokens: int
    nfe: int
    finish_reason: str
    judged: dict[str, Any]


def decode_settings(
    decoder: str, given: dict[str, Any], model: ModelConfig, words: Tokenizer, meta: dict[str, Any], prompt_form: str
) -> DecodeConfig:
    """The checkpoint's defaults, what ``--set`` says, and the ids that end an answer."""
    decode = decode_config({"decoder": decoder, **given}, model.family, runtime.decode_defaults(meta))
    stop_ids = words.stop_ids if prompt_form == "chat" else None
    return dataclasses.replace(decode, stop_ids=stop_ids, eot_id=words.eot_id)


def make_lines(
    problems: Sequence[Problem],
    examples: Sequence[Problem],
    prompt_form: str,
    decode: DecodeConfig,
    model: ModelConfig,
    words: Tokenizer,
) -> list[Line]:
    """The requests.

    Raises:
        RequestError: a prompt and its answer do not fit, or the decoder cannot serve these settings.
    """
    lines = []
    for number, problem in enumerate(problems):
        line = Line(number, problem.id, prompt_ids(problem, examples, prompt_form, words), decode)
        room = min(model.max_sequence_length, MAX_LENGTH) - len(line.prompt_ids)
        if decode.max_tokens > room:
            raise RequestError("max_tokens", f"problem {problem.id} leaves room for {room}")
        check(decode, model, line.prompt_ids, min(model.max_sequence_length, MAX_LENGTH))
        lines.append(line)
    return lines


def run_decoder(
    folder: Path,
    decoder: str,
    problems: Sequence[Problem],
    examples: Sequence[Problem],
    prompt_form: str,
    given: dict[str, Any],
    rows: int,
    run_code: bool,
) -> tuple[DecodeConfig, ModelConfig, list[Answer]]:
    """All problems through one decoder; the settings that were used, the model's shape, and the answers in the
    problems' order."""
    from jdllm import checkpoint  # JAX comes in here, after runtime.configure
    from jdllm.config import EngineConfig
    from jdllm.denoise.window import Bucket
    from jdllm.engine import Engine

    try:
        loaded = checkpoint.load(folder, dtype=runtime.default_dtype(None))
    except checkpoint.CheckpointError as error:
        raise UsageError(f"--model: {error}") from None
    model, words = loaded.config, tokenizer.load(folder, loaded.config)
    if words is None:
        raise UsageError(f"--model: {folder} has no tokenizer")
    decode = decode_settings(decoder, given, model, words, loaded.meta, prompt_form)
    lines = make_lines(problems, examples, prompt_form, decode, model, words)
    rows = min(rows, sum(slots_needed(line.decode) for line in lines))
    config = EngineConfig(rows, canvas_length(lines, model))
    engine = Engine(loaded.params, model, config, unused_ids=words.unused_ids)
    # Few programs, which compile sooner; more would give the same answers.
    widest = engine.buckets[-1]
    sizes = {min(rows * width, widest.packed) for width in (2 * decode.block_size, 6 * decode.block_size)}
    engine.buckets = [Bucket(rows, size) for size in sorted(sizes - {widest.packed})] + [widest]
    engine.compile(lambda done, total, text: log(f"{decoder}: compiled {done} of {total}"))

    answers: dict[int, Answer] = {}
    begin = told = time.monotonic()
    for line in run_lines(engine, lines, words):
        assert line.result is not None
        if "error" in line.result:
            raise SystemExit(f"benchmarks.evaluate: problem {line.id}: {line.result['error']}")
        answers[line.number] = _answer(problems[line.number], line.result, prompt_form, run_code)
        if time.monotonic() - told > PROGRESS_SECONDS or len(answers) == len(lines):
            told = time.monotonic()
            right = " ".join(f"{name} {sum(a.judged[name] for a in answers.values())}" for name in _measures(answers))
            log(f"{decoder}: {len(answers)} of {len(lines)}, right: {right or 'not judged'}, {told - begin:.0f} s")
    return decode, model, [answers[number] for number in range(len(lines))]


def _answer(problem: Problem, result: dict[str, Any], prompt_form: str, run_code: bool) -> Answer:
    text = result["text"]
    stops = STOP_TEXTS[problem.form] if prompt_form == "raw" else ()
    cut = min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))
    judged = problem.judge(text[:cut], result["finish_reason"] == "stop", run_code)
    return Answer(problem.id, text, len(result["ids"]), result["nfe"], result["finish_reason"], judged)


def _measures(answers: dict[int, Answer]) -> list[str]:
    return [name for name in MEASURES if answers and name in next(iter(answers.values())).judged]


def summary(
    decoder: str, folder: Path, decode: DecodeConfig, model: ModelConfig, answers: Sequence[Answer]
) -> dict[str, Any]:
    """A row of results; shares of the answers, and means over them."""
    n = len(answers)
    mean = lambda pick: sum(pick(a) for a in answers) / n
    measures = _measures(dict(enumerate(answers)))
    cut = [a.judged["network_cut"] for a in answers if "network_cut" in a.judged]
    return {
        "decoder": decoder,
        "model": folder.name,
        "settings": dataclasses.asdict(decode),
        "threshold": threshold(decode, model),
        "count": n,
        **{name: mean(lambda a, name=name: bool(a.judged[name])) for name in measures},
        "tokens": mean(lambda a: a.tokens),
        "nfe": mean(lambda a: a.nfe),
        "truncated": mean(lambda a: a.finish_reason == "length"),
        "network_cut": all(cut) if cut else None,
        "answers": [dataclasses.asdict(answer) for answer in answers],
    }


def table(results: dict[str, Any]) -> str:
    """The rows as Markdown, and what they were asked and how they were judged."""
    names = [name for name in MEASURES if name in results["rows"][0]]
    rows = tables.markdown(
        ["decoder", "model", "n", *names, "tokens", "NFE", "truncated"],
        [
            [
                r["decoder"],
                r["model"],
                r["count"],
                *(f"{100 * r[name]:.1f} %" for name in names),
                f"{r['tokens']:.1f}",
                f"{r['nfe']:.1f}",
                f"{100 * r['truncated']:.1f} %",
            ]
            for r in results["rows"]
        ],
    )
    shown = [f"- {r['decoder']}: {_changed({**r['settings'], **_resolved(r)})}" for r in results["rows"]]
    asked = f"Prompt form {results['prompt_form']}, {results['few_shot']} examples. Right: {results['clean_up']}."
    if not names:
        asked += " Not judged: programs run only with --run-code."
    if any(r["network_cut"] is False for r in results["rows"]):
        asked += " Programs ran with network."
    note = f"commit {results['commit']}; `{results['command']}`"
    return "\n\n".join([rows, "\n".join(shown), asked, note])


def _resolved(row: dict[str, Any]) -> dict[str, Any]:
    """What a setting that was left open came to."""
    settings = row["settings"]
    if settings["decoder"] == "d2f":  # its threshold has another name
        return {}
    cache = settings["cache"] or ("prefix" if settings["decoder"] == "fast-dllm" else None)
    return {"threshold": row["threshold"], "cache": cache}


def _changed(settings: dict[str, Any]) -> str:
    """What decides how an answer is decoded, of the settings; the rest is in the JSON."""
    plain = dataclasses.asdict(DecodeConfig())
    shown = ["max_tokens", "block_size", "steps", "threshold", "factor", "cache", "temperature"]
    if settings["decoder"] == "d2f":
        shown += ["block_add_threshold", "decoded_token_threshold", "skip_threshold"]
    left_out = ("decoder", "stop_ids", "eot_id")
    others = [n for n, v in settings.items() if v != plain[n] and n not in (*left_out, *shown)]
    return ", ".join(f"{name} {settings[name]}" for name in shown + others if settings[name] is not None)


def _given(texts: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs; values are JSON, or else text."""
    known = {field.name for field in dataclasses.fields(DecodeConfig)} - {"decoder", "stop_ids", "eot_id", "adapter"}
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise UsageError(f"--set: {text!r} must be NAME=VALUE, with one of {', '.join(sorted(known))}")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    return given


def _problems(options: argparse.Namespace) -> tuple[list[Problem], list[Problem]]:
    """What is asked, and the examples. Examples out of the problems' own file are not asked."""
    few = options.few_shot
    if few < 0 or (options.n is not None and options.n < 1):
        raise UsageError("--few-shot must be at least 0, and --n at least 1")
    if options.problems is not None:
        found = read_problems(options.problems, options.form)
    elif options.form == "orders":
        found = shipped_problems((options.n or 240) + (0 if options.shots else few))
    else:
        raise UsageError(f"--form {options.form} needs --problems FILE")
    examples = read_problems(options.shots, options.form)[:few] if options.shots else found[:few]
    asked = found if options.shots else found[few:]
    if len(examples) < few or not asked:
        raise UsageError(f"--few-shot {few}: there are not so many problems")
    return asked[: options.n], examples


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command writes, its provenance left out."""
    asked, examples = _problems(options)
    given = _given(options.set)
    folder = runtime.model_folder(options.model)
    base = Path(options.base) if options.base else None if options.model else SHIPPED / "orders-base"
    rows = []
    for decoder in options.decoder:
        place = base if base is not None and decoder != "d2f" else folder
        decode, model, answers = run_decoder(
            place, decoder, asked, examples, options.prompt, given, options.max_rows, options.run_code
        )
        rows.append(summary(decoder, place, decode, model, answers))
    return {
        "form": options.form,
        "problems": str(options.problems) if options.problems else "held-out orders",
        "prompt_form": options.prompt,
        "few_shot": options.few_shot,
        "clean_up": RULES[options.form],
        "run_code": options.run_code,
        "rows": rows,
    }


def log(text: str) -> None:
    """Progress; standard output is for the table alone."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluate", description="accuracy on problems, by decoder"
    )
    add = parser.add_argument
    add("--form", choices=list(FORMS), default="orders")
    add("--problems", type=Path, help="JSON Lines, also .gz; default of orders: the shipped model's held-out messages")
    add("--model", help="folder of a converted checkpoint; default: the model that comes with jdllm")
    add("--base", help="the same model without its adapter, for decoders other than d2f")
    add("--decoder", nargs="+", choices=DECODERS, default=["d2f"])
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a decode setting, such as skip_threshold=0.8")
    add("--prompt", choices=PROMPT_FORMS, default="chat")
    add("--few-shot", type=int, default=0, metavar="K", help="examples in the prompt: the first K of --shots")
    add("--shots", type=Path, help="file of examples; default: the problems' own, which are then not asked")
    add("--n", type=int, help="problems asked; default: all of the file, or 240 held-out orders")
    add("--max-rows", type=int, default=16, help="decoded at once (default 16)")
    add("--run-code", action="store_true", help="run the programs that the model writes, with limits")
    add("--json", type=Path, help="write the results, every answer among them, to this file")
    options = parser.parse_args(arguments)
    try:
        if "jax" not in sys.modules:
            runtime.configure()
        results = evaluate(options)
    except (UsageError, ConfigError, RequestError) as error:
        raise SystemExit(f"benchmarks.evaluate: {error}") from None
    from benchmarks.machine import provenance

    results = {**provenance("benchmarks.evaluate"), **results}
    if options.json:
        tables.write(options.json, results)
    print(table(results))


if __name__ == "__main__":
    main()
