"""Many clients, slow ones, and those that leave: nobody else waits for them, and nothing of them stays."""

import asyncio
import contextlib
import gc
import json
import random
import re
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jdllm.serving.calls import Call
from jdllm.serving.job import Job

FEW = 5
"""Calls and jobs that the threads may still hold after all is done, whatever has been asked before: their last ones."""


def living() -> int:
    """Calls and jobs that something holds."""
    gc.collect()
    return sum(type(one) in (Call, Job) for one in gc.get_objects())


def connect(server, small: bool = False) -> socket.socket:
    connection = socket.socket()
    if small:  # before it connects: then the other side learns of it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    return connection


def post(body: dict) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


class Gate:
    """Lets an engine take only so many steps, until it is left."""

    def __init__(self, engine):
        self._engine, self._allowed = engine, threading.Semaphore(0)
        engine.fault = self._allowed.acquire

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._engine.fault = None
        self.allow(1)

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_connections_and_a_slow_reader_hold_nobody_up(serve, kit, many_files):
    """A thousand that say nothing or half a request, and one that reads nothing while its answer is made."""
    server = serve(kit.says("x", end=False), rows=2, length=8192)
    listener = server.listener
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections have it too
    with contextlib.ExitStack() as stack:
        for k in range(1000):
            idle = stack.enter_context(connect(server))
            idle.sendall(b"POST /v1/completions HTTP/1.1\r\nHo" * (k % 2))
        slow = stack.enter_context(connect(server, small=True))
        slow.sendall(post({"prompt": "a", "max_tokens": 3000, "stream": True}))
        kit.until(lambda: server.engine.rows)
        assert server.complete("b", max_tokens=5).json()["choices"][0]["text"] == "xxxxx"
        kit.until(lambda: server.metric("jdllm_requests_finished_total") == 2)
        slow.settimeout(20)
        raw = b""
        while b"data: [DONE]" not in raw:
            more = slow.recv(1 << 16)
            assert more, "closed too soon"
            raw += more
    texts = re.findall(rb'"text":"(x+)"', raw)
    assert len(texts) > 1 and sum(map(len, texts)) == 3000


def test_a_closed_stream_leaves_at_the_next_step_and_its_neighbour_stays_as_it_is(serve, kit):  # C4
    def script(prompt, decode):
        text = b"undisturbed" if prompt == list(b"kept") else b"x" * decode.max_tokens
        return kit.left_to_right([*text, *[kit.EOS] * decode.max_tokens][: decode.max_tokens])

    server = serve(script, rows=2, length=8000)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    with ThreadPoolExecutor(1) as pool, Gate(server.engine) as gate:
        kept = pool.submit(server.complete, "kept", max_tokens=100)
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            kit.until(lambda: server.metric("jdllm_requests_admitted_total") == 2)
            gate.allow(4)
            next(response.iter_lines())
        gone = lambda: server.metric("jdllm_requests_cancelled_total") == 1
        kit.until(lambda: gone() or any(job.cancelled for job in list(server.loop._running.values())))
        gate.allow(2)  # one is under way, perhaps; and no more than these are needed
        kit.until(lambda: len(server.engine.rows) == 1 and server.metric("jdllm_requests_running") == 1)
    assert kept.result().json()["choices"][0]["text"] == "undisturbed" and gone()


def test_two_hundred_dropped_streams_leave_nothing(serve, kit):  # C4
    before = living()
    server = serve(kit.says("x", end=False), rows=1, length=8000, step_seconds=0.001)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    for _ in range(200):
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) and not next(lines) and next(lines)  # two events
    assert server.complete("b", max_tokens=2).json()["choices"][0]["text"] == "xx"  # it waited for the row
    kit.until(lambda: server.loop.idle and not server.engine.rows)
    assert server.metric("jdllm_requests_cancelled_total") == 200 and server.engine.steps < 200 * 400
    kit.until(lambda: living() <= before + FEW)


def test_five_hundred_answered_requests_leave_nothing(serve, kit):  # C5
    before = living()
    server = serve(kit.says("ok"))
    with ThreadPoolExecutor(4) as pool:
        assert {reply.status_code for reply in pool.map(server.complete, ["a"] * 500)} == {200}
    kit.until(lambda: living() <= before + FEW)


def test_a_thousand_answers_reach_slow_readers_whole(serve, kit):  # C8
    server = serve(kit.says("seven!!"), rows=32)
    rng = random.Random(0)

    async def one(client: httpx.AsyncClient) -> list[str]:
        texts = [""] * 20
        body = {"prompt": "a", "stream": True, "n": len(texts)}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    texts[choice["index"]] += choice["text"]
                    if rng.random() < 0.1:
                        await asyncio.sleep(0.01)
        return texts

    async def many() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            rounds = [await asyncio.gather(*(one(client) for _ in range(10))) for _ in range(5)]
        return [text for texts in rounds for some in texts for text in some]

    assert asyncio.run(many()) == ["seven!!"] * 1000


def test_news_that_comes_late_and_out_of_order_changes_no_text(serve, kit):  # C9
    server = serve(kit.echoes(per_step=1), rows=8)
    post_now, rng = server.loop._post, random.Random(0)
    server.loop._post = lambda tell: post_now(
        lambda: asyncio.get_running_loop().call_later(rng.random() / 100, tell) and None
    )
    words = ["".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 20)) for _ in range(64)]

    def one(word: str) -> str:
        events = server.events("/v1/completions", prompt=word, max_tokens=30)
        return "".join(event["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, words)) == [word.upper() for word in words]


def test_those_that_leave_the_queue_hold_up_nobody(serve, kit):  # C11
    """Forty requests for four rows, a third of which leaves while it waits; the longest wait is on /metrics."""
    server = serve(kit.echoes(per_step=1), rows=4)
    counted = lambda name, count: server.metric(f"jdllm_requests_{name}") == count

    async def forty() -> list[str]:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client:
            tasks = []
            with Gate(server.engine):
                for k in range(40):
                    tasks.append(asyncio.ensure_future(client.post("/v1/completions", json={"prompt": f"word{k}"})))
                    await asyncio.to_thread(kit.until, lambda k=k: counted("admitted_total", k + 1))
                leaving = tasks[5::3]
                for task in leaving:
                    task.cancel()
                await asyncio.to_thread(kit.until, lambda: counted("cancelled_total", len(leaving)))
                assert counted("waiting", 39 - len(leaving)) and server.metric("jdllm_oldest_wait_seconds") > 0
            kept = [task for task in tasks if task not in leaving]
            return [reply.json()["choices"][0]["text"] for reply in await asyncio.gather(*kept)]

    assert asyncio.run(forty()) == [f"WORD{k}" for k in range(40) if k < 5 or k % 3 != 2]
    assert server.metric("jdllm_oldest_wait_seconds") == 0 and server.loop.idle
