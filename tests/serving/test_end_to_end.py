"""The real thing: a converted checkpoint, ``python -m jdllm.serve`` as a process, the openai package as client."""

import asyncio
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from server_process import Process

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from jdllm.convert.__main__ import main as convert

    folder = tmp_path_factory.mktemp("end to end") / "tiny"
    assert convert([str(GOLDEN / "llada-tiny"), str(folder), "--lora", str(GOLDEN / "llada-tiny-d2f-lora")]) == 0
    return folder


@pytest.fixture(scope="module")
def server(model):
    process = Process(model)
    begin = time.perf_counter()  # while it loads and compiles
    assert httpx.get(f"{process.url}/health").status_code == 200
    process.health_seconds = time.perf_counter() - begin
    process.early = httpx.get(f"{process.url}/ready")
    process.wait_for("ready after", 300)
    threads = Path(f"/proc/{process.process.pid}/task").glob("*/stat")
    process.nice = {int(stat.parent.name): int(stat.read_text().rpartition(")")[2].split()[16]) for stat in threads}
    yield process
    process.process.kill()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_alive_before_it_is_ready(server):  # C10
    assert server.health_seconds < 1
    assert server.early.status_code == 503 and re.search("loading|compiling|compiled", server.early.json()["reason"])
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert "warning" not in server.log  # the checkpoint has its adapter
    assert "curl" in server.log and re.search(r"compiled 1 of \d+", server.log)


def test_openai_plain_and_stream_agree(client):
    name = client.models.list().data[0].id
    assert name == "tiny" and client.models.retrieve(name).id == name
    fields = dict(model=name, messages=MESSAGES, max_tokens=24, extra_body={"block_size": 8, "skip_threshold": 0.5})
    plain = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert plain.choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    assert chunks[-1].usage == plain.usage and chunks[-2].choices[0].finish_reason == plain.choices[0].finish_reason


def test_openai_completions_and_seed(client):
    def ask(seed: int) -> str:
        fields = dict(model="tiny", prompt=[360, 85, 270], max_tokens=16, temperature=1.0, seed=seed)
        return client.completions.create(**fields).choices[0].text

    assert ask(1) == ask(1) != ask(2)


def test_openai_async(server):
    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            fields = dict(model="tiny", messages=MESSAGES, max_tokens=8)
            answers = await asyncio.gather(*(client.chat.completions.create(**fields) for _ in range(4)))
            return [answer.choices[0].message.content for answer in answers]

    assert len(set(asyncio.run(many()))) == 1


def test_openai_errors(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=100)
    assert error.value.code == "context_length_exceeded" and "64" in error.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=MESSAGES)


def test_nothing_compiles_after_ready(server, client):  # I3
    for fields in (dict(temperature=0.7, top_p=0.9, seed=5), dict(n=2), dict(stop=["a"]), dict(max_tokens=1)):
        client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
    assert "jdllm_recompiles_after_ready_total 0.0" in httpx.get(f"{server.url}/metrics").text


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_the_clients_thread_comes_behind_the_models(server):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert server.nice.pop(server.process.pid) == min(own + 10, 19)
    assert len(server.nice) > 1 and set(server.nice.values()) == {own}  # the engine's thread and XLA's


def test_dropped_connection_frees_the_row(server):
    body = '{"prompt": [360], "max_tokens": 60, "skip_threshold": 1.0, "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall((head + body).encode())
            connection.recv(100)
    end = time.monotonic() + 10
    while "jdllm_requests_running 0.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < end


def test_sigterm_lets_running_requests_end(server):  # runs last: the server is gone afterwards
    answers = []

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": [360, 5], "max_tokens": 60}))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    assert server.end() == 0, server.log
    thread.join()
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] >= 0
    assert "Traceback" not in server.log


def test_sigterm_while_it_compiles(model, tmp_path):
    process = Process(model, "--compile-cache", str(tmp_path))
    process.wait_for("loading", 60)
    assert process.end() == 0 and "Traceback" not in process.log


def test_checkpoint_that_cannot_be_served(model, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "tokenizer.json").unlink()
    process = Process(broken)
    assert process.process.wait(60) == 1
    process.reader.join()
    assert "has no tokenizer" in process.log and "Traceback" not in process.log
