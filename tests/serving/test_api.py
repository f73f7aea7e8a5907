"""The shape of OpenAI's API: fields, answers, errors."""

import json
import re
import time
from pathlib import Path

import pytest

from jdllm.config import DecodeConfig
from jdllm.tokenizer import check_messages as CHECK


def chat_body(**fields):
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}


def text_of(events):
    return "".join(c["delta"].get("content", "") for e in events for c in e["choices"] if "delta" in c)


def test_chat(serve, kit):
    server = serve(kit.says("hello there"))
    reply = server.chat().json()
    assert reply["object"] == "chat.completion" and reply["model"] == "tiny" and reply["id"].startswith("chatcmpl-")
    assert isinstance(reply["created"], int) and reply["system_fingerprint"]
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello there"}
    assert choice["finish_reason"] == "stop" and choice["index"] == 0
    prompt = len(server.words.encode_chat([{"role": "user", "content": "Hi"}]))
    assert reply["usage"] == {"prompt_tokens": prompt, "completion_tokens": 11, "total_tokens": prompt + 11}


def test_chat_stream(serve, kit):
    server = serve(kit.says("hello there"))
    events = server.events("/v1/chat/completions", **chat_body())
    assert text_of(events) == "hello there"
    first = events[0]["choices"][0]["delta"]
    assert first["role"] == "assistant" and first["content"].startswith("h")
    assert events[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    for event in events:
        assert event["object"] == "chat.completion.chunk" and event["created"] and event["id"] == events[0]["id"]
        assert event["model"] == "tiny" and "usage" not in event
    assert all(e["choices"][0]["delta"]["content"] for e in events[:-1])  # D7: no empty deltas


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


def test_completion_prompts(serve, kit):  # E4
    server = serve(kit.echoes())
    one = server.complete([72, 105]).json()
    assert one["choices"][0]["text"] == "HI" and one["object"] == "text_completion"
    two = server.complete([[72], [105, 33]]).json()
    assert [(c["index"], c["text"]) for c in two["choices"]] == [(0, "H"), (1, "I!")]
    assert two["usage"]["prompt_tokens"] == 3 and two["usage"]["completion_tokens"] == 3
    texts = server.complete(["a", "b"], n=2).json()
    assert [(c["index"], c["text"]) for c in texts["choices"]] == [(0, "A"), (1, "A"), (2, "B"), (3, "B")]
    assert texts["usage"]["prompt_tokens"] == 2
    for bad in ([], [1.5], [True], [99999], [263 + 1], ["a", [1]], [[]], "", None, 5, {"a": 1}, [-1]):
        refused = server.complete(bad)
        assert refused.status_code == 400, bad
        assert refused.json()["error"]["param"] == "prompt", bad


def test_choices_in_a_stream_have_their_index(serve, kit):
    server = serve(kit.echoes())
    events = server.events("/v1/completions", prompt=["abc", "xyz"], n=2)
    texts = ["", "", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["ABC", "ABC", "XYZ", "XYZ"]


def test_echo(serve, kit):  # E5
    server = serve(kit.echoes())
    assert server.complete("ab", echo=True).json()["choices"][0]["text"] == "abAB"
    nothing = server.complete("ab", echo=True, max_tokens=0).json()
    assert nothing["choices"][0]["text"] == "ab" and nothing["usage"]["completion_tokens"] == 0
    refused = server.complete("ab", echo=True, max_tokens=0, logprobs=1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
    events = server.events("/v1/completions", prompt="ab", echo=True)
    assert "".join(e["choices"][0]["text"] for e in events) == "abAB"


def test_nulls_are_absent(serve, kit):  # E6
    server = serve(kit.says("ok"))
    decode = ["top_p", "top_k", "block_size", "skip_threshold", "confidence", "early_stop", "decoder"]
    openai = ["seed", "temperature", "stop", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options"]
    others = ["logprobs", "tools", "response_format", "user", "presence_penalty", "unheard_of"]
    names = [*decode, *openai, *others]
    reply = server.chat(**dict.fromkeys(names))
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] == "ok"


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
    for bad in (list("12345"), 5, [5], {"a": "b"}):
        refused = server.chat(stop=bad)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop"


def test_stop_ends_the_row_at_once(serve, kit):
    server = serve(kit.says("ab", end=False))
    assert server.complete("x", max_tokens=100, stop="bab").json()["choices"][0]["text"] == "a"
    assert server.engine.steps < 10


def test_contents(serve, kit):  # E8, E9
    server = serve(kit.echoes())
    parts = [{"type": "text", "text": "so"}, {"type": "text", "text": "me"}]
    body = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]}
    assert server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "SOME"
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    for content, part in ((image, "[0]"), (None, ""), (7, "")):
        refused = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == f"messages[0].content{part}"
    for messages in ([], None, "Hi"):
        assert server.http.post("/v1/chat/completions", json={"messages": messages}).status_code == 400
    assert server.chat("").status_code == 200  # the template gives it tokens


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
    for body in (chat_body(), {"messages": [{"role": "user", "content": "x" * 4_000_000}]}):
        path = "/v1/chat/completions"
        reply = server.http.post(path, json=body)
    assert reply.json()["error"]["code"] == "context_length_exceeded" and time.perf_counter() - begin < 1


def test_too_much_is_refused_before_it_is_encoded(serve, kit, monkeypatch):
    server = serve(kit.says("ok"), length=64)

    def encode(*_, **__):
        raise AssertionError("encoded")

    for name in ("encode", "encode_chat", "encode_checked"):
        monkeypatch.setattr(server.words, name, encode)
    many = [{"role": "user", "content": ""}] * 64
    for path, body, param in (
        ("/v1/completions", {"prompt": ["a"] * 2_000_000}, "prompt"),
        ("/v1/completions", {"prompt": [[65]] * 1_000_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 65, "n": 2}, "n"),
        ("/v1/completions", {"prompt": [[65] * 70], "echo": True}, "prompt"),
        ("/v1/chat/completions", {"messages": many}, "messages"),
        ("/v1/chat/completions", {"messages": many, "n": 129}, "n"),
    ):
        error = server.http.post(path, json=body).json()["error"]
        assert error["param"] == param and error["type"] == "invalid_request_error", error


def test_a_chat_is_checked_once(serve, kit, monkeypatch):
    from jdllm import tokenizer
    from jdllm.serving import calls

    server, counts = serve(kit.says("ok")), []
    for module in (calls, tokenizer):
        monkeypatch.setattr(module, "check_messages", lambda *a: counts.append(a) or CHECK(*a))
    assert server.chat().status_code == 200 and len(counts) == 1


def test_default_max_tokens_is_capped_by_the_room(serve, kit):  # E12
    server = serve(kit.says("x", end=False), length=64)
    assert server.complete([65] * 60).json()["usage"]["completion_tokens"] == 4
    server = serve(kit.says("x", end=False), length=256)
    assert server.complete([65]).json()["usage"]["completion_tokens"] == DecodeConfig.max_tokens  # as jdllm.generate
    server = serve(kit.says("x", end=False), length=128, defaults={"max_tokens": 9})
    assert server.complete([65]).json()["usage"]["completion_tokens"] == 9
    body = {"max_tokens": 3, "max_completion_tokens": 5}
    assert server.chat(**body).json()["usage"]["completion_tokens"] == 5


def test_decode_settings_reach_the_engine(serve, kit):
    seen = []

    def script(prompt, decode):
        seen.append(decode)
        return kit.left_to_right([kit.EOS] * decode.max_tokens, 99)

    server = serve(script, defaults={"block_size": 16, "skip_threshold": 0.8})
    fields = dict(temperature=0.5, top_p=0.9, top_k=7, seed=3, block_size=8, confidence="margin", early_stop=True)
    assert server.chat(**fields, n=2, max_tokens=6).status_code == 200
    for i in (0, 1):
        assert {name: getattr(seen[i], name) for name in fields} == {**fields, "seed": 3 + i}
        assert seen[i].skip_threshold == 0.8 and seen[i].max_tokens == 6
        assert seen[i].stop_ids == (kit.EOS, kit.EOT)
    server.complete("a", ignore_eos=True, max_tokens=2, top_k=-1)
    assert seen[2].stop_ids == () and seen[2].block_size == 16 and seen[2].temperature == 0 and seen[2].top_k == 0
    server.chat(early_stop=False, max_tokens=2)
    assert seen[3].stop_ids is None and seen[3].early_stop is False  # the reference stops at the end of text alone


def test_seeds_wrap(serve, kit):
    seen = []

    def script(prompt, decode):
        seen.append(decode.seed)
        return kit.left_to_right([kit.EOS] * decode.max_tokens, 99)

    server = serve(script, rows=1)
    for seed, wanted in (
        (2**64 - 1, [2**64 - 1, 0, 1]),
        (-1, [2**64 - 1, 0, 1]),
        (-(2**63), [2**63, 2**63 + 1, 2**63 + 2]),
    ):
        seen.clear()
        assert server.complete("a", n=3, max_tokens=2, seed=seed).status_code == 200
        assert seen == wanted
    for seed in (2**64, -(2**63) - 1):
        assert server.complete("a", max_tokens=2, seed=seed).json()["error"]["param"] == "seed"


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_completion_tokens", 0),
        ("temperature", 3),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("n", 0),
        ("n", 1000),
        ("seed", 1.5),
        ("block_size", 0),
        ("skip_threshold", -1),
        ("confidence", "vibes"),
        ("decoder", "magic"),
        ("early_stop", 1),
        ("stream", "yes"),
        ("logprobs", "yes"),
        ("top_logprobs", 1),
        ("deadline_ms", 0),
        ("deadline_ms", "soon"),
        ("priority", 1 << 40),
        ("priority", 0.5),
        ("min_tokens", -1),
        ("min_tokens", 1000),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("model", 5),
    ],
)
def test_bad_fields_are_refused_by_name(api, field, value):
    refused = api.chat(**{field: value})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == field and field in error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.fixture
def api(serve, kit):
    return serve(kit.says("ok"))


def test_harmless_defaults_and_unknown_fields(serve, kit, api, caplog):
    fields = dict(
        top_p=1,
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        tools=[],
        user="me",
        store=True,
        response_format={"type": "text"},
        metadata={"a": "b"},
        repetition_penalty=1.0,
        logprobs=False,
        ignore_eos=False,
        parallel_tool_calls=True,
    )
    assert api.chat(**fields).status_code == 200
    assert api.chat(unheard_of=5).status_code == 200
    assert "unheard_of" in caplog.text
    strict = serve(kit.says("ok"), strict_api=True)
    assert strict.chat(**fields).status_code == 200
    assert strict.chat(unheard_of=5).json()["error"]["param"] == "unheard_of"


def test_names_of_unknown_fields_fill_neither_memory_nor_log(api, caplog):
    for k in range(60):
        fields = {f"field\n{k}-{i}-{'x' * 1000}": 1 for i in range(20)}
        assert api.chat(**fields).status_code == 200
    lines = [r.getMessage() for r in caplog.records if "unknown fields" in r.getMessage()]
    assert sum(map(len, lines)) < 20_000 and not any("\n" in line for line in lines)
    assert "further ones" in lines[-1] and sum(line.count("field\\n") for line in lines) == 100


def test_errors_of_the_protocol(serve, kit):
    api = serve(kit.says("ok"), max_body=2000)
    post = api.http.post
    cases = [
        (post("/v1/chat/completions", content=b"{bad"), 400),
        (post("/v1/chat/completions", content=b""), 400),
        (post("/v1/chat/completions", json=[1]), 400),
        (post("/v1/chat/completions", content=b"[" * 1000), 400),
        (post("/v1/chat/completions", content=b"\xff\xfe"), 400),
        (api.http.get("/v1/chat/completions"), 405),
        (api.http.get("/nowhere"), 404),
        (api.chat(model="other"), 404),
        (api.http.get("/v1/models/other"), 404),
        (post("/v1/completions", json={"prompt": "x" * 3000}), 413),
        (post("/v1/completions", content=iter([b"x" * 1500, b"x" * 1500])), 413),
    ]
    for response, status in cases:
        assert response.status_code == status, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]
    assert api.chat(model="other").json()["error"]["code"] == "model_not_found"
    assert "org/alias" in api.chat(model="other").json()["error"]["message"]
    assert api.chat().status_code == 200


def test_models_and_meta(api):
    models = api.http.get("/v1/models").json()
    assert models["object"] == "list" and [m["id"] for m in models["data"]] == ["tiny", "org/alias"]
    assert set(models["data"][0]) == {"id", "object", "created", "owned_by"}
    assert api.http.get("/v1/models/org/alias").json()["id"] == "org/alias"
    assert api.chat(model="org/alias").json()["model"] == "org/alias"
    assert api.http.get("/version").json()["version"]
    assert "version=0.0.4" in api.http.get("/metrics").headers["content-type"]


def test_tokenizer_endpoints(api, kit):  # F6
    tokens = api.http.post("/tokenize", json={"prompt": "Hi"}).json()
    assert tokens["tokens"] == [72, 105] and tokens["count"] == 2
    chat = api.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
    assert chat[:2] == [kit.BOS, kit.SOH]
    assert api.http.post("/detokenize", json={"tokens": [72, 105, kit.EOS]}).json() == {"prompt": "Hi"}
    assert api.http.get("/tokenizer_info").json()["eos_token"] == "<|endoftext|>"


def test_request_ids(api):
    assert api.http.get("/health", headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert api.http.get("/nowhere", headers={"X-Request-ID": "abc-2"}).headers["x-request-id"] == "abc-2"
    assert len(api.http.get("/health", headers={"X-Request-ID": "x" * 500}).headers["x-request-id"]) == 32


def test_api_key(serve, kit):
    api = serve(kit.says("ok"), api_key="secret")
    assert api.http.get("/health").status_code == 200
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "secret"}):
        refused = api.http.get("/v1/models", headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert api.http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_no_chat_template(serve, kit, tmp_path):  # E10
    from jdllm.tokenizer import Tokenizer

    words = Tokenizer(kit.save_byte_tokenizer(tmp_path, template=None), kit.MODEL)
    server = serve(kit.says("ok"), tokenizer=words)
    refused = server.chat()
    assert refused.status_code == 400 and "--chat-template" in refused.json()["error"]["message"]
    assert server.complete("a").json()["choices"][0]["text"] == "ok"


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


def test_ids_without_text(serve, kit):
    answer = [72, 262, 263, kit.SOH, 105, kit.EOS]
    server = serve(lambda prompt, decode: kit.left_to_right(answer))
    assert server.complete("a").json()["choices"][0]["text"] == "Hi"


def test_logprobs_of_a_chat(serve, kit):
    """Those of the passes that committed the tokens: the script says minus a tenth of the pass."""
    server = serve(kit.says("h\u00e9y"))
    reply = server.chat(logprobs=True, top_logprobs=1, temperature=0).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in content] == [[104], [0xC3], [0xA9], [121]]
    assert [one["token"] for one in content] == ["h", "\ufffd", "\ufffd", "y"]
    assert all(one["logprob"] < 0 and one["top_logprobs"][0]["logprob"] == one["logprob"] for one in content)
    assert len(content) == reply["usage"]["completion_tokens"]
    streamed = [
        one
        for event in server.events("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], logprobs=True)
        for choice in event["choices"]
        for one in (choice["logprobs"] or {}).get("content", [])
    ]
    assert [one["bytes"] for one in streamed] == [one["bytes"] for one in content]
    assert server.chat().json()["choices"][0]["logprobs"] is None


def test_logprobs_of_a_completion(serve, kit):
    server = serve(kit.says("one.two"))
    reply = server.complete("a", logprobs=1, temperature=0, stop=".").json()["choices"][0]
    assert reply["text"] == "one" and reply["logprobs"]["tokens"] == ["o", "n", "e"]
    assert reply["logprobs"]["text_offset"] == [0, 1, 2] and len(reply["logprobs"]["token_logprobs"]) == 3
    assert [list(one) for one in reply["logprobs"]["top_logprobs"]] == [["o"], ["n"], ["e"]]
    for refused in ({"logprobs": 5}, {"logprobs": 1, "temperature": 0.5}, {"logprobs": 0, "echo": True}):
        error = server.complete("a", **refused).json()["error"]
        assert error["param"] == "logprobs"


def test_min_tokens_reaches_the_engine(serve, kit):
    seen = []

    def script(prompt, decode):
        seen.append(decode.min_tokens)
        return kit.left_to_right([kit.EOS] * decode.max_tokens, 99)

    server = serve(script)
    server.complete("a", max_tokens=9, min_tokens=4)
    server.complete("a", max_tokens=9)
    assert seen == [4, 0]


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


def test_metrics_have_vllms_names_too(serve, kit):
    """The same numbers under the names that dashboards know, with the model's name; tokens and passes for tokens a
    pass; the share of slots in use."""
    server = serve(kit.says("abcd"))
    for _ in range(3):
        server.chat(max_tokens=8)
    text = server.http.get("/metrics").text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 3.0' in text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="tiny"}} 0.0' in text
    for ours, theirs in (("generation_tokens", "generation_tokens"), ("prompt_tokens", "prompt_tokens")):
        assert server.metric(f"jdllm_{ours}_total") == server.metric(f"vllm:{theirs}_total") > 0
    assert server.metric("vllm:time_to_first_token_seconds_count") == 3
    assert server.metric("vllm:e2e_request_latency_seconds_count") == 3
    assert server.metric("jdllm_forward_passes_total") > 0
    assert server.metric("jdllm_committed_tokens_total") == server.metric("jdllm_generation_tokens_total")
    assert 'jdllm_step_seconds_count{bucket="script"}' in text


def test_the_dashboard_reads_metrics_that_are_there(serve, kit):
    """Every name in docs/grafana-dashboard.json is on /metrics."""
    server = serve(kit.says("abcd"))
    server.chat(max_tokens=8)
    text = server.http.get("/metrics").text
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in re.findall(r"jdllm_\w+", expression)}
    assert len(names) > 15
    assert not {name for name in names if f"# TYPE {name} " not in text and f"\n{name}" not in text} - {
        "jdllm_requests_rejected_total"  # appears with the first refusal
    }
