"""What is refused, and how the error names it."""

import pytest


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


def test_too_much_is_refused_before_it_is_encoded(serve, kit, monkeypatch):
    server = serve(kit.says("ok"), length=64)

    def encode(*_, **__):
        raise AssertionError("encoded")

    for name in ("encode", "encode_chat", "encode_checked"):
        monkeypatch.setattr(server.words, name, encode)
    many = [{"role": "user", "content": ""}] * 64
    for path, body, param in (
        ("/v1/completions", {"prompt": ["a"] * 400_000}, "prompt"),
        ("/v1/completions", {"prompt": [[65]] * 300_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 65, "n": 2}, "n"),
        ("/v1/completions", {"prompt": [[65] * 70], "echo": True}, "prompt"),
        ("/v1/completions", {"prompt": [65] * 500_000}, "prompt"),
        ("/v1/completions", {"prompt": [[65], [65] * 500_000]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{}] * 400_000}, "messages"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
        ("/v1/chat/completions", {"messages": many}, "messages"),
        ("/v1/chat/completions", {"messages": many, "n": 129}, "n"),
    ):
        error = server.http.post(path, json=body).json()["error"]
        assert error["param"] == param and error["type"] == "invalid_request_error", error


def test_api_key(serve, kit):
    api = serve(kit.says("ok"), api_keys=("secret",))
    assert api.http.get("/health").status_code == 200
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "secret"}):
        refused = api.http.get("/v1/models", headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert api.http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_bug_is_a_500_that_keeps_its_request_id(api, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a secret")

    monkeypatch.setattr(api.words, "encode", fail)
    reply = api.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-ID": "abc"})
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "internal_error"
    assert "secret" not in reply.text
    assert reply.headers.get("x-request-id") == "abc"
