"""The clients of a soak: those that read their answer, and those that do what goes wrong in the world.

Each says how it went (``Outcome``). What a client may be told is fixed: the whole answer, that the queue is full, or
the error that it brought about itself; anything else is a ``problem``.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from benchmarks.http_client import Address, Connection, HungUpError, ask
from benchmarks.soak_requests import CHAT, MALFORMED, Malformed, Request, Requests

End = Literal["answered", "refused", "ended", "cut"]
ENDS: tuple[End, ...] = ("answered", "refused", "ended", "cut")

SECONDS = 180.0
"""How long a client waits before it calls that a problem."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One answer of a call. ``tokens``: their texts, where log-probabilities were asked for."""

    text: str
    tokens: tuple[str, ...] | None
    reason: str | None


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole answer, and the usage that came with it."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An error instead of an answer, or after its beginning."""

    status: int
    code: str | None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a client fared.

    Attributes:
        end: ``answered``: it read everything. ``refused``: nothing was queued for it. ``ended``: the server ended its
            request. ``cut``: it left before it knew.
        request: what it had asked for, if that could be answered.
        problem: what should not have happened.
        sentinel: number of the fixed request, if it is one.
        client: its kind, which ``guarded`` fills in.
    """

    end: End
    request: Request | None = None
    answer: Answer | None = None
    problem: str | None = None
    sentinel: int | None = None
    client: str = ""


class UnexpectedError(Exception):
    """The server said something that it must not say here."""


@dataclasses.dataclass
class World:
    """What a client needs: the server, the dice, and a source of requests."""

    address: Address
    rng: random.Random
    requests: Requests
    max_body: int = 2 << 20
    """Bytes that the server takes (ServerConfig.max_body)."""


Client = Callable[[World], Coroutine[Any, Any, Outcome]]


async def read(connection: Connection, request: Request, most: int = 1 << 16, pause: float = 0.0) -> Answer | Refusal:
    """Read what comes to its end.

    Raises:
        UnexpectedError, HungUpError: it is not an answer.
    """
    status = await connection.status()
    if status != 200 or not request.stream:
        body = b"".join([piece async for piece in connection.pieces(most, pause)])
        return _refusal(status, body) if status != 200 else plain(json.loads(body))
    return collect([data async for data in connection.events(most, pause)])


def _refusal(status: int, body: bytes) -> Refusal:
    return Refusal(status, json.loads(body)["error"]["code"])


def collect(events: Sequence[str]) -> Answer | Refusal:
    """The answer that the events of a stream make up.

    Raises:
        UnexpectedError: they do not end as they must.
    """
    texts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    reasons: dict[int, str | None] = {}
    usage = None
    for data in events[:-1]:
        event = json.loads(data)
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            i = choice["index"]
            if i in reasons:
                raise UnexpectedError(f"choice {i} went on behind its end")
            texts[i] = texts.get(i, "") + _text(choice, "delta")
            if (found := _tokens(choice)) is not None:
                tokens.setdefault(i, []).extend(found)
            if choice["finish_reason"]:
                reasons[i] = choice["finish_reason"]
    if not events:
        raise UnexpectedError("a stream without an event")
    if events[-1] != "[DONE]":
        last = json.loads(events[-1])
        if "error" not in last:
            raise UnexpectedError("a stream ended without [DONE] or an error")
        return Refusal(200, last["error"]["code"])
    if usage is None:
        raise UnexpectedError("a stream without usage")
    choices = [Choice(texts[i], tuple(tokens[i]) if i in tokens else None, reasons.get(i)) for i in sorted(texts)]
    return Answer(tuple(choices), usage["prompt_tokens"], usage["completion_tokens"])


def plain(content: dict[str, Any]) -> Answer:
    """The answer in a plain body."""
    choices = []
    for choice in content["choices"]:
        found = _tokens(choice)
        choices.append(
            Choice(_text(choice, "message"), None if found is None else tuple(found), choice["finish_reason"])
        )
    usage = content["usage"]
    return Answer(tuple(choices), usage["prompt_tokens"], usage["completion_tokens"])


def _text(choice: dict[str, Any], part: str) -> str:
    return (choice[part].get("content") if part in choice else choice["text"]) or ""


def _tokens(choice: dict[str, Any]) -> list[str] | None:
    told = choice["logprobs"]
    if told is None:
        return None
    return [one["token"] for one in told["content"]] if "content" in told else told["tokens"]


def fault(request: Request, answer: Answer) -> str | None:
    """What is wrong with an answer, whatever its text; None if nothing is."""
    body = request.body
    if len(answer.choices) != request.jobs:
        return f"{len(answer.choices)} choices instead of {request.jobs}"
    if any(choice.reason not in ("stop", "length") for choice in answer.choices):
        return f"finish reasons {[choice.reason for choice in answer.choices]}"
    if answer.prompt_tokens != request.prompt_tokens:
        return f"{answer.prompt_tokens} prompt tokens instead of {request.prompt_tokens}"
    if not 0 <= answer.completion_tokens <= request.most_tokens:
        return f"{answer.completion_tokens} tokens where {request.most_tokens} were allowed"
    if any(stop in choice.text for stop in body.get("stop", ()) for choice in answer.choices):
        return "a stop string in the text"
    listed = [choice.tokens for choice in answer.choices if choice.tokens is not None]
    if len(listed) == request.jobs and sum(map(len, listed)) != answer.completion_tokens:
        return f"{sum(map(len, listed))} log-probabilities for {answer.completion_tokens} tokens"
    return None


def _outcome(request: Request, told: Answer | Refusal, *, may_end: str | None = None) -> Outcome:
    """The outcome of a client that read everything. ``may_end``: code of the error that it may bring about."""
    if isinstance(told, Answer):
        return Outcome("answered", request, told, fault(request, told))
    if told.code == "rate_limit_exceeded":
        return Outcome("refused", request)
    problem = None if may_end and told.code == may_end else f"status {told.status}, code {told.code}"
    return Outcome("ended", request, problem=problem)


async def _post(world: World, request: Request, request_id: str | None = None, small: bool = False) -> Connection:
    connection = await Connection.open(world.address, small)
    await connection.send("POST", request.path, request.data(), {"X-Request-ID": request_id} if request_id else None)
    return connection


async def reads(world: World) -> Outcome:
    """Reads the whole answer."""
    request = world.requests.draw()
    with contextlib.closing(await _post(world, request)) as connection:
        return _outcome(request, await read(connection, request))


async def leaves_at_once(world: World) -> Outcome:
    """Hangs up while its request is queued, or not even read."""
    request = world.requests.draw()
    with contextlib.closing(await _post(world, request)):
        await asyncio.sleep(world.rng.choice((0, world.rng.uniform(0, 0.02))))
    return Outcome("cut", request)


async def leaves_before_text(world: World) -> Outcome:
    """Hangs up on a stream before its first byte, or soon after."""
    request = world.requests.draw().streamed()
    with contextlib.closing(await _post(world, request)):
        await asyncio.sleep(world.rng.uniform(0.02, 0.5))
    return Outcome("cut", request)


async def leaves_in_stream(world: World) -> Outcome:
    """Hangs up after some events of a stream."""
    request = world.requests.draw().streamed()
    left = world.rng.randint(1, 5)
    with contextlib.closing(await _post(world, request)) as connection:
        if (status := await connection.status()) != 200:
            return _outcome(request, _refusal(status, await connection.body()))
        seen = []
        async for data in connection.events():
            seen.append(data)
            left -= 1
            if not left and data != "[DONE]":
                return Outcome("cut", request)
        return _outcome(request, collect(seen))


async def leaves_plain(world: World) -> Outcome:
    """Hangs up on a plain post that is queued or runs."""
    request = world.requests.draw().streamed(False)
    with contextlib.closing(await _post(world, request)):
        await asyncio.sleep(world.rng.uniform(0.05, 1.5))
    return Outcome("cut", request)


async def aborts(world: World) -> Outcome:
    """Has its request aborted by its id, and reads what it is told."""
    request, name = world.requests.draw(), f"soak-{world.rng.getrandbits(64):x}"
    with contextlib.closing(await _post(world, request, name)) as connection:
        await asyncio.sleep(world.rng.uniform(0, 1.0))
        status, _ = await ask(world.address, "POST", "/v1/abort", {"request_id": name})
        if status != 200:
            return Outcome("cut", request, problem=f"abort has status {status}")
        return _outcome(request, await read(connection, request), may_end="aborted")


async def is_late(world: World) -> Outcome:
    """Gives its request a deadline that may pass."""
    request = world.requests.draw().with_fields(deadline_ms=10 ** world.rng.uniform(1, 3.5))
    with contextlib.closing(await _post(world, request)) as connection:
        return _outcome(request, await read(connection, request), may_end="deadline_exceeded")


async def reads_slowly(world: World) -> Outcome:
    """Reads all, but a kilobyte at a time, or reads a few bytes a second and leaves at some time."""
    request, rng = world.requests.talkative(), world.rng
    patient = rng.random() < 0.5
    with contextlib.closing(await _post(world, request, small=True)) as connection:
        if patient:
            told = await read(connection, request, most=SMALL_READ, pause=0.02)
            return _outcome(request, told)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(3, 20)):
                told = await read(connection, request, most=4, pause=1.0)
                return _outcome(request, told)
    return Outcome("cut", request)


SMALL_READ = 1024
"""Bytes that a patient slow reader takes at a time."""


async def stops_reading(world: World) -> Outcome:
    """Reads the head of a stream, then nothing, and leaves in the end."""
    request = world.requests.talkative()
    with contextlib.closing(await _post(world, request, small=True)) as connection:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await connection.status()
        await asyncio.sleep(world.rng.uniform(2, 30))
    return Outcome("cut", request)


async def sends_nonsense(world: World) -> Outcome:
    """Sends something malformed, and reads the refusal."""
    return await sends(world, world.rng.choice(MALFORMED))


async def sends(world: World, wrong: Malformed) -> Outcome:
    """Sends this."""
    with contextlib.closing(await Connection.open(world.address)) as connection:
        await connection.send("POST", wrong.path, wrong.data)
        status, body = await connection.status(), json.loads(await connection.body())
    if status == 200 == wrong.status:  # unknown fields: an answer like any other
        usage = body["usage"]
        answer = Answer((), usage["prompt_tokens"], usage["completion_tokens"])
        fields = json.loads(wrong.data)
        request = Request(wrong.path, fields, "default", 1, usage["prompt_tokens"], fields["max_tokens"])
        return Outcome("answered", request, answer)
    if status == 429 and wrong.status == 200:
        return Outcome("refused")
    right = status == wrong.status and body["error"].keys() == {"message", "type", "param", "code"}
    problem = None if right else f"{wrong.name}: status {status} instead of {wrong.status}: {str(body)[:200]}"
    return Outcome("refused", problem=problem)


async def sends_too_much(world: World) -> Outcome:
    """Sends more bytes than are taken: announced, or in chunks of which nobody knows the end."""
    announced = world.rng.random() < 0.5
    with contextlib.closing(await Connection.open(world.address)) as connection:
        try:
            if announced:
                await connection.send("POST", CHAT, b'{"messages": ', claim=world.max_body + 1)
            else:
                await connection.send_chunked(CHAT, count=world.max_body // (1 << 16) + 1, chunk=b" " * (1 << 16))
            status = await connection.status()
            await connection.body()
        except (OSError, HungUpError):  # the server may also just close; what is on the way then is lost
            return Outcome("refused")
    return Outcome("refused", problem=None if status == 413 else f"status {status} instead of 413")


async def sends_half(world: World) -> Outcome:
    """Announces a body, sends half of it, and leaves."""
    request = world.requests.draw()
    data = request.data()
    with contextlib.closing(await Connection.open(world.address)) as connection:
        await connection.send("POST", request.path, data[: len(data) // 2], claim=len(data))
        await asyncio.sleep(world.rng.uniform(0, 2))
    return Outcome("refused")


async def says_nothing(world: World) -> Outcome:
    """Connects, perhaps sends half a line, and sits there for a while."""
    with contextlib.closing(await Connection.open(world.address)) as connection:
        await connection.send_raw(world.rng.choice((b"", b"POST /v1/chat/com", b"\x16\x03\x01\x02\x00")))
        await asyncio.sleep(world.rng.uniform(1, 20))
    return Outcome("refused")


KINDS: dict[Client, float] = {
    reads: 60,
    leaves_at_once: 6,
    leaves_before_text: 5,
    leaves_in_stream: 5,
    leaves_plain: 5,
    aborts: 5,
    is_late: 6,
    reads_slowly: 1,
    stops_reading: 1,
    sends_nonsense: 12,
    sends_too_much: 0.5,
    sends_half: 2,
    says_nothing: 2,
}
"""Kinds of clients -> how often they come."""


async def one_of(world: World) -> Outcome:
    """A client of a random kind."""
    (kind,) = world.rng.choices(list(KINDS), list(KINDS.values()))
    return await guarded(world, kind)


async def sentinel(world: World, fixed: Sequence[Request], number: int, stream: bool) -> Outcome:
    """Sends one of the fixed requests."""

    async def sends_it(world: World) -> Outcome:
        request = fixed[number].streamed(stream)
        with contextlib.closing(await _post(world, request)) as connection:
            return _outcome(request, await read(connection, request))

    return dataclasses.replace(await guarded(world, sends_it), client="sentinel", sentinel=number)


async def guarded(world: World, client: Client) -> Outcome:
    """Run a client; what it did not expect, and an answer that does not come, are problems."""
    try:
        async with asyncio.timeout(SECONDS):
            outcome = await client(world)
    except TimeoutError:
        outcome = Outcome("cut", problem=f"no answer within {SECONDS:.0f} s")
    except Exception as error:
        outcome = Outcome("cut", problem=f"{type(error).__name__}: {error}")
    return dataclasses.replace(outcome, client=name_of(client))


def name_of(client: Client) -> str:
    """Its kind, in words."""
    return client.__name__.replace("_", " ")
