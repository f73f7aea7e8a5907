"""Requests of every kind that the server takes, drawn at random, and bodies that it must refuse."""

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A message, and the ids that the server's chat template makes of it."""

    message: str
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """A body that the server can answer.

    Attributes:
        decoder: how it is decoded, in a word.
        jobs: answers that it asks for.
        prompt_tokens: what its usage must say.
        most_tokens: of all its answers together.
    """

    path: str
    body: dict[str, Any]
    decoder: str
    jobs: int
    prompt_tokens: int
    most_tokens: int

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    def data(self) -> bytes:
        return json.dumps(self.body).encode()

    def streamed(self, stream: bool = True) -> "Request":
        """The same request, streamed with its usage, or plain."""
        fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        kept = {name: value for name, value in self.body.items() if name not in ("stream", "stream_options", "canvas")}
        return dataclasses.replace(self, body={**kept, **fields})

    def with_fields(self, **fields: Any) -> "Request":
        """The same with further fields, none of which changes what it counts."""
        return dataclasses.replace(self, body={**self.body, **fields})


class Requests:
    """Draws requests.

    Args:
        models: the base model's name, then those of D2F adapters beside it, if any.
        prompts: what may be asked.
        max_length: tokens of prompt and answer together.
    """

    def __init__(self, rng: random.Random, models: Sequence[str], prompts: Sequence[Prompt], max_length: int):
        self._rng, self._models, self._prompts, self._max_length = rng, models, prompts, max_length

    def draw(self) -> Request:
        """Any request, plain or streamed."""
        rng = self._rng
        chat, prompt = rng.random() < 0.6, rng.choice(self._prompts)
        room = self._max_length - len(prompt.ids)
        most = min(room, rng.choice((rng.randint(1, 8), rng.randint(8, 64), rng.randint(64, 128))))
        decoder, most, fields = self._decoder(most)
        prompts = rng.choice((1, 1, 2)) if not chat else 1
        n = rng.choice((1, 1, 1, 1, 2, 4))
        fields |= {"max_tokens": most, "n": n, **self._sampling(decoder), **self._extras(chat, most)}
        if chat:
            fields["messages"] = [{"role": "user", "content": prompt.message}]
        else:
            fields["prompt"] = list(prompt.ids) if prompts == 1 else [list(prompt.ids)] * prompts
        jobs = n * prompts
        request = Request(
            CHAT if chat else TEXT, fields, decoder, jobs, len(prompt.ids) * prompts, most_tokens=jobs * most
        )
        if rng.random() < 0.5:
            return request
        request = request.streamed()
        return request.with_fields(canvas=True) if rng.random() < 0.2 else request

    def talkative(self) -> Request:
        """A stream of hundreds of kilobytes: what a slow reader needs to be noticed."""
        prompt = self._rng.choice(self._prompts)
        most = min(self._max_length - len(prompt.ids), 96)
        body = {
            "model": self._models[-1],
            "messages": [{"role": "user", "content": prompt.message}],
            "max_tokens": most,
            "decoder": "d2f",
            "block_size": 8,
            "ignore_eos": True,
            "logprobs": True,
            "n": 8,
        }
        request = Request(CHAT, body, "d2f", 8, len(prompt.ids), most_tokens=8 * most)
        return request.streamed().with_fields(canvas=True)

    def _decoder(self, most: int) -> tuple[str, int, dict[str, Any]]:
        """The decoder's name, how many tokens it shall make, and its settings."""
        rng = self._rng
        size = rng.choice((4, 8, 16, 32))
        kind = rng.choice(("default", "d2f", "d2f", "fast-dllm", "fast-dllm", "llada", "guidance"))
        if kind == "default":
            return kind, most, {"model": rng.choice(self._models)}
        if kind == "d2f":
            skip = rng.choice((0.5, 0.9, 1.0))
            return kind, most, {"model": self._models[-1], "decoder": "d2f", "block_size": size, "skip_threshold": skip}
        fields: dict[str, Any] = {"model": self._models[0], "block_size": size}
        if kind == "fast-dllm":
            cache = rng.choice(("prefix", "dual", "none"))
            rule: dict[str, Any] = rng.choice(({}, {"threshold": 0.7}, {"factor": 1.0}))
            return f"{kind}, {cache}", most, {**fields, "decoder": kind, "cache": cache, **rule}
        most = min(most, 48)  # it makes hardly more than a token a pass
        blocks = -(-most // size)
        fields |= {"decoder": "llada", "remasking": rng.choice(("low_confidence", "random"))}
        if rng.random() < 0.7:
            fields["steps"] = blocks * rng.choice((1, 2, 4))
        if kind == "guidance":
            fields["cfg_scale"] = rng.choice((0.5, 1.5))
        return f"llada, {kind}" if kind == "guidance" else kind, most, fields

    def _sampling(self, decoder: str) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.5:
            return {}
        fields: dict[str, Any] = {"temperature": rng.uniform(0.1, 1.2)}
        if rng.random() < 0.5:
            fields["seed"] = rng.randrange(1 << 31)
        if decoder == "d2f" and rng.random() < 0.5:
            fields |= {"top_p": rng.uniform(0.5, 1.0), "top_k": rng.choice((0, 5, 50))}
        return fields

    def _extras(self, chat: bool, most: int) -> dict[str, Any]:
        rng = self._rng
        fields: dict[str, Any] = {}
        if rng.random() < 0.3:
            fields["stop"] = rng.sample(("\nlines", "items:", " at", "4", "="), rng.randint(1, 3))
        if rng.random() < 0.3:
            fields["logprobs"] = True if chat else 0
        if rng.random() < 0.1:
            fields["ignore_eos"] = True
        elif rng.random() < 0.1:
            fields["min_tokens"] = rng.randint(0, most)
        if rng.random() < 0.2:
            fields["priority"] = rng.randint(-2, 2)
        return fields


def sentinels(models: Sequence[str], prompts: Sequence[Prompt]) -> list[Request]:
    """Requests whose answers are fixed: greedy ones, and sampled ones with a seed. They ask for log-probabilities,
    which name the tokens."""
    base, d2f = models[0], models[-1]
    settings: list[dict[str, Any]] = [
        {"model": d2f, "decoder": "d2f", "block_size": 8},
        {"model": d2f, "decoder": "d2f", "block_size": 16, "temperature": 0.8, "seed": 11, "n": 2},
        {"model": base, "decoder": "fast-dllm", "block_size": 8},
        {"model": base, "decoder": "fast-dllm", "block_size": 32, "cache": "dual", "temperature": 1.0, "seed": 12},
        {"model": base, "decoder": "fast-dllm", "block_size": 8, "cache": "none", "factor": 1.0},
        {"model": base, "decoder": "llada", "block_size": 8, "max_tokens": 24},
        {
            "model": base,
            "decoder": "llada",
            "block_size": 8,
            "max_tokens": 24,
            "cfg_scale": 0.5,
            "temperature": 0.7,
            "seed": 13,
        },
    ]
    found = []
    for i, chosen in enumerate(settings):
        prompt = prompts[i % len(prompts)]
        messages = [{"role": "user", "content": prompt.message}]
        body = {"max_tokens": 64, "messages": messages, "logprobs": True, **chosen}
        n = body.get("n", 1)
        found.append(Request(CHAT, body, body["decoder"], n, len(prompt.ids), n * body["max_tokens"]))
    return found


@dataclasses.dataclass(frozen=True)
class Malformed:
    """A body that no client should send, and the status that must come back."""

    name: str
    data: bytes
    status: int
    path: str = CHAT


def _fields(name: str, status: int = 400, path: str = CHAT, **fields: Any) -> Malformed:
    body = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return Malformed(name, json.dumps({**body, "max_tokens": 4, **fields}).encode(), status, path)


MALFORMED = (
    Malformed("nothing", b"", 400),
    Malformed("half of a JSON object", b'{"messages": [{"role": "us', 400),
    Malformed("a list", b"[1, 2]", 400),
    Malformed("null", b"null", 400),
    Malformed("bytes that are not UTF-8", b'{"messages": "\xff\xfe"}', 400),
    Malformed("half of a surrogate pair", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    Malformed("deep nesting", b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    Malformed("a number beyond all floats", b'{"messages": [], "temperature": 1e999}', 400),
    _fields("messages of the wrong type", messages=5),
    _fields("no messages", messages=[]),
    _fields("an unknown role", messages=[{"role": "king", "content": "Hi"}]),
    _fields("text for a number", max_tokens="many"),
    _fields("a fraction of an answer", n=1.5),
    _fields("no answers", n=0),
    _fields("a billion answers", n=10**9),
    _fields("a negative length", max_tokens=-1),
    _fields("a length beyond the model's", max_tokens=10**6),
    _fields("text for a switch", stream="yes"),
    _fields("an object for a stop string", stop={"a": 1}),
    _fields("a thousand stop strings", stop=["a"] * 1000),
    _fields("a temperature below zero", temperature=-1),
    _fields("an unknown decoder", decoder="none such"),
    _fields("a setting of another decoder", decoder="llada", skip_threshold=0.5),
    _fields("steps that no block count divides", decoder="llada", max_tokens=16, block_size=8, steps=3),
    _fields("an unknown model", model="none such", status=404),
    _fields("a tool", tools=[{"type": "function", "function": {"name": "f"}}]),
    _fields("stream options without a stream", stream_options={"include_usage": True}),
    _fields("a deadline in the past", deadline_ms=-5.0),
    _fields("a megabyte of text", messages=[{"role": "user", "content": "apples and pears " * 60_000}]),
    _fields("far too many messages", messages=[{"role": "user", "content": "Hi"}] * 20_000),
    _fields("ids that do not exist", path=TEXT, prompt=[10**9]),
    _fields("ids of several types", path=TEXT, prompt=[1, "a", [2]]),
    _fields("far too many ids", path=TEXT, prompt=[5] * 200_000),
    _fields("far too many prompts", path=TEXT, prompt=["a"] * 100_000),
    _fields("echo with log-probabilities", path=TEXT, echo=True, logprobs=1),
    _fields("unknown fields, which are passed over", status=200, surprise={"a": [1]}, hello=None),
    Malformed("a path that is not there", b"{}", 404, "/v1/nothing"),
    Malformed("a method that is not possible", b"{}", 405, "/health"),
)
