"""A scripted engine, and a real HTTP server around it."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from plait.cluster.api.app import build_app
from plait.cluster.api.engine import ModelInfo
from plait.cluster.request import FinishReason, RequestSpec, TokenChunk, TokenLogprob
from plait.cluster.tokenizer import Tokenizer

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
MODEL = ModelInfo(
    name="org/demo", max_model_len=64, max_request_tokens=1000, created=1700000000, vocab_size=None
)

NAME = MODEL.name
TURN = {"role": "user", "content": "Hi"}
REPLY = "Dobrý večer 😀 水"
TOKENIZER = Tokenizer(DEMO_MODEL)

# A number is a pause in seconds, an exception is raised, ids come out together.
Step = Sequence[int] | float | Exception
Script = Callable[[RequestSpec], Iterable[Step]]


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    """Log-probabilities that can be told apart, the last one infinite."""
    top = [((token_id + i) % 1024, -0.25 * (i + 1)) for i in range(num_top)]
    if num_top > 1:
        top[-1] = (top[-1][0], float("-inf"))
    return TokenLogprob(logprob=-0.25, top=tuple(top))


class ScriptedEngine:
    """Plays a script for each request, and keeps a book of what became of them."""

    def __init__(self) -> None:
        self.is_hanging = False
        self.answers_ready = True
        self.num_cancelled_probes = 0
        self.reset()

    def reset(self) -> None:
        self.script: Script = lambda spec: [[7]]
        self.finish: FinishReason = "stop"
        self.error: str | None = None
        self.started: list[RequestSpec] = []
        self.aborted: list[str] = []

    async def generate(self, spec: RequestSpec) -> AsyncIterator[TokenChunk]:
        self.started.append(spec)
        has_ended = False
        try:
            index = 0
            for step in self.script(spec):
                if isinstance(step, Exception):
                    has_ended = True
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                ids = tuple(step)[: spec.max_tokens - index]
                is_full = index + len(ids) == spec.max_tokens
                has_ended = is_full
                yield self._chunk(spec, index, ids, "length" if is_full else None)
                index += len(ids)
                if is_full:
                    return
            has_ended = True
            yield self._chunk(spec, index, (), self.finish)
        finally:
            if not has_ended:
                self.aborted.append(spec.request_id)

    def _chunk(
        self, spec: RequestSpec, index: int, ids: tuple[int, ...], finish: FinishReason | None
    ) -> TokenChunk:
        logprobs: tuple[TokenLogprob, ...] = ()
        if spec.num_logprobs is not None:
            logprobs = tuple(logprob_of(i, spec.num_logprobs) for i in ids)
        return TokenChunk(
            request_id=spec.request_id,
            index=index,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=finish,
            error=self.error if finish == "error" else None,
        )

    async def is_ready(self) -> bool:
        if self.is_hanging:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.num_cancelled_probes += 1
                raise
        return self.answers_ready

    async def is_healthy(self) -> bool:
        return await self.is_ready()

    async def plan(self) -> dict[str, Any]:
        return {"digest": "abc", "waste": float("inf")}

    async def metrics(self) -> bytes:
        return b"plait_up 1\n"


@contextlib.contextmanager
def serve(engine: ScriptedEngine, **options: Any) -> Iterator[str]:
    """The base address of a server on this machine, for as long as the context lasts."""
    app = build_app(engine, TOKENIZER, MODEL, **options)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def pieces(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """`ids` in chunks of the given sizes, over and over."""
    cut, start, turn = [], 0, 0
    while start < len(ids):
        cut.append(ids[start : start + sizes[turn % len(sizes)]])
        start += sizes[turn % len(sizes)]
        turn += 1
    return cut


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def says(text: str, sizes: Sequence[int] = (1,)) -> Script:
    return lambda spec: pieces(encode(text), sizes)


def events(response: httpx.Response) -> tuple[list[Any], bool]:
    """The events of a stream; every one must be strict JSON, and the last [DONE] or an error."""
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") for part in parts[:-1])
    data = [part.removeprefix("data: ") for part in parts[:-1]]
    if data[-1] != "[DONE]":
        assert "error" in json.loads(data[-1])
    return [strict(part) for part in data if part != "[DONE]"], data[-1] == "[DONE]"


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def reached(condition: Callable[[], bool], limit_s: float = 1.0) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False
