"""Many clients at once, some of which hang up."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from plait_testing.greedy import GreedyRun
from plait_testing.server import Server

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, and when its client hangs up: after so many seconds, or after so many events."""

    body: dict[str, Any]
    path: str = "/v1/chat/completions"
    leaves_after_s: float | None = None
    leaves_after_events: int | None = None

    @property
    def leaves(self) -> bool:
        return self.leaves_after_s is not None or self.leaves_after_events is not None


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a client got. `status` is 0 if it hung up before, or the connection broke."""

    status: int = 0
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def chat(model: str, messages: list[dict[str, str]], *, max_tokens: int) -> dict[str, Any]:
    """A greedy chat that streams its tokens one by one."""
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 2,
    }


def run_load(server: Server, asks: Sequence[Ask], *, concurrency: int) -> list[Answer]:
    """Send all of `asks`, so many at once; answers in their order."""

    async def run() -> list[Answer]:
        turns = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=server.url, headers=server.headers, timeout=_TIMEOUT_S, limits=limits
        ) as http:

            async def one(ask: Ask) -> Answer:
                async with turns:
                    return await send(http, ask)

            return await asyncio.gather(*(one(ask) for ask in asks))

    return asyncio.run(run())


async def send(http: httpx.AsyncClient, ask: Ask) -> Answer:
    """The answer to one streamed request, or what came of it before its client left."""
    answer = Answer()
    with contextlib.suppress(TimeoutError):  # the connection is closed then
        await asyncio.wait_for(_read(http, ask, answer), ask.leaves_after_s)
    return answer


async def _read(http: httpx.AsyncClient, ask: Ask, answer: Answer) -> None:
    async with http.stream("POST", ask.path, json=ask.body) as reply:
        answer.status = reply.status_code
        answer.headers = dict(reply.headers)
        if reply.status_code != 200:
            answer.error = json.loads(await reply.aread()).get("error")
            return
        num_events = 0
        async for event in events(reply):
            num_events += 1
            take(answer, event)
            if num_events == ask.leaves_after_events:
                return


async def events(reply: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events."""
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def take(answer: Answer, event: str) -> None:
    """Add an event of a chat or completion stream."""
    if event == "[DONE]":
        answer.is_done = True
        return
    data = json.loads(event)
    if "error" in data:
        answer.error = data["error"]
        return
    for choice in data["choices"]:
        logprobs = choice.get("logprobs")
        if logprobs:
            answer.tokens += [entry["token"] for entry in logprobs.get("content") or ()]
        else:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            answer.tokens += [text] if text else []
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def run_alone(server: Server, body: dict[str, Any]) -> GreedyRun:
    """A streamed chat with nothing beside it, with the gaps to the runner-up."""
    with server.client() as http:
        reply = http.post("/v1/chat/completions", json=body | {"stream": False})
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    entries = choice["logprobs"]["content"]
    tops = [sorted((top["logprob"] for top in e["top_logprobs"]), reverse=True) for e in entries]
    return GreedyRun(
        tokens=tuple(entry["token"] for entry in entries),
        gaps=tuple(top[0] - top[1] for top in tops),
        finish_reason=choice["finish_reason"],
    )


def leave_at_random(rng: random.Random, body: dict[str, Any]) -> Ask:
    """A client that hangs up in the queue, in the prefill or while tokens come."""
    if rng.random() < 0.5:
        return Ask(body=body, leaves_after_s=rng.choice((0.0, 0.02, 0.1, 0.3, 0.8)))
    return Ask(body=body, leaves_after_events=rng.randint(1, 12))
