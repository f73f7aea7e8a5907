"""Keys, origins, and readers that do not read."""

import json
import socket
import time

import pytest


def test_any_of_the_keys_opens(serve, kit):
    server = serve(kit.says("ok"), api_keys=("first", "second"))
    status = lambda key: server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
    assert [status(key) for key in ("first", "second", "firs", "firstsecond")] == [200, 200, 401, 401]
    assert server.http.get("/health").status_code == 200


def test_a_key_in_any_script_opens_and_of_two_headers_the_first_counts(serve, kit):
    server = serve(kit.says("ok"), api_keys=("schlüssel", "ключ"))
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    sent = {"schlüssel".encode(): 200, "schlüssel".encode("latin-1"): 200, "ключ".encode(): 200, b"schlussel": 401}
    for given, status in [*(([key], status) for key, status in sent.items()), ([*sent], 200), ([*sent][::-1], 401)]:
        headers = [(b"content-type", b"application/json"), *((b"authorization", b"Bearer " + key) for key in given)]
        assert server.http.post("/v1/chat/completions", content=body, headers=headers).status_code == status, given


def test_a_request_keeps_its_id_if_that_can_be_printed(api):
    for given, kept in ((b"abc-1", True), (b"a" * 201, False), ("ä".encode(), False), (b"", False)):
        told = api.http.get("/version", headers=[(b"x-request-id", given)]).headers.get_list("x-request-id")
        assert len(told) == 1 and (told[0] == given.decode("latin-1")) == kept and len(told[0]) in (5, 32)


def test_other_origins_are_let_in_only_when_told(serve, kit):
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    ask["Access-Control-Request-Headers"] = "authorization,content-type"
    allowed = "access-control-allow-origin"
    closed = serve(kit.says("ok"))
    assert allowed not in closed.http.options("/v1/completions", headers=ask).headers
    assert allowed not in closed.http.get("/health", headers=ask).headers
    one = serve(kit.says("ok"), cors_origins=("https://page.example",), api_keys=("k",))
    before = one.http.options("/v1/completions", headers=ask)  # a browser sends no key with this one
    assert before.status_code == 200 and before.headers[allowed] == "https://page.example"
    reply = one.http.get("/v1/models", headers={**ask, "Authorization": "Bearer k"})
    assert reply.status_code == 200 and reply.headers[allowed] == "https://page.example"
    assert "X-Request-ID" in reply.headers["access-control-expose-headers"]
    assert allowed not in one.http.get("/health", headers={"Origin": "https://other.example"}).headers


def test_a_page_of_another_origin_cannot_make_the_server_work(serve, kit):
    """A browser sends such a post without asking first, and only hides what comes back."""
    server = serve(kit.says("ok"), cors_origins=("https://page.example",))
    body = json.dumps({"prompt": "a"})

    def post(origin: str | None, path: str = "/v1/completions") -> int:
        headers = {"Content-Type": "text/plain"} | ({} if origin is None else {"Origin": origin})
        return server.http.post(path, content=body, headers=headers).status_code

    assert [post(origin) for origin in ("https://other.example", "null", "http://127.0.0.1:1")] == [403] * 3
    assert post("https://other.example", "/v1/abort") == 403 == post("https://other.example", "/tokenize")
    with socket.create_connection(server.listener.getsockname()) as client:  # no host to be of
        head = f"POST /v1/completions HTTP/1.1\r\nOrigin: null\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 403")
    assert server.metric("jdllm_requests_admitted_total") == 0
    assert [post(origin) for origin in (None, server.url, "https://page.example")] == [200] * 3
    assert (
        serve(kit.says("ok"), cors_origins=("*",))
        .http.post("/v1/completions", content=body, headers={"Origin": "https://other.example"})
        .is_success
    )


@pytest.mark.parametrize("patience", [0.3])
def test_a_reader_that_reads_nothing_is_left_in_the_end(serve, kit, patience):
    """Its buffers fill, it is dropped, and its row is free; steps did not wait for it."""
    length = 4000
    server = serve(kit.says("x" * length), length=length + 100, patience=patience)
    fields = {"model": "tiny", "prompt": "a", "max_tokens": length, "stream": True, "logprobs": 20}
    body = json.dumps(fields).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        kit.until(lambda: server.engine.steps > 50)
        steps = server.engine.steps
        assert server.complete("b", max_tokens=3).status_code == 200
        kit.until(lambda: server.engine.steps > steps + 100)
        kit.until(lambda: server.metric("jdllm_requests_running") == 0, 30)
        time.sleep(2 * patience)
        received = 0
        client.settimeout(5)
        while part := _read(client):
            received += len(part)
        assert received < 3_000_000  # the whole answer is several times that


def _read(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 16)
    except ConnectionError:
        return b""
