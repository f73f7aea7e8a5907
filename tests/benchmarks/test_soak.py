"""The soak: its clients against a scripted server, and that its checks notice what is wrong."""

import asyncio
import dataclasses
import importlib.util
import json
import os
import random
from pathlib import Path

import pytest

from benchmarks import soak, soak_checks, soak_clients
from benchmarks.http_client import Connection, HungUpError, ask
from benchmarks.server_process import metrics
from benchmarks.soak_clients import KINDS, Answer, Choice, Outcome, Refusal, World, guarded
from benchmarks.soak_requests import CHAT, MALFORMED, TEXT, Prompt, Request, Requests
from benchmarks.soak_watch import Seen

spec = importlib.util.spec_from_file_location("scripted_server", Path(__file__).parents[1] / "serving" / "conftest.py")
scripted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripted)

LONG = (soak_clients.reads_slowly, soak_clients.stops_reading, soak_clients.says_nothing, soak_clients.sends_too_much)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    from jdllm.tokenizer import Tokenizer

    return Tokenizer(scripted.save_byte_tokenizer(tmp_path_factory.mktemp("bytes")), scripted.MODEL)


@pytest.fixture
def server(words):
    running = scripted.Running(scripted.echoes(), 4, 512, 0.001, 0.0, tokenizer=words, queue_limit=64)
    running.start(wait=True)
    host, port = running.url.removeprefix("http://").split(":")
    running.address = (host, int(port))
    yield running
    running.stop()


@pytest.fixture
def world(server):
    rng = random.Random(0)
    message = "3 pens at 4"
    prompt = Prompt(message, tuple(server.words.encode_chat([{"role": "user", "content": message}])))
    return World(server.address, rng, Requests(rng, ["tiny"], [prompt], 512))


def test_a_short_soak_passes(server, monkeypatch):
    monkeypatch.setattr(soak, "CROWDS", (8,))
    monkeypatch.setattr(soak, "SENTINEL_SECONDS", 0.1)
    monkeypatch.setattr(soak, "PROGRESS_SECONDS", 0.5)
    monkeypatch.setattr(soak_clients, "KINDS", {kind: 1 for kind in KINDS if kind not in LONG})
    monkeypatch.setattr(soak_checks, "HEALTH_SECONDS", 10)
    progress = []
    run = asyncio.run(soak.soak(server.address, os.getpid(), 2, 0, progress.append))
    assert [check for check in run.checks() if not check.passed] == []
    assert any("answered" in line for line in progress)
    results = json.loads(json.dumps(soak.summary(run)))
    shown = soak.table({**results, "rows": 4, "machine": {"cpu": "c", "cpus": 2}, "commit": "d", "command": "e"})
    assert "| sentinel" in shown and "NO" not in shown
    read = sum(row["answered"] for row in results["clients"])
    assert sum(results["answered_by_decoder"].values()) == read > 20


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LONG], ids=soak_clients.name_of)
def test_clients_of_each_kind_fare_as_they_may(world, kind):
    async def some() -> list[Outcome]:
        return await asyncio.gather(*(guarded(world, kind) for _ in range(6)))

    outcomes = asyncio.run(some())
    assert [o.problem for o in outcomes] == [None] * 6
    assert {o.client for o in outcomes} == {soak_clients.name_of(kind)}
    if kind is soak_clients.reads:
        assert all(o.end == "answered" and o.answer for o in outcomes)


def test_what_must_be_refused_is_refused(world):
    async def all_of_them() -> list[Outcome]:
        return [await soak_clients.sends(world, wrong) for wrong in MALFORMED]

    assert [o.problem for o in asyncio.run(all_of_them()) if o.problem] == []


def test_bodies_that_are_too_large_are_refused(world):
    for _ in range(3):
        assert asyncio.run(guarded(world, soak_clients.sends_too_much)).problem is None


def test_an_answer_that_was_not_due_is_a_problem(world):
    request = world.requests.draw().streamed(False)
    accepted = dataclasses.replace(MALFORMED[0], data=request.data(), path=request.path)
    assert "status 200 instead of 400" in asyncio.run(soak_clients.sends(world, accepted)).problem


def test_a_client_without_an_answer_is_a_problem(world, monkeypatch):
    monkeypatch.setattr(soak_clients, "SECONDS", 0.05)

    async def waits(world: World) -> Outcome:
        await asyncio.sleep(10)
        raise AssertionError

    assert asyncio.run(guarded(world, waits)).problem.startswith("no answer within")

    async def fails(world: World) -> Outcome:
        raise HungUpError("in mid-answer")

    assert asyncio.run(guarded(world, fails)).problem == "HungUpError: in mid-answer"


def test_a_slow_reader_gets_the_same_events(server):
    body = json.dumps({"prompt": "a" * 60, "max_tokens": 60, "stream": True}).encode()

    async def text(most: int, small: bool) -> str:
        connection = await Connection.open(server.address, small)
        await connection.send("POST", TEXT, body)
        assert await connection.status() == 200
        events = [json.loads(event) async for event in connection.events(most) if event != "[DONE]"]
        connection.close()
        return "".join(event["choices"][0]["text"] for event in events)

    assert asyncio.run(text(7, True)) == asyncio.run(text(1 << 16, False)) == "A" * 60


def test_one_connection_serves_many_answers(server):
    async def twice() -> list[tuple[int, bytes]]:
        connection = await Connection.open(server.address)
        told = []
        for path in ("/version", "/none"):
            await connection.send("GET", path)
            told.append((await connection.status(), await connection.body()))
        connection.close()
        return told

    (first, version), (second, error) = asyncio.run(twice())
    assert (first, second) == (200, 404) and b"version" in version and b"error" in error
    assert asyncio.run(ask(server.address, "GET", "/version")) == (200, version)


def event(index: int = 0, text: str = "", reason: str | None = None) -> str:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
    return json.dumps({"choices": [choice], "usage": None})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


def test_a_stream_is_put_together():
    events = [event(0, "a"), event(1, "x"), event(0, "b", "stop"), event(1, reason="length"), USAGE, "[DONE]"]
    assert soak_clients.collect(events) == Answer((Choice("ab", None, "stop"), Choice("x", None, "length")), 3, 2)
    error = json.dumps({"error": {"code": "aborted"}})
    assert soak_clients.collect([event(0, "a"), error]) == Refusal(200, "aborted")


@pytest.mark.parametrize(
    "events, text",
    [
        ([], "without an event"),
        ([event(0, "a", "stop"), USAGE], r"without \[DONE\]"),
        ([event(0, "a", "stop"), "[DONE]"], "without usage"),
        ([event(0, "a", "stop"), event(0, "b"), USAGE, "[DONE]"], "went on"),
    ],
)
def test_a_stream_that_ends_wrongly_is_noticed(events, text):
    with pytest.raises(soak_clients.UnexpectedError, match=text):
        soak_clients.collect(events)


REQUEST = Request(TEXT, {"stop": ["end"]}, "d2f", jobs=1, prompt_tokens=3, most_tokens=4)
ANSWER = Answer((Choice("ab", ("a", "b"), "stop"),), 3, 2)


@pytest.mark.parametrize(
    "answer, text",
    [
        (ANSWER, None),
        (dataclasses.replace(ANSWER, choices=()), "choices"),
        (dataclasses.replace(ANSWER, choices=(Choice("ab", None, None),)), "finish reasons"),
        (dataclasses.replace(ANSWER, choices=(Choice("an end", None, "stop"),)), "stop string"),
        (dataclasses.replace(ANSWER, prompt_tokens=4), "prompt tokens"),
        (dataclasses.replace(ANSWER, completion_tokens=5), "tokens where 4"),
        (dataclasses.replace(ANSWER, completion_tokens=3), "log-probabilities"),
    ],
)
def test_faults_of_an_answer_are_noticed(answer, text):
    found = soak_clients.fault(REQUEST, answer)
    assert found is None if text is None else text in found


def test_an_error_that_the_client_did_not_ask_for_is_a_problem():
    told = lambda code, **may: soak_clients._outcome(REQUEST, Refusal(500, code), **may)
    assert told("rate_limit_exceeded").end == "refused"
    assert told("aborted", may_end="aborted").problem is None
    assert told("aborted", may_end="deadline_exceeded").problem == "status 500, code aborted"
    assert told("aborted").problem and told(None).problem


def test_exceptions_are_found_in_a_log():
    lines = ["a\n", "Traceback (most recent call last):\n", "  File x\n", "a.BError: text\n", "ValueError: in a line\n"]
    assert soak.exceptions(lines) == ["a.BError"] and soak.exceptions(["fine\n"]) == []


PAGE = """
# HELP jdllm_requests_admitted_total Requests taken into the queue.
jdllm_requests_admitted_total 6.0
jdllm_requests_finished_total{finish_reason="stop"} 2.0
jdllm_requests_finished_total{finish_reason="length"} 1.0
jdllm_requests_cancelled_total 2.0
jdllm_requests_failed_total 1.0
jdllm_requests_running 0.0
jdllm_requests_waiting 0.0
jdllm_prompt_tokens_total 9.0
jdllm_generation_tokens_total 7.0
jdllm_recompiles_after_ready_total 0.0
jdllm_engine_resets_total 0.0
"""
READ = Outcome("answered", REQUEST, ANSWER, sentinel=0)
CUT = Outcome("cut", REQUEST)
OUTCOMES = [READ, READ, CUT, CUT, Outcome("ended", REQUEST)]
SEEN = Seen(health=[0.01] * 100, late=[0.0], memory=[100 << 20] * 50)
TOKENS = ("jdllm_prompt_tokens_total", "jdllm_generation_tokens_total")


def failed(outcomes=OUTCOMES, seen=SEEN, alone=(ANSWER,), counted=(6.0, 4.0), **changes) -> list[str]:
    """Names of the checks that do not pass. ``counted``: tokens of the two calls of the calm end."""
    page = {**metrics(PAGE), **{f"jdllm_{name}": value for name, value in changes.items()}}
    before = {name: page[name] - more for name, more in zip(TOKENS, counted, strict=True)}
    calm = soak_checks.Calm([READ, READ], before, page)
    return [check.name for check in soak_checks.judge(outcomes, page, seen, alone, calm) if not check.passed]


def test_right_books_pass():
    assert failed() == []  # of the three answers one was not read: 3 + 3 + 3 and 2 + 2 + at most 4 tokens


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"requests_admitted_total": 7.0}, "admitted ="),
        ({"requests_cancelled_total": 1.0}, "admitted ="),
        ({"requests_running": 1.0, "requests_admitted_total": 7.0}, "running or waiting"),
        ({"requests_finished_total": 1.0, "requests_admitted_total": 4.0}, "answers finished"),
        ({"requests_finished_total": 6.0, "requests_admitted_total": 9.0}, "answers finished"),
        ({"prompt_tokens_total": 5.0}, "prompt tokens counted"),
        ({"prompt_tokens_total": 10.0}, "prompt tokens counted"),
        ({"generation_tokens_total": 3.0}, "generated tokens counted"),
        ({"generation_tokens_total": 9.0}, "generated tokens counted"),
        ({"counted": (6.0, 5.0)}, "when all clients read"),
        ({"counted": (3.0, 4.0)}, "when all clients read"),
        ({"recompiles_after_ready_total": 1.0}, "compiled after"),
        ({"engine_resets_total": 1.0}, "restarts"),
        ({"alone": (ANSWER, ANSWER)}, "fixed requests"),  # the second was never sent again
        ({"alone": (None,)}, "fixed requests"),
        ({"alone": (Answer((Choice("ab", ("a", "c"), "stop"),), 3, 2),)}, "fixed requests"),
        ({"outcomes": [*OUTCOMES, Outcome("cut", problem="no answer")]}, "must not be"),
        ({"seen": dataclasses.replace(SEEN, health=[0.01] * 1000 + [0.2])}, "slowest answer"),
        ({"seen": dataclasses.replace(SEEN, health_failed=1)}, "not well"),
        ({"seen": dataclasses.replace(SEEN, memory=[(100 + i) << 20 for i in range(50)])}, "memory"),
    ],
)
def test_a_planted_fault_is_noticed(changes, name):
    names = failed(**changes)
    assert any(name in found for found in names), names


def test_the_exit_code_is_that_of_the_checks(monkeypatch, tmp_path, capsys):
    class Fake:
        address, pid, errors = ("127.0.0.1", 1), 1, "Traceback (most recent call last):\n  x\na.BError: c\n"

        def __init__(self, *flags, log): ...

        def wait_ready(self): ...

        def stop(self, seconds=0):
            return 0

    async def brief(address, pid, seconds, seed, log):
        page = metrics(PAGE)
        return soak.Run(seconds, OUTCOMES, [ANSWER], page, SEEN, 0.0, soak_checks.Calm([], page, page))

    monkeypatch.setattr(soak, "ServerProcess", Fake)
    monkeypatch.setattr(soak, "soak", brief)
    file = tmp_path / "soak.json"
    assert soak.main(["--minutes", "0.1", "--json", str(file)]) == 1
    shown = capsys.readouterr()
    assert "failed: exceptions in the server's log" in shown.err and "| 1: a.BError" in shown.out
    assert {"commit", "command", "machine", "checks"} <= json.loads(file.read_text()).keys()
    monkeypatch.setattr(Fake, "errors", "")
    assert soak.main(["--minutes", "0.1"]) == 0


def test_the_same_seed_draws_the_same_requests():
    prompts = [Prompt("a", (1, 2)), Prompt("b", (3,))]
    source = lambda seed: Requests(random.Random(seed), ["m", "n"], prompts, 256)
    first, again = source(3), source(3)
    drawn = [first.draw() for _ in range(200)]
    assert drawn == [again.draw() for _ in range(200)]
    caches = {f"fast-dllm, {cache}" for cache in ("prefix", "dual", "none")}
    assert {request.decoder for request in drawn} == {"default", "d2f", "llada", "llada, guidance", *caches}
    assert {request.path for request in drawn} == {CHAT, TEXT} and {request.stream for request in drawn} == {
        True,
        False,
    }
    assert all(request.data() and len(request.body.get("prompt", [1])) for request in drawn)
