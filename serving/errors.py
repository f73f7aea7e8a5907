"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``, whatever went wrong."""

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from jdllm.config import RequestError

KINDS = {401: "authentication_error", 429: "rate_limit_error"}
"""``type`` by status; otherwise ``invalid_request_error`` below 500 and ``server_error`` from there on."""


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        message, param, code: as in OpenAI's error object.
        headers: extra response headers (Retry-After and the like).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object, also sent inside a stream."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def retry_headers(seconds: float) -> dict[str, str]:
    """When to come back, in the two spellings that clients read. The openai package gives up above 120 s."""
    seconds = min(max(seconds, 0.1), 120.0)
    return {"Retry-After": str(-int(-seconds // 1)), "retry-after-ms": str(int(seconds * 1000))}


def from_exception(error: BaseException) -> ApiError:
    """The error to show for an exception; details of unexpected ones go to the log, not to the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
        field = ".".join(map(str, first["loc"])) or "body"
        return ApiError(400, f"{field}: {first['msg']}", param=field, code="invalid_value")
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


def install(app: FastAPI) -> None:
    """Make every error of the app one of ours: also unknown paths and wrong methods. (Bugs: gate.py.)"""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return from_exception(error).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        messages = {
            404: f"there is nothing at {request.url.path}",
            405: f"{request.method} is not possible at {request.url.path}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    for kind in (ApiError, RequestError, ValidationError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
