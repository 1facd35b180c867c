"""Streams that go on beside a test while it does something to the server."""

import asyncio
import contextlib
import threading
from typing import Any

import httpx

from plait_testing.load import Answer, events, take
from plait_testing.server import Server


class Streams:
    """Streams that run in a thread of their own until they end."""

    def __init__(self, server: Server, count: int, body: dict[str, Any]) -> None:
        self.answers = [Answer() for _ in range(count)]
        self._server = server
        self._body = body
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def all_draw(self, least: int) -> bool:
        return all(len(answer.tokens) >= least for answer in self.answers)

    def have_ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def _run(self) -> None:
        async with httpx.AsyncClient(
            base_url=self._server.url, headers=self._server.headers, timeout=90.0
        ) as http:
            await asyncio.gather(*(self._read(http, answer) for answer in self.answers))

    async def _read(self, http: httpx.AsyncClient, answer: Answer) -> None:
        with contextlib.suppress(httpx.TransportError):  # seen by what the answer lacks
            async with http.stream("POST", "/v1/completions", json=self._body) as reply:
                answer.status = reply.status_code
                async for event in events(reply):
                    take(answer, event)
