"""The HTTP server: OpenAI's endpoints, and those that operators look at."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from jdllm import __version__
from jdllm.config import RequestError
from jdllm.serving import errors, openapi, playground
from jdllm.serving.calls import Call, open_call, refuse_far_too_long
from jdllm.serving.errors import ApiError
from jdllm.serving.gate import Direct, Gate
from jdllm.serving.job import Job
from jdllm.serving.loop import EngineLoop
from jdllm.serving.metrics import Metrics
from jdllm.serving.model import ServedModel
from jdllm.serving.schedulers import Policy
from jdllm.serving.schemas import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jdllm.tokenizer import check_messages

log = logging.getLogger("jdllm.serving")

MAX_TOLD = 100
"""Unknown fields that the log names; clients choose the names, so there must be an end to them."""
MAX_NAME = 64
"""Characters that the log shows of each."""

Body = TypeVar("Body", bound=BaseModel)
OpenModel = Callable[[Callable[[str], None]], ServedModel]


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """What the server is told at its start.

    Attributes:
        names: what ``model`` may say; the first is the one that answers carry.
        root: where the checkpoint lies, for clients that load its tokenizer; None: nowhere in particular.
        queue_limit: requests that may wait for a slot.
        api_keys: what ``Authorization: Bearer`` must say under /v1; without any everyone is let in.
        cors_origins: web pages of these origins may read answers; "*" for all.
        strict_api: unknown fields are refused instead of ignored.
        max_body: bytes of a request; reading JSON much larger would keep everyone waiting.
        keep_alive: seconds between comments in a stream that has no text yet.
        patience: seconds that a reader may leave a stream standing once its buffers are full; then it is dropped.
        log_content: prompts and answers stand in the log.
    """

    names: tuple[str, ...] = ("jdllm",)
    root: str | None = None
    queue_limit: int = 256
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    strict_api: bool = False
    max_body: int = 2 << 20
    keep_alive: float = 15.0
    patience: float = 60.0
    log_content: bool = False


class EventStream(StreamingResponse):
    """A stream of server-sent events that forgets its jobs when the client leaves, even before the first byte, and
    leaves a client that reads nothing for ``patience`` seconds. Until then all that waits is the text that the answer
    has anyway: no step waits for a reader, and nothing is queued for one."""

    def __init__(self, call: Call, keep_alive: float, patience: float, done: Callable[[], None]):
        super().__init__(
            call.events(keep_alive),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._done, self._patience = done, patience

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_soon(message: Any) -> None:
            try:
                async with asyncio.timeout(self._patience):
                    await send(message)
            except TimeoutError:
                raise OSError(f"the client has read nothing for {self._patience:.0f} s") from None

        try:
            await super().__call__(scope, receive, send_soon)
        finally:
            self._done()


def create_app(
    config: ServerConfig,
    open_model: OpenModel,
    on_change: Callable[[EngineLoop], None] = lambda loop: None,
    policy: Policy | None = None,
) -> FastAPI:
    """The application. The engine's thread starts with it and ends with it; it is ``app.state.engine_loop``. A server
    gives requests to ``app.state.front``, for speed: what goes to the application itself gets the same answers."""
    metrics = Metrics(config.names[0])
    started = int(time.time())
    told: set[str] = set()  # unknown fields that the log has named
    clients: list[asyncio.AbstractEventLoop] = []
    calls: dict[str, list[Call]] = {}  # by X-Request-ID, which clients choose, so that several may share one
    post = lambda f: clients[0].call_soon_threadsafe(f)
    loop = EngineLoop(open_model, metrics, post, config.queue_limit, on_change, policy)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        clients.append(asyncio.get_running_loop())
        loop.start()
        yield
        await asyncio.to_thread(loop.stop)

    # FastAPI's own pages at /docs load scripts from elsewhere.
    app = FastAPI(title="jdllm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine_loop, app.state.metrics = loop, metrics
    errors.install(app)
    openapi.install(app)

    def guarded(inner: Any) -> Any:
        """Behind what every request passes first."""
        gate = Gate(inner, config.api_keys, config.max_body, config.cors_origins)
        if not config.cors_origins:
            return gate
        return CORSMiddleware(
            gate,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID", "Retry-After", "retry-after-ms", "x-should-retry"],
        )

    app.add_middleware(guarded)

    def ready_model(name: str | None) -> ServedModel:
        if name is not None and name not in config.names:
            served = ", ".join(config.names)
            raise ApiError(
                404, f"model {name!r} is not served here; served: {served}", param="model", code="model_not_found"
            )
        if loop.model is None or loop.not_ready:
            raise ApiError(503, str(loop.not_ready), code="not_ready", headers=errors.retry_headers(5))
        return loop.model

    def card(name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": started, "owned_by": "jdllm", "root": config.root or name}
        return about | ({"max_model_len": loop.model.max_length} if loop.model else {})

    async def answer(request: Request, body: ChatRequest | CompletionRequest) -> Response:
        model = ready_model(body.model)
        if unknown := body.unknown_fields():
            if config.strict_api:
                raise RequestError(unknown[0], "is not a field that this server knows")
            if fresh := sorted({name[:MAX_NAME] for name in unknown} - told)[: MAX_TOLD - len(told)]:
                told.update(fresh)
                end = "; further ones will not be named" if len(told) == MAX_TOLD else ""
                log.warning("ignored, here and from now on, unknown fields: %s%s", ", ".join(map(repr, fresh)), end)
        request_id = request.state.request_id
        call = open_call(body, body.model or config.names[0], model, loop, request_id)
        calls.setdefault(request_id, []).append(call)

        def done() -> None:
            loop.cancel(call.jobs)
            calls[request_id].remove(call)
            if not calls[request_id]:
                del calls[request_id]
            request.state.fields = call.summary(config.log_content)
            if all(job.finish_reason for job in call.jobs):
                usage = call.usage()
                metrics.prompt_tokens.inc(usage["prompt_tokens"])
                metrics.generation_tokens.inc(usage["completion_tokens"])

        if body.stream:
            return EventStream(call, config.keep_alive, config.patience, done)
        try:
            result = await _unless_gone(request, call, loop.cancel)
            return Response(to_json(result), media_type="application/json")
        finally:
            done()

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, await _body(request, ChatRequest))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, await _body(request, CompletionRequest))

    busy = {"/v1/chat/completions": chat_completions, "/v1/completions": completions}

    @app.post("/v1/abort")
    async def abort(request: Request) -> Mapping[str, Any]:
        body = await _body(request, AbortRequest)
        found = calls.get(body.request_id, [])
        jobs = [job for call in found for job in call.jobs if not job.done]
        loop.abort(jobs)
        return {"request_id": body.request_id, "aborted": len(jobs)}

    @app.get("/v1/models")
    async def models() -> Mapping[str, Any]:
        return {"object": "list", "data": [card(name) for name in config.names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Mapping[str, Any]:
        if name not in config.names:
            raise ApiError(404, f"model {name!r} is not served here", param="model", code="model_not_found")
        return card(name)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Mapping[str, Any]:
        body = await _body(request, TokenizeRequest)
        if body.add_generation_prompt is False:
            raise RequestError("add_generation_prompt", "is not supported by this server; leave it out")
        model = ready_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", "give either prompt or messages")
        words = model.tokenizer
        if body.prompt is None:
            chat = check_messages(body.messages)
            refuse_far_too_long([m["content"] for m in chat], model, "messages")
            ids = words.encode_checked(chat)
        else:
            refuse_far_too_long([body.prompt], model, "prompt")
            ids = words.encode(body.prompt, begins=body.add_special_tokens is not False)
        return {"count": len(ids), "max_model_len": model.max_length, "tokens": ids}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Mapping[str, Any]:
        body = await _body(request, DetokenizeRequest)
        return {"prompt": ready_model(body.model).tokenizer.decode(body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Mapping[str, Any]:
        words = ready_model(None).tokenizer
        names = ("bos_token", "eos_token", "pad_token")
        return {**{name: words.token(name) for name in names}, "chat_template": words.chat_template}

    @app.get("/health")
    async def health() -> Mapping[str, str]:
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> Response:
        if reason := loop.not_ready:
            return JSONResponse({"status": "not ready", "reason": reason}, 503, errors.retry_headers(5))
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> Mapping[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.render(), media_type=metrics.content_type)

    playground.install(app, config.names)  # last: paths are looked for in this order
    app.state.front = Direct(app, guarded, busy)
    return app


async def _body(request: Request, kind: type[Body]) -> Body:
    parts = []
    while True:  # as Request.body, without its generator, which the event loop keeps books about
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return kind.model_validate_json(b"".join(parts))


async def _unless_gone(request: Request, call: Call, cancel: Callable[[Sequence[Job]], None]) -> Mapping[str, Any]:
    """The call's result; ends early, with an error that nobody will read, when the client hangs up."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel(call.jobs)
        call.news.set()

    watching = asyncio.ensure_future(watch())
    try:
        return await call.result()
    finally:
        watching.cancel()
