"""What every request passes first: its id, its size, its key; and last, a line in the log. Plain ASGI, so that streams
go through untouched."""

import hmac
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jdllm.serving.errors import ApiError, from_exception
from jdllm.serving.logs import fields

log = logging.getLogger("jdllm.serving")

QUIET = ("/health", "/ready", "/metrics")
"""Asked for every few seconds; their lines stand in a debug log alone."""

MAX_PATH = 200
"""Characters of a path that the log shows."""


def new_id() -> str:
    """A name that no other request has; no secret. (The system's random numbers cost a call that lets go of the
    interpreter, which the engine's thread then takes.)"""
    return f"{random.getrandbits(128):032x}"


class Direct:
    """Before everything else. Posts to ``endpoints`` (path -> function of the request) go there, ``guarded``, without
    the framework's layers and routing, which would take a tenth of the time of the thread that answers clients; all
    others go to ``app``, which has its own guard."""

    def __init__(
        self, app: Any, guarded: Callable[[Any], Any], endpoints: Mapping[str, Callable[[Request], Awaitable[Response]]]
    ):
        self._app, self._endpoints = app, {path: guarded(_asgi(function)) for path, function in endpoints.items()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        endpoint = self._endpoints.get(scope["path"]) if scope.get("method") == "POST" else None
        await (endpoint or self._app)(scope, receive, send)


def _asgi(function: Callable[[Request], Awaitable[Response]]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = await function(Request(scope, receive))
        await response(scope, receive, send)

    return app


class Gate:
    """Middleware. Echoes ``X-Request-ID`` or makes one up, refuses bodies above ``max_body`` bytes (413) and posts from
    web pages that are neither the server's own nor of ``origins`` (403), and under /v1 asks for one of the keys if
    there are any (401). A request's log line says what its handler left in
    ``request.state.fields``; nothing of its content, unless that does."""

    def __init__(self, app: Any, api_keys: Sequence[str], max_body: int, origins: Sequence[str] = ()):
        self._app, self._origins = app, origins
        self._keys = [f"Bearer {key}".encode() for key in api_keys]
        self._max_body = max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))  # of equal names the first counts
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not (request_id.isprintable() and request_id.isascii() and 0 < len(request_id) <= 200):
            request_id = new_id()
        named = (b"x-request-id", request_id.encode())
        state = scope.setdefault("state", {})
        state["request_id"], begin, status = request_id, time.perf_counter(), 0

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        seen = 0

        async def counted_receive() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise self._too_large()
            return message

        try:
            if scope["method"] == "POST":
                self._check_origin(headers)
            self._check(scope["path"], headers)
            await self._app(scope, counted_receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            # Caught here, inside of what Starlette does about it, so that the answer has its id.
            told = from_exception(error)
            if not isinstance(error, ApiError) and told.status >= 500:
                log.error("a request failed", exc_info=error, extra=fields(request_id=request_id))
            if status:
                raise
            await told.response()(scope, receive, send_with_id)
        finally:
            known = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:MAX_PATH]}
            known |= {"status": status or None, "seconds": round(time.perf_counter() - begin, 6)}
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            log.log(level, "request", extra=fields(**known, **state.get("fields", {})))

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """A browser says whose page asks. It hides the answer from a page of another origin, but by then the request
        would have run."""
        if (given := headers.get(b"origin")) is None:
            return
        origin = given.decode("latin-1")
        if given.partition(b"://")[2] == headers.get(b"host") or {origin, "*"} & {*self._origins}:
            return
        text = f"a page of {origin[:MAX_PATH]!r} may not ask this server; --cors-origin allows it"
        raise ApiError(403, text, code="origin_not_allowed")

    def _check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        given = headers.get(b"authorization", b"")
        spellings = (given, given.decode("latin-1").encode())  # clients send what is not ASCII in either
        # Every one, so that the time tells nothing.
        matches = [hmac.compare_digest(one, key) for key in self._keys for one in spellings]
        if self._keys and path.startswith("/v1") and not any(matches):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body} bytes", code="request_too_large")
