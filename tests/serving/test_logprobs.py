"""Log-probabilities of an answer's tokens."""


def test_logprobs_of_a_chat(serve, kit):
    """Those of the passes that committed the tokens: the script says minus a tenth of the pass."""
    server = serve(kit.says("h\u00e9y"))
    reply = server.chat(logprobs=True, top_logprobs=20).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in content] == [[104], [0xC3], [0xA9], [121]]
    assert [one["token"] for one in content] == ["h", "\ufffd", "\ufffd", "y"]
    assert all(one["logprob"] < 0 for one in content)
    assert all([other["token"] for other in one["top_logprobs"]] == list("abcdefghijklmnopqrst") for one in content)
    assert content[0]["top_logprobs"][1] == {"token": "b", "logprob": -2.0, "bytes": [98]}
    assert len(content) == reply["usage"]["completion_tokens"]
    streamed = [
        one
        for event in server.events("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], logprobs=True)
        for choice in event["choices"]
        for one in (choice["logprobs"] or {}).get("content", [])
    ]
    assert [one["bytes"] for one in streamed] == [one["bytes"] for one in content]
    assert all(one["top_logprobs"] == [] for one in streamed)
    assert server.chat().json()["choices"][0]["logprobs"] is None


def test_logprobs_of_a_completion(serve, kit):
    server = serve(kit.says("one.two"))
    reply = server.complete("a", logprobs=0, stop=".").json()["choices"][0]
    assert reply["text"] == "one" and reply["logprobs"]["tokens"] == ["o", "n", "e"]
    assert reply["logprobs"]["text_offset"] == [0, 1, 2] and len(reply["logprobs"]["token_logprobs"]) == 3
    assert [list(one) for one in reply["logprobs"]["top_logprobs"]] == [["o"], ["n"], ["e"]]
    top = server.complete("a", logprobs=2, stop=".").json()["choices"][0]["logprobs"]["top_logprobs"]
    assert [list(one) for one in top] == [["a", "b", "o"], ["a", "b", "n"], ["a", "b", "e"]]
    for refused in ({"logprobs": 21}, {"logprobs": -1}, {"logprobs": 0, "echo": True}):
        error = server.complete("a", **refused).json()["error"]
        assert error["param"] == "logprobs"


def test_alternatives_of_a_stream_are_those_of_the_plain_answer(serve, kit):
    server = serve(kit.says("some words", per_step=3))
    fields = dict(prompt="a", logprobs=3, stop="ds")
    plain = server.complete(**fields).json()["choices"][0]["logprobs"]
    chunks = [event["choices"][0]["logprobs"] for event in server.events("/v1/completions", **fields)]
    joined = {name: [one for chunk in chunks if chunk for one in chunk[name]] for name in plain}
    assert joined == plain and len(plain["tokens"]) == len("some wor")
