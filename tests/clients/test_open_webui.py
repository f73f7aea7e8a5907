"""What open-webui (0.12) sends to an OpenAI connection, and what it makes of the answers.

The application itself brings a database and a user interface. These are its requests, and its rules for reading.
"""

import json

import httpx
import pytest


def chat_payload(message: str, model: str = "orders-d2f", **more) -> dict:
    """A chat of the user interface, as it leaves: everything of its own was taken out again."""
    return {"stream": True, "model": model, "messages": [{"role": "user", "content": message}], **more}


def read(line: str, message: dict) -> None:
    """One line of a stream. usage may be missing, null or an object, on any line."""
    if not line.startswith("data:") or line.removeprefix("data:").strip() == "[DONE]":
        return
    data = json.loads(line.removeprefix("data:"))
    message["usage"] = {**message.get("usage", {}), **(data.get("usage") or {})}
    if not (choices := data.get("choices", [])):
        assert not data.get("error"), data
        return
    message["finish_reason"] = choices[0].get("finish_reason") or message.get("finish_reason")
    message["content"] = message.get("content", "") + (choices[0].get("delta", {}).get("content") or "")


def ask(url: str, payload: dict, key: str = "") -> dict:
    """The message that a chat puts together."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    message: dict = {}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", content=json.dumps(payload), headers=headers, timeout=60
    ) as response:
        assert response.status_code == 200, response.read()
        assert "text/event-stream" in response.headers["content-type"]
        for line in response.iter_lines():
            read(line, message)
    return message


def test_the_connection_lists_the_model(server):
    reply = httpx.get(f"{server.url}/v1/models", headers={"Content-Type": "application/json"})
    assert reply.status_code == 200
    assert [model.get("id") or model.get("name") for model in reply.json()["data"]] == ["orders-d2f"]


def test_a_chat_shows_the_answer(server, orders):
    for order in orders:
        message = ask(server.url, chat_payload(order.message))
        assert message["content"] == order.answer and message["finish_reason"] == "stop" and not message["usage"]


def test_a_model_with_the_usage_capability_shows_its_tokens(server, orders):
    options = {"stream_options": {"include_usage": True}}
    message = ask(server.url, chat_payload(orders[1].message, **options))
    assert message["content"] == orders[1].answer
    assert message["usage"]["prompt_tokens"] > 0 and message["usage"]["completion_tokens"] > 0


def test_every_control_of_the_sidebar_may_be_at_its_default(server, orders):
    """Those of other servers as well: it does not filter them."""
    controls = dict(
        temperature=0.0,
        top_k=40,
        top_p=0.9,
        min_p=0.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        max_tokens=64,
        seed=0,
        stop=["###"],
        reasoning_effort="medium",
        logit_bias={},
    )
    of_ollama = dict(mirostat=0, mirostat_eta=0.1, repeat_last_n=64, tfs_z=1, num_ctx=2048, think=False, num_gpu=0)
    message = ask(server.url, chat_payload(orders[2].message, **controls, **of_ollama))
    assert message["content"] == orders[2].answer


def test_a_title_is_asked_for_without_a_stream(serve, kit):
    server = serve(kit.says('{ "title": "Order" }'), length=2048)
    payload = chat_payload("### Task:\nGenerate a concise title.", "tiny", stream=False, max_tokens=1000)
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=payload, timeout=60).json()
    assert json.loads(reply["choices"][0]["message"]["content"]) == {"title": "Order"}


def test_a_title_that_finds_no_room_is_an_error_in_json(server):
    """The chat goes on without one."""
    payload = chat_payload("### Task:\nGenerate a concise title.", stream=False, max_tokens=1000)
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=payload, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


def test_its_own_tools_are_refused_with_a_message_that_it_can_show(server, orders):
    """It sends some with every chat, unless the model's capability "Builtin Tools" is unticked."""
    time = {"name": "get_current_timestamp", "description": "", "parameters": {"type": "object", "properties": {}}}
    payload = chat_payload(orders[0].message, tools=[{"type": "function", "function": time}])
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=payload, timeout=60)
    assert reply.status_code == 400 and "application/json" in reply.headers["content-type"]
    assert "tools" in reply.json()["error"]["message"]


def test_a_wrong_key_is_an_error_in_json_and_the_right_one_chats(serve, kit):
    server = serve(kit.says("ok"), api_keys=("sk-1",))
    for headers in ({}, {"Authorization": "Bearer sk-2"}):
        reply = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer sk-1"}).json()["data"]
    assert ask(server.url, chat_payload("Hi", "tiny"), "sk-1")["content"] == "ok"


@pytest.mark.parametrize("first_lines", [0, 1])
def test_the_stop_button_ends_the_work(serve, kit, first_lines):
    """It closes the connection, before the first line or between two."""
    server = serve(kit.says("x", end=False), length=2000, step_seconds=0.01)
    payload = chat_payload("Hi", "tiny", max_tokens=1500)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=payload, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(first_lines):
            assert next(lines).startswith("data:")
    kit.until(lambda: server.metric("jdllm_requests_running") == 0)
    steps = server.engine.steps
    assert steps < 1500 and server.metric("jdllm_requests_cancelled_total") == 1
