"""Streams: their events, in order, and what they add up to."""

import json

import pytest


def chat_body(**fields):
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}


def text_of(events):
    return "".join(c["delta"].get("content", "") for e in events for c in e["choices"] if "delta" in c)


def test_stream_headers(serve, kit):
    server = serve(kit.says("é🐢"))
    with server.http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read()
    assert "é🐢" in raw.decode().replace('"}', "") or text_of(
        [json.loads(x[6:]) for x in raw.decode().split("\n\n") if x.startswith("data: {")]
    ) == ("é🐢")
    assert raw.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", chat_body()), ("/v1/completions", {"prompt": "a"})])
def test_usage_in_streams(serve, kit, path, body):  # E1, E2
    server = serve(kit.says("abc"))
    events = server.events(path, **body, stream_options={"include_usage": True})
    assert [e["usage"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert all(e["choices"] for e in events[:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
    events = server.events(path, **body, stream_options={"include_usage": False})
    assert all(e["choices"] and "usage" not in e for e in events)
    events = server.events(path, **body, stream_options={"continuous_usage_stats": True, "include_usage": True})
    assert [e["usage"]["completion_tokens"] for e in events][-1] == 3 and all(e["usage"] for e in events)
    refused = server.http.post(path, json={**body, "stream_options": {"include_usage": True}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream_options"


def test_choices_in_a_stream_have_their_index(serve, kit):
    server = serve(kit.echoes())
    events = server.events("/v1/completions", prompt=["abc", "xyz"], n=2)
    texts = ["", "", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["ABC", "ABC", "XYZ", "XYZ"]


@pytest.mark.parametrize("answer", [" lead", "a    .b", "x\n\n  y", "it 's", "ok 🐢 go", "삼겹살", "tail ", ""])
def test_stream_equals_plain(serve, kit, answer):  # D3, D5
    server = serve(kit.says(answer))
    events = server.events("/v1/chat/completions", **chat_body())
    deltas = [c["delta"].get("content", "") for e in events for c in e["choices"]]
    assert not any("\ufffd" in d for d in deltas)
    assert "".join(deltas) == answer == server.chat().json()["choices"][0]["message"]["content"]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_only_settled_text_is_streamed(serve, kit):  # D6
    def script(prompt, decode):
        return [[(3, ord("d"))], [(0, ord("a"))], [(2, ord("c"))], [(1, ord("b"))], [(4, kit.EOS)]]

    events = serve(script, step_seconds=0.05).events("/v1/chat/completions", **chat_body())
    assert [c["delta"].get("content") for e in events for c in e["choices"]] == ["a", "bcd", None]


def test_canvas_events(serve, kit):
    """Opt-in: every position once, in the pass that committed it, out of order where the model is; text is as ever."""

    def script(prompt, decode):
        yield [(2, ord("c"))]
        yield [(0, ord("a")), (4, kit.EOS), (5, kit.EOS)]
        yield [(1, ord("b")), (3, ord("d"))]

    server = serve(script)
    events = server.events("/v1/completions", prompt="x", max_tokens=6, canvas=True)
    drawn = [event["canvas"] for event in events if "canvas" in event]
    assert all(event["choices"] == [] for event in events if "canvas" in event)
    commits = [c for canvas in drawn for c in canvas["commits"]]
    assert [(c["position"], c["step"]) for c in commits] == [(2, 1), (0, 2), (4, 2), (5, 2), (1, 3), (3, 3)]
    assert [c["text"] for c in commits] == ["c", "a", "", "", "b", "d"] and all(
        0 < c["confidence"] < 1 for c in commits
    )
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == "abcd"
    assert not any("canvas" in event for event in server.events("/v1/completions", prompt="x", max_tokens=6))
    assert server.complete("x", canvas=True).json()["error"]["param"] == "canvas"


def test_streams_pass_through_proxies(api):
    """Nobody on the way may keep them back to send more at once."""
    with api.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        response.read()
    assert response.headers["x-accel-buffering"] == "no" and response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers and "content-encoding" not in response.headers
