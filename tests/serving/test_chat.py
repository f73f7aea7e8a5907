"""Chats: messages in, a message out."""

from jdllm.serving.model import ServedModel
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


def test_a_chat_is_checked_once(serve, kit, monkeypatch):
    from jdllm import tokenizer
    from jdllm.serving import calls

    server, counts = serve(kit.says("ok")), []
    for module in (calls, tokenizer):
        monkeypatch.setattr(module, "check_messages", lambda *a: counts.append(a) or CHECK(*a))
    assert server.chat().status_code == 200 and len(counts) == 1


def test_no_chat_template(serve, kit, tmp_path):  # E10
    from jdllm.tokenizer import Tokenizer

    words = Tokenizer(kit.save_byte_tokenizer(tmp_path, template=None), kit.MODEL)
    server = serve(kit.says("ok"), tokenizer=words)
    refused = server.chat()
    assert refused.status_code == 400 and "--chat-template" in refused.json()["error"]["message"]
    assert server.complete("a").json()["choices"][0]["text"] == "ok"


def test_the_fields_of_completions_mean_nothing_in_a_chat(serve, kit):
    prompts = []

    def script(prompt, decode):
        prompts.append(prompt)
        return kit.says("ok")(prompt, decode)

    server = serve(script)
    for fields in ({}, {"prompt": "a"}, {"echo": True}, {"suffix": "b"}, {"suffix": 5}):
        assert server.chat(**fields).json()["choices"][0]["message"]["content"] == "ok", fields
    assert all(prompt == prompts[0] for prompt in prompts)


def test_answers_of_one_prompt_are_packed_once(serve, kit, monkeypatch):
    """Packing each of many would hold up everyone else; the engine of these tests compares seeds and all."""
    server, pack, packed = serve(kit.says("x"), rows=4), ServedModel.pack, []
    monkeypatch.setattr(ServedModel, "pack", lambda *args: packed.append(1) or pack(*args))
    reply = server.chat(n=20, seed=2**64 - 3)
    assert len(reply.json()["choices"]) == 20 and len(packed) == 1
