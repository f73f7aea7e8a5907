"""Chat templates and special tokens, as the server meets them; jdllm.tokenizer's own tests are elsewhere."""

import dataclasses
import json

import pytest

from jdllm.tokenizer import Tokenizer


@pytest.fixture
def bos_tokenizer(kit, tmp_path) -> Tokenizer:
    """One that begins every text with a BOS, as the chat template does too."""
    folder = kit.save_byte_tokenizer(tmp_path)
    file, (bos, *_) = folder / "tokenizer.json", kit.SPECIALS
    begin, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    put_before = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [kit.BOS], "tokens": [bos]}},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": put_before}))
    return Tokenizer(folder, kit.MODEL)


def test_a_prompt_has_one_bos_whoever_writes_it(serve, kit, bos_tokenizer):  # F1, F6, E9
    prompts = []

    def script(prompt, decode):
        prompts.append(prompt)
        return kit.says("ok")(prompt, decode)

    server = serve(script, tokenizer=bos_tokenizer)
    tokens = lambda **body: server.http.post("/tokenize", json=body).json()["tokens"]
    messages = [{"role": "user", "content": "Hi"}]
    assert tokens(prompt="Hi") == [kit.BOS, 72, 105]
    chat = tokens(messages=messages)
    assert chat[0] == kit.BOS and chat.count(kit.BOS) == 1
    server.chat("Hi")
    server.complete("Hi")
    server.complete("")  # the BOS alone is a prompt
    server.complete([72, 105])
    server.complete("a", suffix="b", max_tokens=2)
    filled = [kit.BOS, 97, kit.MASK, kit.MASK, 98]
    assert prompts == [chat, [kit.BOS, 72, 105], [kit.BOS], [72, 105], filled]


def test_a_turn_is_never_continued(serve, kit, api):  # F2
    """LLaDA's template opens the assistant's turn always, so that anything else is refused instead of got wrong."""
    prefilled = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    for body, param in (
        ({"messages": prefilled}, "messages[1].role"),
        ({"messages": []}, "messages"),
        ({"messages": prefilled[:1], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": prefilled[:1], "continue_final_message": True}, "continue_final_message"),
    ):
        refused = api.http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    body = {"messages": prefilled[:1], "add_generation_prompt": True, "continue_final_message": False}
    assert api.http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_role_that_the_template_drops_is_named(serve, kit, tmp_path):  # F3
    template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    words = Tokenizer(kit.save_byte_tokenizer(tmp_path, template=template), kit.MODEL)
    server = serve(kit.says("5"), tokenizer=words)
    chat = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "2+3?"}]
    refused = server.http.post("/v1/chat/completions", json={"messages": chat})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages[0]"
    assert server.http.post("/v1/chat/completions", json={"messages": chat[1:]}).status_code == 200


def test_every_role_has_its_place_in_the_prompt(api, kit):
    def tokens(*roles: str) -> bytes:
        chat = [{"role": role, "content": f"text{k}"} for k, role in enumerate(roles)]
        reply = api.http.post("/tokenize", json={"messages": chat}).json()
        return bytes(token for token in reply["tokens"] if token < 256)

    assert tokens("system", "user", "assistant", "user") == (
        b"system\n\ntext0user\n\ntext1assistant\n\ntext2user\n\ntext3assistant\n\n"
    )
    assert tokens("developer", "user") == tokens("system", "user")
    for role in ("tool", "function", "User", "", None, 5):
        chat = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
        refused = api.http.post("/v1/chat/completions", json={"messages": chat})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages[1].role", role


def test_a_template_of_another_vocabulary_is_reported(kit, tmp_path):  # F4
    base = ("<|startoftext|>", "<|endoftext|>", "<|mask|>")
    folder = kit.save_byte_tokenizer(tmp_path, specials=base)
    words = Tokenizer(folder, dataclasses.replace(kit.MODEL, mask_id=258))
    [warning] = words.warnings
    assert all(marker in warning for marker in ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"))
    assert words.stop_ids == (kit.EOS,) and words.eot_id is None
    ids = words.encode_chat([{"role": "user", "content": "Hi"}])
    assert [token for token in ids if token > 255] == [kit.BOS] and b"<|eot_id|>" in bytes(ids[1:])


def test_an_answer_keeps_its_indentation(serve, kit):  # F7
    server = serve(kit.says("    return 1"))
    whole = "def f():\n    return 1"
    assert server.complete("def f():\n", echo=True).json()["choices"][0]["text"] == whole
    events = server.events("/v1/completions", prompt="def f():\n", echo=True)
    assert "".join(event["choices"][0]["text"] for event in events) == whole
