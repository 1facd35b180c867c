"""Reading bodies, watching for clients that hang up, and server-sent events."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from plait.cluster.api.errors import BodyTooLargeError, describe_error

_T = TypeVar("_T")
SendEvents = Callable[[Sequence[dict[str, Any]]], Awaitable[None]]


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        BodyTooLargeError: it has more than `max_bytes`; the rest is not read.
        ClientDisconnect: the client left before its end.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise BodyTooLargeError(
                f"the body has more than {max_bytes} bytes", code="request_too_large"
            )
    return bytes(body)


async def run_until_disconnect(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    """The result of `work`, which is cancelled as soon as the client hangs up.

    Raises:
        ClientDisconnect: the client is gone, and `work` has ended.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, each sent at once.

    The status waits for the first events, so that what fails before them is an ordinary error
    answer. Later errors become an event, and the stream ends without `[DONE]`.

    Args:
        produce: called once with a function that sends events; ends when all are sent.
    """

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[SendEvents], Coroutine[Any, Any, None]]) -> None:
        self._produce = produce
        self._has_started = False
        self._lock = asyncio.Lock()  # choices send from tasks of their own
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(self._run(send), receive)
        except ClientDisconnect:
            if not self._has_started:
                raise

    async def _run(self, send: Send) -> None:
        async def send_events(events: Sequence[dict[str, Any]]) -> None:
            if events:
                await self._write(send, b"".join(_event(event) for event in events))

        try:
            await self._produce(send_events)
            await self._write(send, b"data: [DONE]\n\n")
        except ClientDisconnect:
            raise
        except Exception as exc:  # the outermost place of a stream: described, logged, ended
            if not self._has_started:
                raise
            await self._write(send, _event(describe_error(exc)[1]))
        await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        async with self._lock:
            if not self._has_started:
                self._has_started = True
                await _send(
                    send,
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    },
                )
            await _send(send, {"type": "http.response.body", "body": data, "more_body": True})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _send(send: Send, message: Message) -> None:
    try:
        await send(message)
    except OSError as exc:  # how some servers tell that nobody listens
        raise ClientDisconnect from exc
