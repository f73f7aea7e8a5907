"""What /openapi.json says of bodies and answers. The endpoints read their bodies by hand, so that what is wrong with
them is told in OpenAI's form, and therefore FastAPI cannot describe them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jdllm.config import ALGS, CACHES, CONFIDENCES, MAX_ALTERNATIVES, REMASKINGS
from jdllm.decoders import TABLE
from jdllm.serving import schemas
from jdllm.serving.calls import MAX_CHOICES
from jdllm.tokenizer import ROLES

Schema = dict[str, Any]


def _object(optional: Mapping[str, Schema] | None = None, /, **properties: Schema) -> Schema:
    """An object with these properties and no others."""
    known = {**properties, **(optional or {})}
    return {"type": "object", "properties": known, "required": list(properties), "additionalProperties": False}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
ASSISTANT = {"const": "assistant"}
REASON = {"enum": ["stop", "length"]}
FRAME: Mapping[str, Schema] = {"id": TEXT, "created": WHOLE, "model": TEXT, "system_fingerprint": TEXT}
TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": _list(WHOLE)}
CHAT = {"index": WHOLE, "logprobs": _or_null(_ref("ChatLogprobs"))}
PLAIN = {"index": WHOLE, "logprobs": _or_null(_ref("TextLogprobs")), "text": TEXT}
COMMIT = _object(position=WHOLE, id=WHOLE, text=TEXT, confidence=NUMBER, step=WHOLE)
IN_STREAMS = {
    "usage": _or_null(_ref("Usage")),
    "canvas": _object(index=WHOLE, commits=_list(COMMIT)),
}
SCHEMAS: dict[str, Schema] = {
    "ChatCompletion": _object(
        **FRAME,
        object={"const": "chat.completion"},
        choices=_list(_object(**CHAT, message=_object(role=ASSISTANT, content=TEXT), finish_reason=REASON)),
        usage=_ref("Usage"),
    ),
    "ChatCompletionChunk": _object(
        IN_STREAMS,
        **FRAME,
        object={"const": "chat.completion.chunk"},
        choices=_list(
            _object(**CHAT, delta=_object({"role": ASSISTANT, "content": TEXT}), finish_reason=_or_null(REASON))
        ),
    ),
    "TextCompletion": _object(
        **FRAME,
        object={"const": "text_completion"},
        choices=_list(_object(**PLAIN, finish_reason=REASON)),
        usage=_ref("Usage"),
    ),
    "TextCompletionChunk": _object(
        IN_STREAMS,
        **FRAME,
        object={"const": "text_completion"},
        choices=_list(_object(**PLAIN, finish_reason=_or_null(REASON))),
    ),
    "Usage": _object(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE),
    "ChatLogprobs": _object(
        content=_list(_object(**TOKEN, top_logprobs=_list(_object(**TOKEN)))),
        refusal=NULL,
    ),
    "TextLogprobs": _object(
        tokens=_list(TEXT),
        token_logprobs=_list(NUMBER),
        top_logprobs=_list({"type": "object", "additionalProperties": NUMBER}),
        text_offset=_list(WHOLE),
    ),
    "Model": _object(
        {"max_model_len": WHOLE}, id=TEXT, object={"const": "model"}, created=WHOLE, owned_by=TEXT, root=TEXT
    ),
    "Models": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Aborted": _object(request_id=TEXT, aborted=WHOLE),
    "Tokens": _object(count=WHOLE, max_model_len=WHOLE, tokens=_list(WHOLE)),
    "Text": _object(prompt=TEXT),
    "TokenizerInfo": _object(
        **{name: _or_null(TEXT) for name in ("bos_token", "eos_token", "pad_token", "chat_template")}
    ),
    "Alive": _object(status={"const": "alive"}),
    "Ready": _object(status={"const": "ready"}),
    "NotReady": _object(status={"const": "not ready"}, reason=TEXT),
    "Version": _object(version=TEXT),
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
}
"""Answers, exactly."""

ANSWERS = {
    "/v1/chat/completions": "ChatCompletion",
    "/v1/completions": "TextCompletion",
    "/v1/abort": "Aborted",
    "/v1/models": "Models",
    "/v1/models/{name}": "Model",
    "/tokenize": "Tokens",
    "/detokenize": "Text",
    "/tokenizer_info": "TokenizerInfo",
    "/health": "Alive",
    "/ready": "Ready",
    "/version": "Version",
}
CHUNKS = {"/v1/chat/completions": "ChatCompletionChunk", "/v1/completions": "TextCompletionChunk"}
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/completions": schemas.CompletionRequest,
    "/v1/abort": schemas.AbortRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
}
NEED_A_MODEL = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/tokenizer_info")

PROBLEMS = {
    400: "The request is malformed, or asks for what is not possible; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The request comes from a web page of another origin.",
    404: "The model is not served here.",
    405: "The path has no such method.",
    413: "The body is too large.",
    429: "The queue is full.",
    499: "The request was aborted.",
    500: "A fault of the server.",
    503: "The server is not ready, or is shutting down.",
    504: "The deadline passed before the answer was complete.",
}
RETRY = {"Retry-After": "Seconds after which a new try makes sense.", "retry-after-ms": "The same in milliseconds."}

PART = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": TEXT}}
MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": list(ROLES)}, "content": {"anyOf": [TEXT, _list(PART)]}},
}
MESSAGES = {**_list(MESSAGE, minItems=1), "description": "The last one is not the assistant's."}
IDS = _list({"type": "integer", "minimum": 0}, minItems=1)
FORMS: dict[str, Schema] = {
    "messages": MESSAGES,
    "prompt": {"anyOf": [TEXT, _list(TEXT, minItems=1), IDS, _list(IDS, minItems=1)]},
    "stop": {"anyOf": [TEXT, _list(TEXT, maxItems=schemas.MAX_STOPS), NULL]},
}
"""Fields that the models leave open."""

SHARE = {"minimum": 0, "maximum": 1}
LIMITS: dict[str, Schema] = {
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "deadline_ms": {"exclusiveMinimum": 0, "maximum": schemas.MOST_MILLISECONDS},
    "slo_ms": {"exclusiveMinimum": 0, "maximum": schemas.MOST_MILLISECONDS},
    "priority": {"minimum": -(1 << 30), "maximum": 1 << 30},
    "top_logprobs": {"minimum": 0, "maximum": MAX_ALTERNATIVES},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 1 << 30},
    "seed": {"minimum": -(1 << 63), "maximum": (1 << 64) - 1},
    "decoder": {"enum": sorted({name for name, _ in TABLE})},
    "block_size": {"minimum": 1, "maximum": 1 << 20},
    "steps": {"minimum": 1, "maximum": 1 << 20},
    "cache": {"enum": list(CACHES)},
    "threshold": {"minimum": 0},
    "factor": {"exclusiveMinimum": 0},
    "remasking": {"enum": list(REMASKINGS)},
    "cfg_scale": {"minimum": 0, "maximum": 100},
    "alg": {"enum": list(ALGS)},
    "alg_temp": {"minimum": 0, "maximum": 100},
    "eps": {"exclusiveMinimum": 0, "maximum": 1},
    "block_add_threshold": SHARE,
    "decoded_token_threshold": SHARE,
    "skip_threshold": {"minimum": 0},
    "confidence": {"enum": list(CONFIDENCES)},
}
"""What a value satisfies wherever it is given and not null. Besides, some fields exclude each other, and a decoder
takes no settings but its own; only the errors tell that."""


def install(app: FastAPI) -> None:
    """Let the app describe itself by ``describe``."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: FastAPI's, with its guesses at bodies and answers replaced."""
    told = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            operation["responses"] = {str(status): answer for status, answer in _responses(path, method)}
            if path in BODIES:
                operation["requestBody"] = {"required": True, "content": _json(BODIES[path].__name__)}
            if path.startswith("/v1"):
                operation["security"] = [{}, {"key": []}]
    key = {"type": "http", "scheme": "bearer", "description": "Where the server was started with a key."}
    told["components"] = {"schemas": {**SCHEMAS, **_requests()}, "securitySchemes": {"key": key}}
    return told


def _requests() -> dict[str, Schema]:
    """The bodies: pydantic's schemas, with what its models leave to the code that reads them."""
    kinds = [(kind, "validation") for kind in BODIES.values()]
    found: dict[str, Schema] = models_json_schema(kinds, ref_template="#/components/schemas/{model}")[1]["$defs"]  # type: ignore[arg-type]
    own: Mapping[str, Schema]
    for kind, required, own in (
        ("ChatRequest", "messages", {"max_tokens": {"minimum": 1}}),
        ("CompletionRequest", "prompt", {"max_tokens": {"minimum": 0}, "logprobs": LIMITS["top_logprobs"]}),
    ):
        fields, limits = found[kind]["properties"], {**LIMITS, **own}
        fields |= {name: FORMS.get(name) or _limited(field, limits.get(name, {})) for name, field in fields.items()}
        fields |= {name: _neutral(accepted) for name, accepted in schemas.NEUTRAL.items()}
        found[kind]["required"] = [required]
    fields = found["TokenizeRequest"]["properties"]
    fields["messages"] = _or_null(MESSAGES)
    found["TokenizeRequest"]["oneOf"] = [  # null is as good as absent
        {"required": [name], "properties": {name: kind}} for name, kind in (("prompt", TEXT), ("messages", MESSAGES))
    ]
    return found


def _limited(field: Schema, limits: Schema) -> Schema:
    kind, _ = field["anyOf"]  # the other is null
    if "enum" in limits:
        return {"enum": [*limits["enum"], None]}
    return {**limits, "type": [kind["type"], "null"]} if "type" in kind else field


def _neutral(accepted: Sequence[Any] | object) -> Schema:
    if not isinstance(accepted, Sequence):
        return {"description": "Ignored."}
    return {"enum": [*accepted, None], "description": "Not supported; these values ask for nothing and are taken."}


def _responses(path: str, method: str) -> Iterator[tuple[int, dict[str, Any]]]:
    content: Schema = _json(ANSWERS[path]) if path in ANSWERS else {"text/plain": {"schema": TEXT}}
    if path in CHUNKS:
        told = {"anyOf": [_ref(CHUNKS[path]), _ref("Error")]}
        data = {**TEXT, "description": "JSON; at the end [DONE].", "contentSchema": told}
        event = {"type": "object", "required": ["data"], "properties": {"data": data}}
        content = {**content, "text/event-stream": {"itemSchema": event}}
    yield 200, _response("What was asked for.", content)
    for status in sorted(_problems(path, method)):
        yield status, _response(PROBLEMS[status], _json("Error"), RETRY if status in (429, 503) else {})
    if path == "/ready":
        yield 503, _response("Loading, compiling, draining or failed.", _json("NotReady"), RETRY)


def _problems(path: str, method: str) -> set[int]:
    found = {405, 500}
    found |= {401} if path.startswith("/v1") else set()
    found |= {400, 403, 413} if method == "post" else set()
    found |= {404} if (path in NEED_A_MODEL and method == "post") or "{name}" in path else set()
    found |= {503} if path in NEED_A_MODEL else set()
    return found | ({429, 499, 504} if path in CHUNKS else set())


def _response(text: str, content: Schema, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    told: Schema = {"X-Request-ID": {"description": "The request's own, or a new one.", "required": True}}
    told |= {name: {"description": meaning} for name, meaning in (headers or {}).items()}
    return {
        "description": text,
        "headers": {name: {**header, "schema": TEXT} for name, header in told.items()},
        "content": content,
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(name)}}
