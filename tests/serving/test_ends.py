"""Where an answer ends: its length, the context, stop strings."""

import itertools
import time

import pytest

from jdllm.config import DecodeConfig


def chat_body(**fields):
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}


def text_of(events):
    return "".join(c["delta"].get("content", "") for e in events for c in e["choices"] if "delta" in c)


@pytest.mark.parametrize("n", [1, 5, 20])
def test_exact_number_of_tokens(serve, kit, n):  # E3
    server = serve(kit.says("x", end=False))
    reply = server.chat(max_tokens=n).json()
    assert reply["usage"]["completion_tokens"] == n and reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["message"]["content"] == "x" * n
    events = server.events("/v1/chat/completions", **chat_body(max_tokens=n), stream_options={"include_usage": True})
    assert events[-1]["usage"] == reply["usage"] and events[-2]["choices"][0]["finish_reason"] == "length"


def test_answer_of_three_tokens_in_a_block_of_eight(serve, kit):  # E3
    reply = serve(kit.says("abc", per_step=8)).chat(max_tokens=8, block_size=8).json()
    assert reply["usage"]["completion_tokens"] == 3 and reply["choices"][0]["finish_reason"] == "stop"


def test_stop_strings(serve, kit):  # D1, E7
    server = serve(kit.says("abc<END>def", per_step=4))
    body = chat_body(stop=["<END>"])
    reply = server.http.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] == "abc" and reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 3
    events = server.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert text_of(events) == "abc" and events[-1]["usage"]["completion_tokens"] == 3
    for nothing in ([], "", ["", "zz"], None):
        assert server.chat(stop=nothing).json()["choices"][0]["message"]["content"] == "abc<END>def"
    for bad in (list("abcdefghijklmnopq"), 5, [5], {"a": "b"}):
        refused = server.chat(stop=bad)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop"


def test_stop_ends_the_row_at_once(serve, kit):
    server = serve(kit.says("ab", end=False))
    assert server.complete("x", max_tokens=100, stop="bab").json()["choices"][0]["text"] == "a"
    assert server.engine.steps < 10


def test_default_max_tokens_is_capped_by_the_room(serve, kit):  # E12
    server = serve(kit.says("x", end=False), length=64)
    assert server.complete([65] * 60).json()["usage"]["completion_tokens"] == 4
    server = serve(kit.says("x", end=False), length=256)
    assert server.complete([65]).json()["usage"]["completion_tokens"] == DecodeConfig.max_tokens  # as jdllm.generate
    server = serve(kit.says("x", end=False), length=128, defaults={"max_tokens": 9})
    assert server.complete([65]).json()["usage"]["completion_tokens"] == 9
    body = {"max_tokens": 3, "max_completion_tokens": 5}
    assert server.chat(**body).json()["usage"]["completion_tokens"] == 5


def test_context_length(serve, kit):  # C3
    server = serve(kit.says("ok"), length=64)
    for stream in (False, True):
        for prompt, tokens in (([65] * 65, None), ([65] * 60, 10), ([65] * 64, 1), ([65] * 64, None)):
            refused = server.complete(prompt, max_tokens=tokens, stream=stream)
            assert refused.status_code == 400 and refused.headers["content-type"] == "application/json"
            error = refused.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert str(len(prompt)) in error["message"] and "64" in error["message"]
    assert server.complete("a").status_code == 200
    begin = time.perf_counter()
    for body in (chat_body(), {"messages": [{"role": "user", "content": "x" * 2_000_000}]}):
        path = "/v1/chat/completions"
        reply = server.http.post(path, json=body)
    assert reply.json()["error"]["code"] == "context_length_exceeded" and time.perf_counter() - begin < 1


def test_a_stop_string_that_comes_in_pieces_is_never_shown(serve, kit):  # D1
    def script(prompt, decode):
        pieces = [list(b"abc<"), list(b"EN"), list(b"D>def")]
        ends = itertools.accumulate(map(len, pieces))
        return [list(enumerate(piece, end - len(piece))) for piece, end in zip(pieces, ends, strict=True)]

    events = serve(script, step_seconds=0.02).events("/v1/completions", prompt="x", stop=["<END>"], max_tokens=11)
    assert [c["text"] for e in events for c in e["choices"]] == ["abc", ""]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_text_that_cannot_begin_a_stop_string_is_not_held_back(serve, kit):  # D7
    server = serve(kit.says("hello"), step_seconds=0.02)
    events = server.events("/v1/chat/completions", **chat_body(stop=["zzzz"]))
    assert [c["delta"].get("content") for e in events for c in e["choices"]] == [*"hello", None]
