"""python -m jdllm.generate: lines in, lines out, in order; bad ones named, the others run."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jdllm.config import DecodeConfig, RequestError, model_config
from jdllm.engine import Row
from jdllm.generate import Line, _write, canvas_length, read_lines, run_lines
from jdllm.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "data" / "golden"
EOS, EOT = 361, 373


@pytest.fixture(scope="module")
def model():
    return model_config(json.loads((GOLDEN / "llada-tiny" / "config.json").read_text()))


@pytest.fixture(scope="module")
def words(model):
    return Tokenizer(GOLDEN / "llada-tiny", model)


def read(model, words, *lines, **defaults) -> list[Line]:
    data = [line if isinstance(line, bytes) else as_text(line).encode() for line in lines]
    return read_lines(io.BytesIO(b"\n".join(data)), model, words, defaults)


def as_text(line) -> str:
    return line if isinstance(line, str) else json.dumps(line)


def test_prompts_of_all_kinds(model, words):
    lines = read(
        model,
        words,
        {"id": "a", "prompt": "Hi", "max_tokens": 8, "block_size": None},
        "",
        {"prompt_ids": [72, 73], "block_size": 4, "temperature": 0, "seed": 7, "early_stop": False},
        {"messages": [{"role": "user", "content": "Hi"}], "id": None},
        block_size=16,
    )
    assert [line.result for line in lines] == [None] * 3
    assert [line.id for line in lines] == ["a", 3, 4]
    assert [line.prompt_ids for line in lines] == [
        words.encode("Hi"),
        [72, 73],
        words.encode_chat([{"role": "user", "content": "Hi"}]),
    ]
    assert [line.decode.block_size for line in lines] == [16, 4, 16]
    assert lines[1].decode.seed == 7 and lines[1].decode.early_stop is False
    assert [line.decode.stop_ids for line in lines] == [None, None, (EOS, EOT)]


@pytest.mark.parametrize(
    "line, needle",
    [
        ("{bad", "JSON"),
        ("[1]", "object"),
        ("[" * 100_000, "JSON"),
        ({"prompt": "a", "bloc_size": 4}, "bloc_size"),
        ({"prompt": "a", "stop_ids": [1]}, "stop_ids"),
        ({"prompt": "a", "block_size": 0}, "block_size"),
        ({"prompt": "a", "block_size": "4"}, "block_size"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "confidence": "vibes"}, "confidence"),
        ({"prompt": "a", "skip_threshold": float("nan")}, "NaN"),
        ({"prompt": "a", "id": float("nan")}, "NaN"),
        ({"prompt": "a", "id": [float("-inf")]}, "-Infinity"),
        ('{"prompt": "a", "id": 1e999}', "1e999"),
        ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "temperature"),
        ('{"prompt": "a", "id": 1' + "0" * 5000 + "}", "JSON"),
        ({"prompt": "a", "\ud800": 1}, "is not known"),
        ({"prompt": "\ud800"}, "surrogate"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "BOM"),  # only a file begins with one
        ({"prompt_ids": [1] * 256}, "no room"),
        ({"prompt_ids": [1] * 300}, "no room"),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one"),
        ({"max_tokens": 5}, "exactly one"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 5}, "prompt"),
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [1.5]}, "prompt_ids"),
        ({"prompt_ids": [384]}, "383"),
        ({"prompt_ids": [-1]}, "-1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"prompt_ids": [1] * 200, "max_tokens": 57}, "256"),
    ],
)
def test_bad_lines_are_named_and_the_others_run(model, words, capfd, line, needle):
    lines = read(model, words, {"prompt": "a"}, line, {"prompt": "b"})
    assert [line.result is None for line in lines] == [True, False, True]
    assert lines[1].result["error"].startswith("line 2: ") and needle in lines[1].result["error"]
    assert json.loads(written(lines[1])) == lines[1].result
    assert lines[1].result["error"].encode(errors="replace").decode() in capfd.readouterr().err


def written(line: Line) -> bytes:
    """The bytes of its output; anything but strict JSON in strict UTF-8 is an error."""
    sink = io.TextIOWrapper(io.BytesIO(), "utf-8")
    _write(sink, [line], 0)
    sink.seek(0)
    data = sink.buffer.read()
    json.loads(data, parse_constant=lambda name: pytest.fail(name))
    return data


@pytest.mark.parametrize("name", ["\ud800", "é🐢", [1, {"a": None}], 7, 2.5, True, 10**30, ""])
def test_any_id_comes_back(model, words, name):
    [line] = read(model, words, {"prompt_ids": [5], "max_tokens": 2, "id": name})
    list(run_lines(OneStep([7], 1), [line], words))
    assert json.loads(written(line))["id"] == name


def test_an_id_of_any_depth_is_written_or_refused(model, words):
    for depth in range(900, 1000):
        [line] = read(model, words, '{"prompt_ids": [5], "max_tokens": 0, "id": ' + "[" * depth + "]" * depth + "}")
        _write(io.StringIO(), [line], 0)
    assert "JSON" in line.result["error"]


def test_a_byte_order_mark_begins_a_file(model, words):
    lines = read(model, words, b'\xef\xbb\xbf{"prompt": "a"}\r', b"\r", {"prompt": "b"})
    assert [line.result for line in lines] == [None, None] and [line.id for line in lines] == [1, 3]
    assert read(model, words, b"\xef\xbb\xbf", {"prompt": "b"})[0].id == 2


def test_without_a_tokenizer_ids_work_and_text_is_null(model):
    lines = read(model, None, {"prompt_ids": [5], "max_tokens": 2}, {"prompt": "Hi"})
    assert "no tokenizer" in lines[1].result["error"]
    list(run_lines(OneStep([7, 8], 2), lines[:1], None))
    assert lines[0].result == {
        "id": 1, "ids": [7, 8], "canvas_ids": [7, 8], "text": None, "nfe": 1, "finish_reason": "length"
    }  # fmt: skip


class OneStep:
    """An engine that ends every row in one step, the later slots first, with this answer; prompts of 15 fail."""

    def __init__(self, answer, slots=2):
        self.answer, self.rows, self.most = answer, {}, 0
        self.slots, self.called = slots, False

    def insert(self, slot, handle, prompt_ids, decode, shadow=None):
        if prompt_ids == [13]:
            raise RequestError("prompt", "is unlucky")
        assert slot not in self.rows
        self.rows[slot] = (handle, prompt_ids, decode)
        self.most = max(self.most, len(self.rows))

    def evict(self, slot):
        del self.rows[slot]

    @property
    def free_slots(self):
        return [slot for slot in range(self.slots) if slot not in self.rows]

    def dispatch(self):
        self.called = bool(self.rows)

    def read(self):
        if not self.called:
            return []
        slot = max(self.rows)
        handle, prompt, decode = self.rows[slot]
        canvas = [*self.answer, *[EOS] * decode.max_tokens][: decode.max_tokens]
        length = len(prompt) + len(canvas)
        stop = len(prompt) + canvas.index(EOS) if EOS in canvas else -1
        tokens = np.array([*prompt, *canvas], np.int32)
        failed = prompt == [15]
        row = dict(prompt_length=len(prompt), length=length, prefix=length, stop=stop, nfe=1, width=0, tokens=tokens)
        return [Row(slot=slot, handle=handle, live=False, failed=failed, **row)]


def test_all_lines_share_the_slots_and_keep_their_answers(model, words):  # A11
    lines = read(model, words, *[{"prompt_ids": [i + 1] * (i % 5 + 1), "max_tokens": 4} for i in range(20)])
    engine = OneStep([72, 73], 3)
    ended = list(run_lines(engine, lines, words))
    assert engine.most == 3 and len(ended) == 20 and not engine.rows
    assert lines[4].result["ids"] == [72, 73] and lines[4].result["canvas_ids"] == [72, 73, EOS, EOS]
    assert lines[4].result["text"] == words.decode([72, 73]) and lines[4].result["finish_reason"] == "stop"
    assert "unlucky" in lines[12].result.get("error", "unlucky")


def test_what_the_engine_refuses_is_a_bad_line(model, words):
    lines = read(model, words, {"prompt_ids": [12]}, {"prompt_ids": [13]}, {"prompt_ids": [14]})
    list(run_lines(OneStep([72], 1), lines, words))
    assert ["error" in line.result for line in lines] == [False, True, False]


def test_a_row_that_failed_is_a_bad_line(model, words, capsys):
    lines = read(model, words, {"prompt_ids": [12]}, {"prompt_ids": [15], "id": "x"}, {"prompt_ids": [14]})
    list(run_lines(OneStep([72], 2), lines, words))
    assert [set(line.result) == {"id", "error"} for line in lines] == [False, True, False]
    assert lines[1].result["id"] == "x" and "line 2: the model gave non-finite numbers" in lines[1].result["error"]
    assert lines[1].result["error"] in capsys.readouterr().err


def test_no_tokens_asked_for(model, words):
    [line] = read(model, words, {"prompt": "a", "max_tokens": 0})
    assert list(run_lines(OneStep([72], 1), [line], words)) == []
    assert line.result["canvas_ids"] == [] and line.result["nfe"] == 0


def test_default_max_tokens_is_cut_to_the_room(model, words):
    long = [1] * 200
    lines = read(model, words, {"prompt_ids": [5]}, {"prompt_ids": long}, {"prompt_ids": long, "max_tokens": None})
    assert [line.decode.max_tokens for line in lines] == [DecodeConfig.max_tokens, 56, 56]
    lines = read(model, words, {"prompt_ids": [5]}, {"prompt_ids": long}, max_tokens=40)
    assert [line.decode.max_tokens for line in lines] == [40, 40]


def test_stop_ids_of_a_chat(model, words):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    settings = ({}, {"early_stop": True}, {"early_stop": False})
    lines = read(model, words, *[chat | s for s in settings])
    assert [line.decode.stop_ids for line in lines] == [(EOS, EOT), (EOS, EOT), None]
    assert read(model, words, chat, early_stop=False)[0].decode.stop_ids is None


def test_canvas_length(model, words):
    lines = read(model, words, {"prompt_ids": [1] * 10, "max_tokens": 54}, {"prompt_ids": [1], "max_tokens": 5})
    assert canvas_length(lines, model) == 64
    assert canvas_length(read(model, words, {"prompt_ids": [1] * 11, "max_tokens": 54}), model) == 128
    assert canvas_length(read(model, words, {"prompt_ids": [1] * 200, "max_tokens": 50}), model) == 256


def test_bad_flags(tmp_path):
    kept, link = tmp_path / "lines", tmp_path / "link"
    kept.write_text('{"prompt": "a"}')
    link.symlink_to(kept)
    empty = tmp_path / "empty"  # looks converted, and cannot be loaded: what is found is found before
    empty.mkdir()
    (empty / "jdllm.json").write_text("{}")
    model = ["--model", str(empty)]
    for flags, needle in (
        (["--model", str(tmp_path)], "--model"),
        (["--model", str(GOLDEN / "llada-tiny")], "jdllm.convert"),
        (["--max-rows", "0"], "--max-rows"),
        ([*model, "--output", str(tmp_path / "missing" / "out")], "--output"),
        ([*model, "--output", str(tmp_path)], "--output"),
        ([*model, "--input", str(kept), "--output", str(kept)], "is the input itself"),
        ([*model, "--input", str(link), "--output", str(kept)], "is the input itself"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "jdllm.generate", *flags], capture_output=True, text=True, input=""
        )
        assert done.returncode == 2 and needle in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert kept.read_text() == '{"prompt": "a"}'


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The golden model, converted without its adapter."""
    from jdllm.convert.__main__ import main as convert

    folder = tmp_path_factory.mktemp("plain") / "model"
    assert convert([str(GOLDEN / "llada-tiny"), str(folder), "--dtype", "float32"]) == 0
    return folder


def test_files_and_lines_that_need_no_engine(plain, tmp_path):  # B14
    """All that a run does around the engine. Nothing is compiled: the compile cache stays empty."""
    source, sink, cache = tmp_path / "in", tmp_path / "out", tmp_path / "cache"
    source.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 0, "id": "\\ud800"}\n\xff\n{"prompt": "a", "\\ud800": 1}\n'
    )
    sink.write_text("what was there before, longer than what comes\n" * 99)
    flags = ["--input", str(source), "--output", str(sink), "--compile-cache", str(cache), "--model", str(plain)]
    done = subprocess.run(
        [sys.executable, "-m", "jdllm.generate", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "warning: the checkpoint was converted without a D2F adapter" in done.stderr
    good, bad, unknown = map(json.loads, sink.read_text().splitlines())
    assert (
        good["id"] == "\ud800" and good["canvas_ids"] == [] and "UTF-8" in bad["error"] and "known" in unknown["error"]
    )
    assert "compiled" not in done.stderr and not [p for p in cache.iterdir() if "step" in p.name]
    kept = sink.read_text()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "jdllm.json").write_text("{}")
    done = subprocess.run([sys.executable, "-m", "jdllm.generate", *flags[:-1], str(broken)], capture_output=True)
    assert done.returncode == 2 and sink.read_text() == kept


def test_the_command(tmp_path):
    """Golden traces through the real thing: conversion, restore, compiled step."""
    from jdllm.convert.__main__ import main as convert

    source, adapter = GOLDEN / "llada-tiny", GOLDEN / "llada-tiny-d2f-lora"
    assert convert([str(source), str(tmp_path / "model"), "--lora", str(adapter), "--dtype", "float32"]) == 0
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    traces = [t for t in manifest["traces"] if t["adapter"] == "llada-tiny-d2f-lora" and t["algorithm"] == "d2f:llada"]
    traces = [t for t in traces if t["prompt_length"] + t["settings"]["max_new_tokens"] <= 64][:2]
    assert traces
    lines = ["{bad"]
    for trace in traces:
        names = ("block_size", "block_add_threshold", "decoded_token_threshold", "skip_threshold")
        line = {name: trace["settings"][name] for name in names}
        line |= {"id": trace["name"], "prompt_ids": trace["prompt_ids"], "early_stop": False}
        lines.append(json.dumps(line | {"max_tokens": trace["generated_length"]}))
    command = [sys.executable, "-m", "jdllm.generate", "--model", str(tmp_path / "model"), "--max-rows", "1"]
    done = subprocess.run(
        [*command, "--dtype", "float32"],  # the programs of the server's tests: compiled once for both
        input="\n".join(lines),
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir},
    )
    assert done.returncode == 1 and "warning" not in done.stderr, done.stderr
    bad, *answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert bad == {"id": 1, "error": bad["error"]} and bad["error"] in done.stderr
    for trace, answer in zip(traces, answers, strict=True):
        assert answer["id"] == trace["name"] and isinstance(answer["text"], str)
        assert answer["canvas_ids"] == trace["expected_ids"] and answer["nfe"] == trace["nfe"]
