"""Joining, leaving, faults, shutdown: the life of requests."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from jdllm.serving.loop import MOST_FAULTS
from jdllm.serving.schedulers import Slot


def abandoned_post(server, body: dict, seconds: float, path="/v1/completions") -> None:
    """A plain POST whose client hangs up after a while."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(seconds)


def quiet(server) -> bool:
    return server.loop.idle


def test_every_client_gets_its_own_answer(serve, kit):  # C1, C9
    server = serve(kit.echoes(per_step=1))

    def ask(k: int) -> bool:
        return server.chat(f"word{k}x", max_tokens=12).json()["choices"][0]["message"]["content"] == f"WORD{k}X"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(160)))
    assert server.metric("jdllm_requests_finished_total") == 160


def test_streams_keep_their_order(serve, kit):  # C9
    server = serve(kit.echoes(per_step=1), rows=8)
    word = "abcdefghijklmnopqrstuvwxyz"

    async def one(client: httpx.AsyncClient) -> str:
        text = ""
        body = {"prompt": word, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    await asyncio.sleep(0.001)
        return text

    async def many() -> list[str]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client:
            return await asyncio.gather(*(one(client) for _ in range(64)))

    assert set(asyncio.run(many())) == {word.upper()}


def test_slow_reader_gets_everything(serve, kit):  # C8
    server = serve(kit.says("seven!!"))
    with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        text = ""
        for line in response.iter_lines():
            time.sleep(0.02)
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == "seven!!"


def test_dropped_stream_frees_its_row(serve, kit):  # C4
    server = serve(kit.says("x", end=False), rows=1, length=8000, step_seconds=0.02)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    for _ in range(3):
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        left = server.engine.steps
        kit.until(lambda: quiet(server))
        assert server.engine.steps - left <= 4
    assert server.complete("b", max_tokens=2).json()["choices"][0]["text"] == "xx"
    assert server.metric("jdllm_requests_cancelled_total") == 3 and not server.engine.rows


def test_dropped_plain_post_frees_its_row(serve, kit):  # C5
    server = serve(kit.says("x", end=False), rows=1, length=8000, step_seconds=0.01)
    abandoned_post(server, {"prompt": "a", "max_tokens": 4000}, 0.1)
    kit.until(lambda: quiet(server))
    assert server.engine.steps < 40 and server.metric("jdllm_requests_cancelled_total") == 1


def test_request_that_left_the_queue_never_starts(serve, kit):
    prompts = []

    def script(prompt, decode):
        prompts.append(bytes(prompt))
        return kit.says("x", end=False)(prompt, decode)

    server = serve(script, rows=1, length=500, step_seconds=0.01)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.complete, "first", max_tokens=60)
        kit.until(lambda: prompts)
        abandoned_post(server, {"prompt": "second"}, 0.1)
        kit.until(lambda: server.metric("jdllm_requests_cancelled_total") == 1)
        assert first.result().json()["usage"]["completion_tokens"] == 60
    assert prompts == [b"first"]


def test_mass_cancel(serve, kit):  # C7, C11
    server = serve(kit.echoes(per_step=1), rows=4, step_seconds=0.002)

    async def rush() -> None:
        no_pool = httpx.Limits(max_connections=None)  # it would lose places to calls cancelled as they connect
        async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=no_pool) as client:
            for _ in range(20):
                lost = [
                    asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "a" * 40})) for _ in range(50)
                ]
                kept = [
                    asyncio.ensure_future(client.post("/v1/completions", json={"prompt": f"keep{i}"})) for i in range(5)
                ]
                await asyncio.sleep(0.03)
                for task in lost:
                    task.cancel()
                for i, response in enumerate(await asyncio.gather(*kept)):
                    assert response.json()["choices"][0]["text"] == f"KEEP{i}"

    asyncio.run(rush())
    kit.until(lambda: quiet(server))
    assert server.reconciles()


def test_counters_equal_usage(serve, kit):
    server = serve(kit.echoes())
    replies = [server.chat(f"w{k}", n=2).json()["usage"] for k in range(5)]
    server.events("/v1/completions", prompt="hello", max_tokens=3)
    assert server.metric("jdllm_generation_tokens_total") == sum(u["completion_tokens"] for u in replies) + 3
    assert server.metric("jdllm_prompt_tokens_total") == sum(u["prompt_tokens"] for u in replies) + 5
    assert server.reconciles() and server.metric("jdllm_recompiles_after_ready_total") == 0


def test_finished_requests_leave_nothing(serve, kit):  # C5
    server = serve(kit.says("ok"))
    for _ in range(200):
        assert server.complete("a").status_code == 200
    assert not server.engine.rows and server.loop.idle and not server.loop._news


def test_block_at_the_end_of_the_canvas(serve, kit):  # C2
    server = serve(kit.says("x", end=False, per_step=8), length=32)
    assert server.complete([65] * 27, max_tokens=5, block_size=8).json()["usage"]["completion_tokens"] == 5


def test_queue_limit(serve, kit):
    server = serve(kit.says("x", end=False), rows=1, length=500, step_seconds=0.01, queue_limit=1)
    with ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(server.complete, "a", max_tokens=40) for _ in range(2)]
        kit.until(lambda: server.loop._running and server.loop._waiting)
        refused = server.complete("a")
        assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 120 and int(refused.headers["retry-after-ms"]) >= 100
        assert all(t.result().status_code == 200 for t in taken)
    assert server.metric("jdllm_requests_rejected_total") == 1


def test_health_while_loading(serve, kit):  # C10
    server = serve(kit.says("ok"), open_seconds=0.5, wait=False)
    assert server.http.get("/health").status_code == 200
    ready = server.http.get("/ready")
    assert ready.status_code == 503 and "loading" in ready.json()["reason"]
    early = server.chat()
    assert early.status_code == 503 and early.headers["retry-after"]
    kit.until(lambda: server.http.get("/ready").status_code == 200)
    assert server.chat().status_code == 200


def test_failed_load_is_not_ready_and_says_why(serve, kit):
    server = serve(kit.says("ok"), wait=False, fail_open=ValueError("no weights"))
    kit.until(lambda: server.loop.state == "failed")
    assert "no weights" in server.http.get("/ready").json()["reason"]
    assert server.chat().status_code == 503 and server.http.get("/health").status_code == 200


def test_fault_in_a_step(serve, kit):  # I8
    server = serve(kit.says("x", end=False), rows=2, length=500, step_seconds=0.005)

    def once() -> None:
        if len(server.engine.rows) == 2:
            server.engine.fault = None
            raise RuntimeError("injected")

    server.engine.fault = once
    with ThreadPoolExecutor(3) as pool:
        replies = [r.result() for r in [pool.submit(server.complete, "a", max_tokens=50) for _ in range(3)]]
    codes = sorted(r.status_code for r in replies)
    assert codes == [200, 500, 500]  # the third waited, and its turn came
    assert next(r for r in replies if r.status_code == 500).json()["error"]["type"] == "server_error"
    assert server.engine.resets == 1 and server.complete("b", max_tokens=3).status_code == 200
    assert server.reconciles() and server.metric("jdllm_requests_failed_total") == 2


def test_fault_in_a_stream(serve, kit):
    server = serve(kit.says("x", end=False), length=500)

    def later() -> None:
        if server.engine.steps > 3:
            server.engine.fault = None
            raise RuntimeError("injected")

    server.engine.fault = later
    with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert response.status_code == 200 and "error" in json.loads(lines[-1][6:]) and "DONE" not in lines[-1]


def fails_for(word: bytes, kit):
    """Prompts with the word fail after three tokens, the others get theirs."""

    def script(prompt, decode):
        steps = kit.left_to_right([120] * decode.max_tokens)
        return [*steps[:3], None] if word in bytes(i for i in prompt if i < 256) else steps

    return script


def test_a_row_that_failed_is_an_error_of_its_request_alone(serve, kit):
    server = serve(fails_for(b"bad", kit), rows=3, step_seconds=0.01)
    with ThreadPoolExecutor(3) as pool:
        replies = [pool.submit(server.complete, text, max_tokens=20) for text in ("good", "bad", "fine")]
        good, bad, fine = [r.result() for r in replies]
    for reply in (good, fine):
        assert reply.json()["choices"][0]["text"] == "x" * 20
    error = bad.json()["error"]
    assert bad.status_code == 500 and error["type"] == "server_error" and "non-finite" in error["message"]
    assert server.engine.resets == 0 and not server.engine.rows and server.loop.idle
    assert server.metric("jdllm_requests_failed_total") == 1 and server.reconciles()
    assert server.http.get("/ready").status_code == 200


def test_a_row_that_failed_ends_its_stream_with_an_error(serve, kit):
    server = serve(fails_for(b"bad", kit), rows=1)
    for path, body in (
        ("/v1/completions", {"prompt": "bad"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "bad"}]}),
    ):
        with server.http.stream("POST", path, json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data:")]
        assert "non-finite" in json.loads(lines[-1][6:])["error"]["message"]
    assert server.complete("good", max_tokens=4).json()["choices"][0]["text"] == "xxxx"  # in the slot they had
    assert server.metric("jdllm_requests_failed_total") == 2 and server.reconciles()


def test_a_failed_choice_takes_its_call_with_it(serve, kit):
    server = serve(fails_for(b"bad", kit), rows=1)
    assert server.complete(["good", "bad", "good"], max_tokens=8).status_code == 500
    kit.until(lambda: quiet(server))
    assert server.metric("jdllm_requests_failed_total") == 1 and server.reconciles()


def test_idle_waits_for_a_job_on_its_way_to_a_slot(serve, kit):
    server = serve(kit.says("x"))
    seen = []
    with server.loop._changed:  # as the engine's thread does while it moves a job
        looking = threading.Thread(target=lambda: seen.append(server.loop.idle))
        looking.start()
        looking.join(0.1)
        assert not seen
    looking.join()
    assert seen == [True]


def test_fault_that_cannot_be_repaired(serve, kit):
    server = serve(kit.says("x"))

    def fail(*_) -> None:
        raise RuntimeError("the device is gone")

    server.engine.fault = server.engine.reset = fail
    assert server.complete("a").status_code == 500
    kit.until(lambda: server.http.get("/ready").status_code == 503)
    assert "the device is gone" in server.http.get("/ready").json()["reason"]
    assert server.complete("a").status_code == 503 and server.http.get("/health").status_code == 200


class Faulty(Slot):
    """Fails whenever somebody waits."""

    steers = True

    def decide(self, view, now):
        if view.waiting:
            raise RuntimeError("no decision")
        return super().decide(view, now)


def test_a_fault_that_comes_again_and_again_ends_the_server(serve, kit):
    """Not a circle of resets, with the queue waiting for ever."""
    server = serve(kit.says("x"), policy=Faulty())
    assert server.complete("a").status_code == 503
    assert server.loop.state == "failed" and server.engine.resets == MOST_FAULTS
    assert "no decision" in server.http.get("/ready").json()["reason"]


def test_who_left_is_counted_also_where_the_next_decision_fails(serve, kit):
    class Once(Slot):
        steers = True

        def decide(self, view, now):
            if gone.is_set() and not view.running and not failed.is_set():
                failed.set()
                raise RuntimeError("once")
            return super().decide(view, now)

    gone, failed = threading.Event(), threading.Event()
    server = serve(kit.says("x", end=False), length=500, step_seconds=0.01, policy=Once())
    with ThreadPoolExecutor(1) as pool:
        headers = {"X-Request-ID": "leaves"}
        body = {"prompt": "a", "max_tokens": 300}
        reply = pool.submit(server.http.post, "/v1/completions", json=body, headers=headers)
        kit.until(lambda: server.engine.rows)
        gone.set()
        server.http.post("/v1/abort", json={"request_id": "leaves"})
        assert reply.result().status_code == 499
    kit.until(failed.is_set)
    kit.until(lambda: server.loop.state == "ready" and server.loop.idle)
    assert server.metric("jdllm_requests_cancelled_total") == 1 and server.reconciles()


def test_draining_finishes_what_runs_and_takes_nothing_new(serve, kit):
    server = serve(kit.says("x", end=False), length=500, step_seconds=0.01)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, "a", max_tokens=40)
        kit.until(lambda: server.engine.rows)
        server.loop.drain()
        assert "draining" in server.http.get("/ready").json()["reason"]
        refused = server.complete("b")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert running.result().json()["usage"]["completion_tokens"] == 40
    kit.until(lambda: server.loop.idle)


def test_stop_ends_what_is_left_with_an_error(serve, kit):
    server = serve(kit.says("x", end=False), rows=1, length=5000, step_seconds=0.01)
    with ThreadPoolExecutor(2) as pool:
        left = [pool.submit(server.complete, "a", max_tokens=4000) for _ in range(2)]
        kit.until(lambda: server.loop._waiting and server.engine.rows)
        server.loop.stop()
        assert {r.result().status_code for r in left} == {503}


def test_health_answers_while_a_step_runs(serve, kit):
    server = serve(kit.says("x", end=False), step_seconds=0.3, length=500)
    thread = threading.Thread(target=server.complete, args=("a",), kwargs={"max_tokens": 4})
    thread.start()
    kit.until(lambda: server.engine.rows)
    times = []
    while thread.is_alive():
        begin = time.perf_counter()
        assert server.http.get("/health").status_code == 200
        times.append(time.perf_counter() - begin)
        time.sleep(0.02)
    assert sorted(times)[len(times) // 2] < 0.1


def test_comments_while_a_stream_waits(serve, kit):
    server = serve(kit.says("x", end=False), rows=1, length=500, step_seconds=0.02, keep_alive=0.1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.complete, "a", max_tokens=30)
        kit.until(lambda: server.engine.rows)
        body = {"prompt": "b", "max_tokens": 1, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = list(response.iter_lines())
        first.result()
    assert lines.count(": waiting") >= 2 and lines[-2] == "data: [DONE]"


def test_a_deadline_ends_a_request_in_its_slot_and_in_the_queue(serve, kit):
    """504, not to be repeated; the slot is free at once, and the neighbour goes on."""
    server = serve(kit.says("x", end=False), rows=1, length=4000, step_seconds=0.01)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.complete, "a", max_tokens=2000, deadline_ms=300)
        kit.until(lambda: server.engine.rows)
        queued = pool.submit(server.complete, "b", max_tokens=5, deadline_ms=100)
        patient = pool.submit(server.complete, "c", max_tokens=5, deadline_ms=60_000)
        for late in (first.result(), queued.result()):
            assert late.status_code == 504 and late.headers["x-should-retry"] == "false"
            assert late.json()["error"]["code"] == "deadline_exceeded"
        assert patient.result().json()["choices"][0]["text"] == "xxxxx"
    assert not server.engine.rows and server.metric("jdllm_requests_failed_total") == 2


def test_priority_orders_the_queue(serve, kit):
    order = []

    def script(prompt, decode):
        order.append(bytes(prompt).decode())
        return kit.says("x", end=False)(prompt, decode)

    server = serve(script, rows=1, length=2000, step_seconds=0.005)
    with ThreadPoolExecutor(5) as pool:
        replies = [pool.submit(server.complete, "first", max_tokens=100)]
        kit.until(lambda: order)
        for waiting, (name, priority) in enumerate([("b", 0), ("late", 9), ("c", 0), ("urgent", -1)], 1):
            replies.append(pool.submit(server.complete, name, max_tokens=2, priority=priority))
            kit.until(lambda n=waiting: server.metric("jdllm_requests_waiting") == n)
        assert all(reply.result().status_code == 200 for reply in replies)
    assert order == ["first", "urgent", "b", "c", "late"]


def test_abort_by_request_id(serve, kit):
    """In a slot, in the queue, and streaming: an error that says so; unknown ids abort nothing; the others go on."""
    server = serve(kit.says("x", end=False), rows=1, length=8000, step_seconds=0.01)
    abort = lambda name: server.http.post("/v1/abort", json={"request_id": name}).json()["aborted"]

    def ask(name: str, tokens: int) -> httpx.Response:
        body = {"prompt": "a", "max_tokens": tokens}
        return httpx.post(server.url + "/v1/completions", json=body, headers={"X-Request-ID": name}, timeout=20)

    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(ask, "one", 4000)
        kit.until(lambda: server.engine.rows)
        queued = pool.submit(ask, "two", 4000)
        kit.until(lambda: server.metric("jdllm_requests_waiting") == 1)
        last = pool.submit(ask, "three", 3)
        kit.until(lambda: server.metric("jdllm_requests_waiting") == 2)
        assert abort("four") == 0 and abort("two") == 1 and abort("one") == 1
        for reply in (running.result(), queued.result()):
            assert reply.status_code == 499 and reply.json()["error"]["code"] == "aborted"
        assert last.result().json()["choices"][0]["text"] == "xxx"
    assert abort("one") == 0
    kit.until(lambda: quiet(server))
    assert not server.engine.rows and server.metric("jdllm_requests_cancelled_total") == 2


def test_a_guided_request_holds_two_slots_and_gives_both_back(serve, kit):
    """It waits for both, nobody passes it by, and whatever ends it frees both."""
    server = serve(kit.says("x", end=False), rows=3, length=8000, step_seconds=0.005)
    guided = {"decoder": "llada", "cfg_scale": 1.0, "max_tokens": 3000}
    used = lambda: round(server.metric("jdllm_slots_used_ratio") * 3)
    for _ in range(2):
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, **guided}) as one:
            lines = one.iter_lines()  # kept: a forgotten one closes the stream
            next(lines)
            assert used() == 2
            with ThreadPoolExecutor(2) as pool:
                waiting = pool.submit(server.complete, "b", **{**guided, "max_tokens": 4})
                kit.until(lambda: server.metric("jdllm_requests_waiting") == 1)
                behind = pool.submit(server.complete, "c", max_tokens=2)
                kit.until(lambda: server.metric("jdllm_requests_waiting") == 2)
                one.close()
                assert waiting.result().status_code == behind.result().status_code == 200
        kit.until(lambda: quiet(server))
        assert used() == 0 and not server.engine.rows

    def once() -> None:
        server.engine.fault = None
        raise RuntimeError("injected")

    server.engine.fault = once
    assert server.complete("a", **guided).status_code == 500
    kit.until(lambda: quiet(server))
    assert used() == 0
    tight = serve(kit.says("x", end=False), rows=1)
    assert tight.complete("a", **{**guided, "max_tokens": 8}).json()["error"]["param"] == "cfg_scale"
