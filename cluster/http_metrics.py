"""Counts HTTP requests around an ASGI application."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.cluster.metrics import IngressMetrics

_ENDPOINTS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/health",
        "/ready",
        "/plan",
        "/metrics",
    }
)
_CLIENT_GONE = 499  # as nginx counts requests whose client hung up before an answer


class MeasuredApp:
    """An ASGI application whose requests are counted by endpoint and status."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = scope["path"] if scope["path"] in _ENDPOINTS else "other"
        status = _CLIENT_GONE
        start = time.monotonic()

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._metrics.in_progress.track_inprogress():
            try:
                await self._app(scope, receive, count)
            finally:
                self._metrics.answered(endpoint, status, time.monotonic() - start)
