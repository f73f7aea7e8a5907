"""Request fields: those that reach the engine, those that are ignored, nulls."""

import pytest

from jdllm.serving.schemas import ANY, NEUTRAL, ChatRequest, CompletionRequest


def test_nulls_are_absent(serve, kit):  # E6
    server = serve(kit.says("ok"))
    decode = ["top_p", "top_k", "block_size", "skip_threshold", "confidence", "early_stop", "decoder"]
    openai = ["seed", "temperature", "stop", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options"]
    others = ["logprobs", "tools", "response_format", "user", "presence_penalty", "unheard_of"]
    names = [*decode, *openai, *others]
    reply = server.chat(**dict.fromkeys(names))
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] == "ok"


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


def test_the_official_name_of_the_block_size(api):
    assert api.complete("a", block_length=4).status_code == 200
    assert api.complete("a", block_length=4, block_size=4).status_code == 200
    both = api.complete("a", block_length=4, block_size=8)
    assert both.status_code == 400 and both.json()["error"]["param"] == "block_length"


def test_the_official_name_reaches_the_engine(serve, kit):
    seen = []

    def script(prompt, decode):
        seen.append(decode.block_size)
        return kit.says("x")(prompt, decode)

    server = serve(script)
    server.complete("a", block_length=4)
    assert seen == [4]


def test_a_default_number_of_steps_counts_where_the_length_is_the_default(serve, kit):
    seen = []

    def script(prompt, decode):
        seen.append(decode.steps)
        return kit.says("x")(prompt, decode)

    server = serve(script, defaults={"decoder": "llada", "max_tokens": 32, "block_size": 8, "steps": 8})
    assert server.complete("a").status_code == 200 == server.complete("a", max_tokens=20).status_code
    assert seen == [8, None]


def test_min_tokens_is_not_for_text_between_text(api):
    refused = api.complete("a", suffix="b", min_tokens=1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"


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


def test_min_tokens_reaches_the_engine(serve, kit):
    seen = []

    def script(prompt, decode):
        seen.append(decode.min_tokens)
        return kit.left_to_right([kit.EOS] * decode.max_tokens, 99)

    server = serve(script)
    server.complete("a", max_tokens=9, min_tokens=4)
    server.complete("a", max_tokens=9)
    assert seen == [4, 0]


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


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_null_is_as_good_as_absent_in_every_field(api, kind):  # E6
    names = {*kind.model_fields, *NEUTRAL} - {"messages", "prompt"}
    ask = api.chat if kind is ChatRequest else api.complete
    absent, null = ask(model=None), ask(**dict.fromkeys(names))
    assert null.status_code == absent.status_code == 200
    assert null.json()["choices"] == absent.json()["choices"] and null.json()["usage"] == absent.json()["usage"]


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_is_not_supported_is_taken_where_it_asks_for_nothing(api, name):
    if NEUTRAL[name] is ANY:
        taken, refused = (5, "x", [], {"a": None}), ()
    else:
        taken, refused = NEUTRAL[name], ("other", 17, ["other"], {"type": "json_schema"})
    for value in taken:
        assert api.chat(**{name: value}).status_code == 200, value
    for value in refused:
        reply = api.chat(**{name: value}, stream=True)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name, value


def test_without_its_end_an_answer_has_every_token_that_was_asked_for(api):
    reply = api.complete("a", ignore_eos=True, max_tokens=9).json()
    assert reply["usage"]["completion_tokens"] == 9 and reply["choices"][0]["finish_reason"] == "length"
    assert api.complete("a", max_tokens=9).json()["choices"][0]["finish_reason"] == "stop"
