"""Errors as HTTP answers, always `{"error": {"message", "type", "param", "code"}}` as OpenAI's.

RequestError 400 (404 for an unknown model, 413 for an oversized body), AuthenticationError 401,
OverloadedError 503 with Retry-After, ReplicaError 500, everything else 500 without details.
"""

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.cluster.errors import OverloadedError, ReplicaError, RequestError, UnknownModelError

_logger = logging.getLogger(__name__)
_CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs show it
_MAX_MESSAGE = 2000  # characters; messages quote what the client sent


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""


class BodyTooLargeError(RequestError):
    """More bytes than a request may have."""


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` an answer in OpenAI's shape."""
    for kind in (RequestError, OverloadedError, ReplicaError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_middleware(_LastResort)


class _LastResort:
    """Answers what no handler knows.

    A handler for `Exception` would not do: the framework raises again after it has answered, and
    the server then closes a connection on which the client may already have sent its next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as exc:  # the outermost place of a request
            if has_started:
                raise
            await _json(*describe_error(exc))(scope, receive, send)


def describe_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error; one that should not happen is logged, its text kept back."""
    if isinstance(error, RequestError):
        status = _status_of(error)
        return status, _body(
            str(error), "invalid_request_error", param=error.param, code=error.code
        )
    if isinstance(error, OverloadedError):
        return 503, _body(str(error), "overloaded_error", code="overloaded")
    if isinstance(error, ReplicaError):
        _logger.error("a request failed: %s", error)
        return 500, _body(str(error), "server_error", code="replica_failed")
    _logger.error("unexpected error while serving a request", exc_info=error)
    message = "The server had an error while processing the request."
    return 500, _body(message, "server_error", code="internal_error")


def refuse_invalid(error: ValidationError) -> RequestError:
    """The first complaint about a body, as an error that names the field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {message}", code="invalid_json")
    param = _path(first["loc"])
    where = f"{param}: " if param else "the body: "
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return RequestError(f"{where}{message}", param=param, code=code)


def _path(location: Sequence[int | str]) -> str | None:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None


def _status_of(error: RequestError) -> int:
    if isinstance(error, AuthenticationError):
        return 401
    if isinstance(error, UnknownModelError):
        return 404
    return 413 if isinstance(error, BodyTooLargeError) else 400


def _body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    status, body = describe_error(error)
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(status, body, headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        body = _body(f"Unknown URL ({where})", "invalid_request_error", code="unknown_url")
    elif error.status_code == 405:
        body = _body(
            f"Method not allowed ({where})", "invalid_request_error", code="method_not_supported"
        )
    else:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        body = _body(str(error.detail) or HTTPStatus(error.status_code).phrase, kind)
    return _json(error.status_code, body, dict(error.headers or {}))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
