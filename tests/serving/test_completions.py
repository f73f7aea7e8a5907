"""Raw prompts in their four forms, echo, and ids that have no text."""


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


def test_echo(serve, kit):  # E5
    server = serve(kit.echoes())
    assert server.complete("ab", echo=True).json()["choices"][0]["text"] == "abAB"
    nothing = server.complete("ab", echo=True, max_tokens=0).json()
    assert nothing["choices"][0]["text"] == "ab" and nothing["usage"]["completion_tokens"] == 0
    refused = server.complete("ab", echo=True, max_tokens=0, logprobs=1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
    events = server.events("/v1/completions", prompt="ab", echo=True)
    assert "".join(e["choices"][0]["text"] for e in events) == "abAB"


def test_ids_without_text(serve, kit):
    answer = [72, 262, 263, kit.SOH, 105, kit.EOS]
    server = serve(lambda prompt, decode: kit.left_to_right(answer))
    assert server.complete("a").json()["choices"][0]["text"] == "Hi"
