"""What ``vllm bench serve`` (0.33) sends with --backend openai and openai-chat, and what it makes of the stream.

The tool itself needs all of vLLM. These are its requests, field by field, and its rules for reading.
"""

import codecs
import dataclasses
import json

import httpx
import pytest


@dataclasses.dataclass
class Seen:
    """What one request of the benchmark measures. ``chunks``: times at which it saw tokens; the first is its TTFT."""

    text: str = ""
    chunks: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0


def send(url: str, payload: dict, request_id: str) -> Seen:
    """One request, read as the benchmark reads it: raw pieces cut at blank lines; in a piece that has not ended yet
    JSON counts as soon as it is whole."""
    seen, buffer, text = Seen(), "", codecs.getincrementaldecoder("utf-8")()
    headers = {"x-request-id": request_id}
    with httpx.stream("POST", url, json=payload, headers=headers, timeout=60) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["x-request-id"] == request_id
        for piece in response.iter_raw():
            buffer += text.decode(piece)
            *messages, buffer = buffer.split("\n\n")
            if whole(buffer):
                messages, buffer = [*messages, buffer], ""
            for message in map(str.strip, messages):
                if message and not message.startswith(":"):
                    read(message.removeprefix("data: "), seen)
    assert not buffer
    return seen


def whole(message: str) -> bool:
    try:
        return message.startswith("data: ") and bool(json.loads(message.removeprefix("data: ")))
    except ValueError:
        return False


def read(chunk: str, seen: Seen) -> None:
    if chunk == "[DONE]":
        return
    data = json.loads(chunk)
    if not (choices := data.get("choices")):
        usage = data.get("usage") or {}
        seen.output_tokens, seen.prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
    elif "text" in choices[0]:  # completions: every chunk with a choice is a token, an empty one too
        seen.chunks += 1
        seen.text += choices[0]["text"] or ""
    else:
        delta = choices[0].get("delta") or {}
        if delta.get("content") or (delta.get("content") == "" and "role" not in delta):
            seen.chunks += 1
            seen.text += delta["content"]


@pytest.fixture
def model(server) -> str:
    """The benchmark takes the first model of the list."""
    return httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]


def chat_payload(model: str, message: str, tokens: int, **more) -> dict:
    content = [{"type": "text", "text": message}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_completion_tokens": tokens, **options, **more}


def completions_payload(model: str, prompt: str | list[int], tokens: int, **more) -> dict:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    fixed = {"repetition_penalty": 1.0, "max_tokens": tokens, "logprobs": None}
    return {"model": model, "prompt": prompt, **fixed, **options, **more}


def test_chat_gives_the_answer_and_its_tokens(server, model, orders):
    for i, order in enumerate(orders):
        payload = chat_payload(model, order.message, 64)
        seen = send(f"{server.url}/v1/chat/completions", payload, f"bench-{i}")
        plain = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={**payload, "stream": False, "stream_options": None},
            timeout=60,
        ).json()
        assert seen.text == order.answer and seen.chunks > 0
        assert seen.output_tokens == plain["usage"]["completion_tokens"]
        assert seen.prompt_tokens == plain["usage"]["prompt_tokens"]


def test_completions_give_the_answer_and_its_tokens(server, model, orders, written):
    for i, order in enumerate(orders):
        payload = completions_payload(model, written(order.message), 64)
        seen = send(f"{server.url}/v1/completions", payload, f"bench-{i}")
        assert seen.text == order.answer and seen.chunks > 0
        assert 0 < seen.output_tokens <= 64 and seen.prompt_tokens > 0


@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_random_prompts_get_exactly_the_tokens_asked_for(server, model, tokens):
    """--dataset-name random sends ids, and sets ignore_eos."""
    payload = completions_payload(model, [5 * i + 1 for i in range(20)], tokens, ignore_eos=True)
    seen = send(f"{server.url}/v1/completions", payload, "bench-random")
    assert seen.output_tokens == tokens and seen.prompt_tokens == 20 and seen.chunks > 0
    payload = chat_payload(model, "Please send 3 cups.", tokens, ignore_eos=True)
    seen = send(f"{server.url}/v1/chat/completions", payload, "bench-random")
    assert seen.output_tokens == tokens and seen.chunks > 0


def test_an_answer_without_text_is_still_a_first_token(serve, kit):
    """A request that saw no token is counted as failed."""
    server = serve(kit.says(""))
    seen = send(f"{server.url}/v1/completions", completions_payload("tiny", "Hi", 8), "bench-0")
    assert seen.text == "" and seen.chunks == 1 and seen.prompt_tokens == 2


def test_pings_are_skipped(serve, kit):
    server = serve(kit.says("ok"), step_seconds=0.05, keep_alive=0.01)
    seen = send(f"{server.url}/v1/chat/completions", chat_payload("tiny", "Hi", 8), "bench-0")
    assert seen.text == "ok" and seen.output_tokens == 2


def test_without_a_model_name_it_finds_name_and_tokenizer_in_the_list(server):
    """The tool loads the tokenizer from ``root``, and ends with a KeyError where there is none."""
    import transformers

    card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert card["id"] == "orders-d2f"
    assert transformers.PreTrainedTokenizerFast.from_pretrained(card["root"], local_files_only=True).chat_template
