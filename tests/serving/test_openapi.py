"""/openapi.json, and whether the server does what it says there: schemathesis asks it everything, right and wrong."""

import copy
import dataclasses
import json

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from jdllm.config import DecodeConfig, RequestError
from jdllm.serving.api import ServerConfig, create_app
from jdllm.serving.openapi import LIMITS

ALL = create_app(ServerConfig(names=("tiny",)), lambda progress: None).openapi()
EVERY = settings(max_examples=100, suppress_health_check=list(HealthCheck))
OPENAI = "messages prompt model n stop stream max_tokens temperature seed user metadata store tools logit_bias".split()


def asking(description: dict, **checks: dict):
    """What makes requests of a description. Fields that are called tokens are no secrets."""
    told = {"checks": checks, "output": {"sanitization": {"enabled": False}}}
    return schemathesis.openapi.from_dict(description, config=schemathesis.Config.from_dict(told))


def compatible() -> dict:
    """The two completions alone, and of their fields those that OpenAI has too and that never exclude each other."""
    told = copy.deepcopy(ALL)
    told["paths"] = {path: told["paths"][path] for path in ("/v1/chat/completions", "/v1/completions")}
    for kind in ("ChatRequest", "CompletionRequest"):
        body = told["components"]["schemas"][kind]
        fields = {name: field for name, field in body["properties"].items() if name in OPENAI}
        body |= {"properties": fields, "additionalProperties": False}
        # Whole numbers as JSON Schema has them include 1.0, which the server refuses.
        fields |= {"n": {"enum": [1, 2, 5, None]}, "max_tokens": {"enum": [1, 7, None]}, "seed": {"enum": [-1, 0, 7]}}
        if kind == "ChatRequest":
            fields["messages"]["items"]["properties"]["role"]["enum"].remove("assistant")  # not the last, that is
        else:
            text, _, ids, several = fields["prompt"]["anyOf"]
            text["minLength"] = 1
            ids["items"] = several["items"]["items"] = {"enum": [0, 65, 97, 255]}
    return told


@pytest.fixture
def server(serve, kit):
    return serve(kit.says("ok"), rows=16, length=4096)


# A deadline of no time at all is missed: 504. Which fields exclude each other, and which a decoder takes, is not in the
# description, so that a request may be as described, and refused.
@asking(
    ALL,
    not_a_server_error={"expected-statuses": ["2xx", "4xx", 504]},
    positive_data_acceptance={"enabled": False},
).parametrize()
@EVERY
def test_every_request_gets_an_answer_that_is_described(case, server):
    case.call_and_validate(base_url=server.url)


@asking(compatible(), negative_data_rejection={"enabled": False}).parametrize()
@EVERY
def test_requests_as_described_are_taken(case, server):
    case.call_and_validate(base_url=server.url)


def described(name: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": ALL["components"]})


@pytest.mark.parametrize(
    "path, body, chunk",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "ChatCompletionChunk"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "TextCompletionChunk"),
    ],
)
def test_events_are_as_described(server, path, body, chunk):
    content = ALL["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    told = content["itemSchema"]["properties"]["data"]["contentSchema"]["anyOf"]
    assert told == [{"$ref": f"#/components/schemas/{name}"} for name in (chunk, "Error")]
    logprobs = {"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for options in ({}, {"n": 3, "canvas": True, **logprobs, **usage}, {"stream_options": {"include_usage": True}}):
        events = server.events(path, **body, **options)
        assert events and ("canvas" in options) == any("canvas" in event for event in events)
        for event in events:
            described(chunk).validate(event)


def test_an_error_inside_a_stream_is_as_described(serve, kit):
    server = serve(lambda prompt, decode: [*kit.left_to_right(b"abc"), None])
    raw = server.complete("a", stream=True, max_tokens=9).text
    described("Error").validate(json.loads(raw.split("data: ")[-1]))


def test_the_description_is_served_and_holds_all_but_the_playground(server):
    told = server.http.get("/openapi.json").json()
    assert told == ALL
    served = {route.path.replace(":path", "") for route in server.app.routes if getattr(route, "methods", None)}
    hidden = {"/", "/openapi.json"}
    assert {path for path in served - hidden if not path.startswith("/playground")} == set(told["paths"])


def test_the_card_of_a_model_is_as_described(server):
    described("Model").validate(server.http.get("/v1/models/tiny").json())


def test_described_limits_are_the_limits(server):
    """By hand, as a body of every field at once is refused for other reasons."""
    by_server = {"temperature", "top_k", "seed", "min_tokens"}
    by_engine = {field.name for field in dataclasses.fields(DecodeConfig)} - by_server

    def refused(name: str, value: object) -> str | None:
        if name in by_engine:
            try:
                DecodeConfig(**{name: value})
            except RequestError as error:
                return error.field
            return None
        reply = server.chat(**{"logprobs": True, name: value})
        return reply.json()["error"]["param"] if reply.status_code == 400 else None

    fields = ALL["components"]["schemas"]["ChatRequest"]["properties"]
    beyond = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0}
    limits = {name: limit for name, limit in LIMITS.items() if name != "decoder"}  # the names are the table's
    assert len(limits) > 20 and all({*limit} <= {*beyond, "enum"} for limit in limits.values())
    for name, limit in limits.items():
        for value in (*limit.get("enum", ()), *(limit[key] for key in ("minimum", "maximum") if key in limit)):
            assert refused(name, value) is None, (name, value)
        step = 1 if "integer" in fields[name].get("type", ()) else 1e-6
        for value in ("other",) if "enum" in limit else [limit[key] + step * beyond[key] for key in limit]:
            assert refused(name, value) == name, (name, value)
