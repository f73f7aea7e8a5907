"""A server without weights: a byte tokenizer and an engine that follows a script."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn

from jdllm.config import DecodeConfig, ModelConfig
from jdllm.costs import CostTable
from jdllm.denoise.request import request
from jdllm.denoise.window import Bucket
from jdllm.engine import Counters, Pass, Row, Timing
from jdllm.serve import event_loops, http_config
from jdllm.serving.api import ServerConfig, create_app
from jdllm.serving.model import ServedModel
from jdllm.tokenizer import Tokenizer

SPECIALS = ("<|startoftext|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|mask|>")
BOS, EOS, EOT, SOH, EOH, MASK = range(256, 262)
TEMPLATE = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}{{ m['content'] | trim }}{{ '<|eot_id|>' }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
MODEL = ModelConfig(
    family="llada",
    vocab_size=264,  # two more than the tokenizer has
    d_model=8,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    d_ff=8,
    max_sequence_length=256,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    mask_id=MASK,
    eos_id=EOS,
    pad_id=EOS,
)

Step = list[tuple[int, int]] | None  # None: numbers that are not finite, so that the row fails
Script = Callable[[list[int], DecodeConfig], list[Step]]


def left_to_right(answer: Sequence[int], per_step: int = 1) -> list[Step]:
    """Reveals an answer in order."""
    places = list(enumerate(answer))
    return [places[i : i + per_step] for i in range(0, len(places), per_step)] or [[]]


def says(text: str | bytes, per_step: int = 1, end: bool = True) -> Script:
    """Every prompt gets this answer, with an end of text behind it or nothing but more of itself."""
    data = list(text.encode() if isinstance(text, str) else text)

    def script(prompt: list[int], decode: DecodeConfig) -> list[Step]:
        n = decode.max_tokens
        answer = [*data, *[EOS] * n] if end else data * (n // len(data) + 1)
        return left_to_right(answer[: decode.max_tokens], per_step)

    return script


def echoes(per_step: int = 4) -> Script:
    """The answer is the last word of the prompt (before any markup), in capitals."""

    def script(prompt: list[int], decode: DecodeConfig) -> list[Step]:
        words = bytes(i for i in prompt if i < 256).decode(errors="ignore").replace("assistant", "").split()
        answer = [*words[-1].upper().encode(), *[EOS] * decode.max_tokens]
        return left_to_right(answer[: decode.max_tokens], per_step)

    return script


class _Canvas:
    """What Row reads beside the report: passes of commits, and minus a tenth of each as its log-probability."""

    def __init__(self, slot: int, committed: np.ndarray):
        self.committed = np.tile(committed, (slot + 1, 1))
        self.logprobs = -self.committed / 10


class ScriptEngine:
    """jdllm.engine.Engine's interface, reports one call late included; the tokens come from a script."""

    def __init__(self, script: Script, length: int, step_seconds: float = 0.0):
        self.script, self.length, self.step_seconds_each = script, length, step_seconds
        self.rows: dict[int, dict] = {}
        self.report: list[Row] = []
        self.steps = 0
        self.resets = 0
        self.fault: Callable[[], None] | None = None  # called in every step
        self.counters, self.costs = Counters(), CostTable()
        self.last_call: Timing | None = None

    def reset(self) -> None:
        self.rows, self.report = {}, []
        self.resets += 1

    def insert(self, slot, handle, prompt_ids: Sequence[int], decode: DecodeConfig, shadow=None, packed=None) -> None:
        made = request(prompt_ids, decode, MODEL, self.length)  # the engine puts into the slot what it is given
        assert all(map(np.array_equal, vars(packed).values(), vars(made).values()))
        assert slot not in self.rows, "the slot is taken"
        end = len(prompt_ids) + decode.max_tokens
        tokens = np.full(self.length, MASK, np.int32)
        tokens[: len(prompt_ids)] = prompt_ids
        places = np.flatnonzero(tokens[:end] == MASK) if decode.infill else np.arange(len(prompt_ids), end)
        assert end <= self.length and len(places)
        steps = iter(self.script(list(prompt_ids), dataclasses.replace(decode, max_tokens=len(places))))
        self.rows[slot] = dict(handle=handle, tokens=tokens, P=len(prompt_ids), steps=steps, decode=decode, nfe=0)
        self.rows[slot]["places"] = places
        self.rows[slot]["committed"] = np.zeros(self.length, np.int32)

    def evict(self, slot: int) -> None:
        self.rows.pop(slot, None)

    def set_thresholds(self, above: Mapping[int, float]) -> None:
        for slot, value in above.items():
            self.rows[slot]["sure_above"] = value

    def step_seconds(self, rows: int, positions: int) -> float:
        return self.step_seconds_each

    def alternatives(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """At every position "a", "b", ... with log-probabilities -1, -2, ..."""
        shape = (self.length, 20)
        return np.broadcast_to(97 + np.arange(20), shape), np.broadcast_to(-1.0 - np.arange(20), shape)

    def read(self) -> list[Row]:
        report, self.report = self.report, []
        if report:
            time.sleep(self.step_seconds_each)
            self.last_call = Timing(Bucket(1, 8), self.step_seconds_each, time.perf_counter())
            self.costs.observe(Bucket(1, 8), self.step_seconds_each)
        return [row for row in report if self.rows.get(row.slot, {}).get("handle") is row.handle]

    def dispatch(self, hold: Callable[[list[Pass]], Collection[int]] | None = None) -> bool:
        if self.fault:
            self.fault()
        self.steps += 1
        self.counters.calls += 1
        live = {slot: row for slot, row in self.rows.items() if not row.get("ended")}
        passes = [
            Pass(slot, row["handle"], 8, row["nfe"] == 0, row["nfe"], row.get("prefix", 0))
            for slot, row in live.items()
        ]
        held = hold(passes) if hold else ()
        self.report = [self._advance(slot, row) for slot, row in live.items() if slot not in held]
        return bool(self.report)

    def _advance(self, slot: int, row: dict) -> Row:
        P, decode, tokens, places = row["P"], row["decode"], row["tokens"], row["places"]
        revealed = next(row["steps"])
        for at, token in revealed or []:
            tokens[places[at]] = token
            row["committed"][places[at]] = row["nfe"] + 1
        failed = revealed is None
        row["nfe"] += 1
        length = P + decode.max_tokens
        first = int(places[0])
        masks = np.flatnonzero(tokens[first:length] == MASK)
        prefix = first + int(masks[0]) if len(masks) else length
        row["prefix"] = prefix
        stop_ids = (EOS,) if decode.stop_ids is None else decode.stop_ids
        stops = np.flatnonzero(np.isin(tokens[P:prefix], stop_ids))
        stop = P + int(stops[0]) if len(stops) else -1
        row["ended"] = stop >= 0 or prefix == length or failed
        return Row(
            slot=slot,
            handle=row["handle"],
            live=not row["ended"],
            failed=failed,
            prompt_length=P,
            length=length,
            prefix=prefix,
            stop=stop,
            nfe=row["nfe"],
            width=0 if row["ended"] else 8,
            tokens=tokens.copy(),
            _call=_Canvas(slot, row["committed"].copy()),
        )


class Running:
    """A server on a real port, in a thread."""

    def __init__(self, script: Script, rows: int, length: int, step_seconds: float, open_seconds: float, **settings):
        self.engine = ScriptEngine(script, length, step_seconds)
        self.words: Tokenizer = settings.pop("tokenizer")
        self.fail_open: Exception | None = settings.pop("fail_open", None)
        defaults, policy = settings.pop("defaults", {}), settings.pop("policy", None)

        def open_model(progress: Callable[[str], None]) -> ServedModel:
            time.sleep(open_seconds)
            if self.fail_open:
                raise self.fail_open
            return ServedModel(lambda _: self.engine, self.words, MODEL, rows, length, defaults)

        self.app = create_app(ServerConfig(**{"names": ("tiny", "org/alias"), **settings}), open_model, policy=policy)
        self.loop = self.app.state.engine_loop
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.server = uvicorn.Server(http_config(self.app, grace=2))
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=event_loops()) as runner:
            runner.run(self.server.serve([self.listener]))

    def start(self, wait: bool) -> None:
        self.thread.start()
        until(lambda: self.server.started)
        self.url = "http://{}:{}".format(*self.listener.getsockname())
        self.http = httpx.Client(base_url=self.url, timeout=20)
        if wait:
            until(lambda: self.loop.state != "loading" and self.loop.not_ready is None)

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()

    def chat(self, text: str = "Hi", **fields) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt="Hi", **fields) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields})

    def events(self, path: str, **body) -> list[dict]:
        """All events of a stream; the last must be [DONE]."""
        with self.http.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return [json.loads(d) for d in data[:-1]]

    def metric(self, name: str) -> float:
        """A metric, summed over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(v) for k, v in (x.rsplit(" ", 1) for x in lines if x[0] != "#") if k.split("{")[0] == name)

    def reconciles(self) -> bool:
        """Every request that was taken is somewhere."""
        get = lambda name: self.metric(f"jdllm_requests_{name}")
        ended = get("finished_total") + get("cancelled_total") + get("failed_total")
        return get("admitted_total") == ended + get("running") + get("waiting")


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def save_byte_tokenizer(folder: Path, specials: Sequence[str] = SPECIALS, template: str | None = TEMPLATE) -> Path:
    """Ids 0..255 are bytes, the special tokens follow."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    chars = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(rest)}
    backend = Tokenizer(models.BPE({chars[b]: b for b in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=SPECIALS[0], eos_token=SPECIALS[1])
    hf.chat_template = template
    hf.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("bytes")), MODEL)


@pytest.fixture
def serve(byte_tokenizer) -> Iterator[Callable[..., Running]]:
    """serve(script, rows=4, length=128, step_seconds=0, ...) -> a running server."""
    with contextlib.ExitStack() as stack:

        def start(script: Script, rows=4, length=128, step_seconds=0.0, open_seconds=0.0, wait=True, **settings):
            settings.setdefault("tokenizer", byte_tokenizer)
            running = Running(script, rows, length, step_seconds, open_seconds, **settings)
            running.start(wait)
            stack.callback(running.stop)
            return running

        yield start


@pytest.fixture
def api(serve) -> Running:
    return serve(says("ok"))


class Kit:
    """What tests need by name (there are no packages to import from)."""

    says, echoes, left_to_right, until = map(staticmethod, (says, echoes, left_to_right, until))
    save_byte_tokenizer = staticmethod(save_byte_tokenizer)
    ScriptEngine, MODEL, TEMPLATE, SPECIALS = ScriptEngine, MODEL, TEMPLATE, SPECIALS
    BOS, EOS, EOT, SOH, EOH, MASK = BOS, EOS, EOT, SOH, EOH, MASK


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit
