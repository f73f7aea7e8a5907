"""What the openai package makes of our errors: it tries again where that helps, and not where it does not."""

import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest


@pytest.fixture
def client():
    clients = []

    def open_client(server) -> openai.OpenAI:
        clients.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5))
        return clients[-1]

    yield open_client
    for each in clients:
        each.close()


def test_it_comes_back_when_the_queue_was_full(serve, kit, client):
    server = serve(kit.says("x", end=False), rows=1, queue_limit=0)
    held = threading.Event()
    server.engine.fault = lambda: held.wait(20)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.complete, "a", max_tokens=60)
        kit.until(lambda: server.engine.rows)
        second = pool.submit(client(server).completions.create, model="tiny", prompt="b", max_tokens=3)
        kit.until(lambda: server.metric("jdllm_requests_rejected_total") == 1)
        held.set()
        assert first.result().status_code == 200 and second.result().choices[0].text == "xxx"


def test_it_does_not_repeat_what_missed_its_deadline(serve, kit, client):
    server = serve(kit.says("x", end=False), rows=1, length=5000, step_seconds=0.01)
    with pytest.raises(openai.APIStatusError) as error:
        client(server).completions.create(model="tiny", prompt="a", max_tokens=4000, extra_body={"deadline_ms": 50})
    assert error.value.status_code == 504 and error.value.request_id
    assert server.metric("jdllm_requests_admitted_total") == 1


def test_it_raises_what_goes_wrong_inside_a_stream(serve, kit, client):
    server = serve(lambda prompt, decode: [*kit.left_to_right(b"abc"), None])
    stream = client(server).completions.create(model="tiny", prompt="a", max_tokens=9, stream=True)
    with pytest.raises(openai.APIError, match="non-finite"):
        list(stream)
