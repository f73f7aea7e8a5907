"""python -m jdllm.generate: decode a file of prompts, one JSON object a line in and one a line out, in input order.

A line has ``prompt``, ``prompt_ids`` or ``messages``, and any of ``id`` and DecodeConfig's fields. Without
``max_tokens`` it is the checkpoint's default, else DecodeConfig's, cut to the room behind the prompt. All lines share
the engine's slots. A bad line is reported with its number and the others still run; the exit code is then 1.
"""

import argparse
import codecs
import contextlib
import dataclasses
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from jdllm import runtime, tokenizer
from jdllm.batch import Asked, decode_all
from jdllm.config import MAX_LENGTH, ConfigError, DecodeConfig, ModelConfig, RequestError
from jdllm.decoders import canvas_needed, check, decode_config, slots_needed
from jdllm.runtime import NOT_FINITE, UsageError
from jdllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jdllm.engine import Engine, Row

PROMPT_FIELDS = ("prompt", "prompt_ids", "messages")
DECODE_FIELDS = tuple(
    f.name for f in dataclasses.fields(DecodeConfig) if f.name not in ("stop_ids", "eot_id", "adapter")
)
MULTIPLE = 64
"""Canvas lengths are multiples of it."""


@dataclasses.dataclass(eq=False)
class Line:
    """One input line and what became of it.

    Attributes:
        number: in the file, from 1.
        id: the line's own, else its number.
        result: the output object, when it is known.
    """

    number: int
    id: Any = None
    prompt_ids: list[int] = dataclasses.field(default_factory=list)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    result: dict[str, Any] | None = None

    def fail(self, message: str) -> None:
        """This line is bad; says so on stderr too."""
        print(f"line {self.number}: {message}", file=sys.stderr)
        self.result = {"id": self.id, "error": f"line {self.number}: {message}"}


def read_lines(
    source: Iterable[bytes],
    model: ModelConfig,
    words: Tokenizer | None,
    defaults: dict[str, Any],
    adapters: Sequence[str] = (),
    alone: dict[str, Any] | None = None,
) -> list[Line]:
    """All lines; the bad ones have already failed, and those that ask for no tokens have their result. Blank lines are
    skipped. ``alone``: defaults of lines without an adapter, where they differ."""
    lines = []
    for number, data in enumerate(source, 1):
        if number == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        if not data.strip():
            continue
        line = Line(number, id=number)
        try:
            _read_line(line, data, model, words, defaults, adapters, defaults if alone is None else alone)
        except RequestError as error:
            line.fail(str(error))
        lines.append(line)
    return lines


def _read_line(
    line: Line,
    data: bytes,
    model: ModelConfig,
    words: Tokenizer | None,
    defaults: dict[str, Any],
    adapters: Sequence[str],
    alone: dict[str, Any],
) -> None:
    fields = _fields(data)
    line.id = fields.pop("id", line.number)
    adapter = fields.pop("adapter", None)
    if adapter is not None and adapter not in adapters:
        raise RequestError("adapter", f"{adapter!r} is not there (--adapter); known: {', '.join(adapters) or 'none'}")
    if unknown := sorted(set(fields) - {*PROMPT_FIELDS, *DECODE_FIELDS}):
        raise RequestError(
            unknown[0], f"is not known; known are {', '.join((*PROMPT_FIELDS, 'id', 'adapter', *DECODE_FIELDS))}"
        )
    given = [name for name in PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        raise RequestError("prompt", f"give exactly one of {', '.join(PROMPT_FIELDS)}")
    settings = {name: fields[name] for name in DECODE_FIELDS if name in fields}
    line.prompt_ids = _prompt_ids(given[0], fields[given[0]], model, words)
    length = len(line.prompt_ids)
    room = min(model.max_sequence_length, MAX_LENGTH) - length
    if "max_tokens" not in fields:
        if room < 1:
            raise RequestError(
                given[0], f"has {length} tokens, which leaves no room for an answer in the model's {room + length}"
            )
        settings["max_tokens"] = min(runtime.default_max_tokens(defaults), room)
    line.decode = decode_config(settings, model.family, alone if adapter is None else defaults)
    number = 0 if adapter is None else 1 + list(adapters).index(adapter)
    line.decode = dataclasses.replace(line.decode, eot_id=words.eot_id if words else None, adapter=number)
    if line.decode.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"the prompt has {length} tokens, and {line.decode.max_tokens} more do not fit into the model's "
            f"{room + length}",
        )
    # Raw prompts, and chats that ask for the reference's behaviour, end at the model's end of text alone.
    if given[0] == "messages" and words is not None and line.decode.early_stop:
        line.decode = dataclasses.replace(line.decode, stop_ids=words.stop_ids)
    if line.decode.max_tokens == 0 and not (line.decode.infill and model.mask_id in line.prompt_ids):
        line.result = _result(line, [], [], 0, "length", words)
    else:
        check(line.decode, model, line.prompt_ids, min(model.max_sequence_length, MAX_LENGTH))


def _fields(data: bytes) -> dict[str, Any]:
    """The fields of a line that are not null."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError("line", f"is not valid UTF-8: {error.reason} at byte {error.start + 1}") from None
    try:
        fields = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise RequestError("line", f"is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("line", "must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _prompt_ids(kind: str, value: Any, model: ModelConfig, words: Tokenizer | None) -> list[int]:
    if kind == "prompt_ids":
        ids = value
    elif words is None:
        raise RequestError(kind, "the checkpoint has no tokenizer; give prompt_ids")
    elif kind == "messages":
        ids = words.encode_chat(value)
    else:
        if not isinstance(value, str):
            raise RequestError(kind, "must be a string")
        ids = words.encode(value)
    return tokenizer.check_prompt(ids, model, kind)


def run_lines(engine: "Engine", lines: Sequence[Line], words: Tokenizer | None) -> Iterator[Line]:
    """Decode every line that has no result yet; yields each as it ends."""
    asked = [Asked(line, line.prompt_ids, line.decode) for line in lines if line.result is None]
    for line, row in decode_all(engine, asked):
        assert isinstance(line, Line)
        yield _finished(line, row, words)


def _finished(line: Line, row: "Row | RequestError", words: Tokenizer | None) -> Line:
    if isinstance(row, RequestError):
        line.fail(str(row))
        return line
    if row.failed:
        line.fail(NOT_FINITE)
        return line
    line.result = _result(line, row.ids, row.canvas_ids, row.nfe, row.finish_reason or "length", words)
    if line.decode.infill:
        filled = row.tokens[: row.prompt_length].tolist()
        line.result |= {"prompt_ids": filled, "prompt_text": None if words is None else words.decode(filled)}
    return line


def _result(
    line: Line, ids: list[int], canvas: list[int], nfe: int, reason: str, words: Tokenizer | None
) -> dict[str, Any]:
    text = None if words is None else words.decode(ids)
    return {"id": line.id, "ids": ids, "canvas_ids": canvas, "text": text, "nfe": nfe, "finish_reason": reason}


def canvas_length(lines: Sequence[Line], model: ModelConfig) -> int:
    """The canvas that the longest line needs: a multiple of MULTIPLE, at most the model's length."""
    longest = max(canvas_needed(line.prompt_ids, line.decode, model) for line in lines)
    return min(-(-longest // MULTIPLE) * MULTIPLE, model.max_sequence_length, MAX_LENGTH)


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code: 0, 1 if a line was bad, 2 if nothing could run."""
    args = _parser().parse_args(argv)
    try:
        for name in ("max_rows", "steps_per_dispatch"):
            if getattr(args, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')}: {getattr(args, name)} must be at least 1")
        folder = runtime.model_folder(args.model)
        with contextlib.ExitStack() as files:
            source = _open_input(files, args.input)
            sink = _open_output(files, args.output, source)
            adapters = runtime.adapter_folders(args.adapter)
            runtime.configure(args.memory_fraction, args.compile_cache)
            return _generate(args, folder, adapters, source, sink)
    except (UsageError, ConfigError) as error:
        print(f"jdllm.generate: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output has left; what is still buffered for it goes nowhere instead of into a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _generate(
    args: argparse.Namespace, folder: Path, adapters: Mapping[str, Path], source: BinaryIO, sink: TextIO
) -> int:
    from jdllm import checkpoint  # JAX comes in here, after runtime.configure
    from jdllm.config import EngineConfig
    from jdllm.convert.adapter import read_adapters
    from jdllm.engine import Engine

    try:
        loaded = checkpoint.load(folder, dtype=runtime.default_dtype(args.dtype))
    except checkpoint.CheckpointError as error:
        raise UsageError(f"--model: {error}") from None
    for warning in runtime.checkpoint_warnings(loaded.meta):
        print(f"warning: {warning}", file=sys.stderr)
    words = tokenizer.load(folder, loaded.config)
    beside = read_adapters(adapters, loaded.config)
    defaults = runtime.decode_defaults(loaded.meta)
    alone = runtime.defaults_beside_adapters(loaded.meta, defaults) if adapters else defaults
    lines = read_lines(source, loaded.config, words, defaults, tuple(adapters), alone)
    if sink is not sys.stdout and _is_file(sink):
        sink.truncate(0)
    good = [line for line in lines if line.result is None]
    if good:
        rows = min(args.max_rows, sum(slots_needed(line.decode) for line in good))
        config = EngineConfig(rows, canvas_length(good, loaded.config), args.steps_per_dispatch)
        engine = Engine(loaded.params, loaded.config, config, beside, words.unused_ids if words else ())
        engine.compile(lambda done, total, text: _progress(f"compiled {done} of {total}: {text}"))
        begin = time.monotonic()
        written = 0
        for done, _ in enumerate(run_lines(engine, good, words), 1):
            written = _write(sink, lines, written)
            _progress(f"{done} of {len(good)} lines, {time.monotonic() - begin:.1f} s", last=done == len(good))
    else:
        written = 0
    _write(sink, lines, written)
    return int(any("error" in (line.result or {}) for line in lines))


def _write(sink: TextIO, lines: Sequence[Line], written: int) -> int:
    """Write what is known and whose turn it is; returns how many lines are written now."""
    while written < len(lines) and (result := lines[written].result) is not None:
        sink.write(json.dumps(result) + "\n")  # ASCII: an id may hold half of a surrogate pair
        written += 1
    sink.flush()
    return written


def _progress(text: str, last: bool = False) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last or text.startswith("compiled"):
        print(text, file=sys.stderr, flush=True)


def _open_input(files: contextlib.ExitStack, path: str) -> BinaryIO:
    if path == "-":
        return sys.stdin.buffer
    try:
        return files.enter_context(open(Path(path).expanduser(), "rb"))
    except OSError as error:
        raise UsageError(f"--input: cannot open {path}: {error.strerror}") from None


def _open_output(files: contextlib.ExitStack, path: str, source: BinaryIO) -> TextIO:
    """Opened before anything slow begins, so that mistakes show at once. What a file holds stays until there is
    something to write."""
    if path == "-":
        return sys.stdout
    try:
        sink = open(  # noqa: SIM115 (the stack closes it)
            Path(path).expanduser(),
            "w",
            encoding="utf-8",
            opener=lambda p, flags: os.open(p, flags & ~os.O_TRUNC, 0o666),
        )
    except OSError as error:
        raise UsageError(f"--output: cannot open {path}: {error.strerror}") from None
    files.enter_context(sink)
    if _is_file(sink) and os.path.sameopenfile(source.fileno(), sink.fileno()):
        raise UsageError(f"--output: {path} is the input itself")
    return sink


def _is_file(sink: TextIO) -> bool:
    """Not a terminal, a pipe or a device."""
    return stat.S_ISREG(os.fstat(sink.fileno()).st_mode)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jdllm.generate",
        description="Decode a file of prompts, one JSON object a line: prompt, prompt_ids or messages, and any of id, "
        f"{', '.join(DECODE_FIELDS)}. max_tokens defaults to the checkpoint's recommendation, else "
        f"{DecodeConfig.max_tokens}, cut to the room behind the prompt.",
    )
    add = parser.add_argument
    add("--model", help="folder of a converted checkpoint; default: the model that comes with jdllm")
    add("--input", default="-", help="JSON lines; - is standard input (default)")
    add("--output", default="-", help="JSON lines; - is standard output (default); not the input itself")
    add("--adapter", action="append", default=[], metavar="NAME=DIR", help="LoRA beside the weights (a line's adapter)")
    add("--max-rows", type=int, default=16, help="lines decoded at once (default 16)")
    add("--steps-per-dispatch", type=int, default=1, help="denoising steps a device call (default 1)")
    add("--dtype", choices=runtime.DTYPES, help="default: float32 on a CPU, bfloat16 elsewhere")
    add("--memory-fraction", type=float, help="share of the accelerator's memory to take")
    add("--compile-cache", help=f"folder of compiled programs, '' for none (default {runtime.default_cache()})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
