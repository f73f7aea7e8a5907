"""The openai package sends a request again that a full queue has refused, and gets its answer."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def full(serve, kit):
    """A server with one row and no queue, whose first request keeps the row until ``gate`` is set."""
    gate = threading.Event()

    def script(prompt, decode):
        while not gate.is_set():
            yield []
        yield from kit.left_to_right([*b"here you are", kit.EOS], per_step=2)

    server = serve(script, rows=1, queue_limit=0, step_seconds=0.005)
    with ThreadPoolExecutor(2) as pool:
        server.gate, server.pool = gate, pool
        first = pool.submit(server.chat)
        kit.until(lambda: server.metric("jdllm_requests_running") == 1)
        yield server
        gate.set()
        assert first.result().json()["choices"][0]["message"]["content"] == "here you are"


def plain(url: str) -> str:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=5) as client:
        return client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content


def stream(url: str) -> str:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=5) as client:
        chunks = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def plain_async(url: str) -> str:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=5) as client:
            reply = await client.chat.completions.create(model="tiny", messages=MESSAGES)
            return reply.choices[0].message.content

    return asyncio.run(ask())


def stream_async(url: str) -> str:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=5) as client:
            chunks = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    return asyncio.run(ask())


@pytest.mark.parametrize("ask", [plain, stream, plain_async, stream_async])
def test_a_refused_request_is_sent_again_and_answered(full, kit, ask: Callable[[str], str]):
    answer = full.pool.submit(ask, f"{full.url}/v1")
    kit.until(lambda: full.metric("jdllm_requests_rejected_total") == 1)
    full.gate.set()
    assert answer.result(30) == "here you are"
    assert full.metric("jdllm_requests_admitted_total") == 2


def test_without_retries_the_error_says_when_to_come_back(full):
    with (
        openai.OpenAI(base_url=f"{full.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as error,
    ):
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert error.value.code == "rate_limit_exceeded" and error.value.type == "rate_limit_error"
    assert 1 <= int(error.value.response.headers["retry-after"]) <= 120
    assert error.value.request_id
