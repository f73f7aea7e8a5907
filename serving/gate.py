"""What every request passes first: its id, its size, its key. Plain ASGI, so that streams go through untouched."""

import hmac
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from jdllm.serving.errors import ApiError


class Gate:
    """Middleware. Echoes ``X-Request-ID`` or makes one up, refuses bodies above ``max_body`` bytes (413), and under
    /v1 asks for the key if there is one (401)."""

    def __init__(self, app: Any, api_key: str | None, max_body: int):
        self._app = app
        self._key = f"Bearer {api_key}".encode() if api_key else None
        self._max_body = max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not (request_id.isprintable() and request_id.isascii() and 0 < len(request_id) <= 200):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
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
            self._check(scope["path"], headers)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
            return
        await self._app(scope, counted_receive, send_with_id)

    def _check(self, path: str, headers: Headers) -> None:
        given = headers.get("authorization", "").encode()
        if self._key is not None and path.startswith("/v1") and not hmac.compare_digest(given, self._key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body} bytes", code="request_too_large")
