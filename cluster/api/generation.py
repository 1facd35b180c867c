"""Runs the choices of one HTTP request; the same code for streamed and whole replies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from plait.cluster.api.engine import Engine
from plait.cluster.errors import ReplicaError
from plait.cluster.request import RequestSpec, TokenChunk, TokenLogprob
from plait.cluster.text import TextStream
from plait.cluster.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnToken:
    """A token whose log-probability was asked for; `offset` counts the characters before it."""

    token_id: int
    offset: int
    logprob: TokenLogprob


@dataclass(slots=True, kw_only=True)
class Piece:
    """What a choice gained: some text, which may be none, and the tokens it came from."""

    index: int
    is_first: bool = False
    text: str = ""
    num_tokens: int = 0
    drawn: list[DrawnToken] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None

    def add(self, later: "Piece") -> None:
        self.text += later.text
        self.num_tokens += later.num_tokens
        self.drawn += later.drawn
        self.finish_reason = later.finish_reason


class Reply(Protocol):
    """How an endpoint writes choices down."""

    kind: str  # `object` of a whole reply
    chunk_kind: str  # and of a streamed chunk

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole choice."""
        ...

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """What to stream for a piece, one chunk each; none where there is nothing to say."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A checked HTTP request: what to run, and how to answer."""

    request_id: str
    specs: tuple[RequestSpec, ...]  # one per choice
    stop: tuple[str, ...]
    num_prompt_tokens: int
    is_stream: bool
    includes_usage: bool
    reply: Reply


Emit = Callable[[Piece], Awaitable[None]]


async def run_generation(
    engine: Engine, tokenizer: Tokenizer, generation: Generation, emit: Emit
) -> None:
    """Give every piece of every choice to `emit`, in order within a choice.

    Waiting in `emit` holds its choice back. When a choice fails or the caller is cancelled, the
    others are aborted.
    """
    runs = [
        _run_choice(engine, spec, _Choice(index, tokenizer, generation.stop), emit)
        for index, spec in enumerate(generation.specs)
    ]
    if len(runs) == 1:
        await runs[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(run)
    except ExceptionGroup as failures:
        # The first failure is the cause; those after it come from ending the others.
        raise failures.exceptions[0] from failures


async def _run_choice(engine: Engine, spec: RequestSpec, choice: "_Choice", emit: Emit) -> None:
    chunks = engine.generate(spec)
    try:
        async for chunk in chunks:
            piece = choice.feed(chunk, has_logprobs=spec.num_logprobs is not None)
            await emit(piece)
            if piece.finish_reason is not None:
                return
        raise ReplicaError("the reply ended without a finish reason")
    finally:
        await _close(chunks)


async def _close(chunks: AsyncIterator[TokenChunk]) -> None:
    aclose = getattr(chunks, "aclose", None)  # generators have it, plain iterators need not
    if aclose is not None:
        await aclose()


class _Choice:
    """The state of one continuation."""

    def __init__(self, index: int, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._index = index
        self._text = TextStream(tokenizer, stop)
        self._is_first = True

    def feed(self, chunk: TokenChunk, *, has_logprobs: bool) -> Piece:
        """Take tokens up to the one that completes a stop string."""
        piece = Piece(index=self._index, is_first=self._is_first)
        self._is_first = False
        for i, token_id in enumerate(chunk.token_ids):
            offset = self._text.num_chars
            piece.text += self._text.push((token_id,))
            piece.num_tokens += 1
            if has_logprobs:
                piece.drawn.append(
                    DrawnToken(token_id=token_id, offset=offset, logprob=chunk.logprobs[i])
                )
            if self._text.stopped is not None:
                piece.finish_reason = "stop"
                return piece
        if chunk.finish_reason is not None:
            piece.text += self._text.finish()
            piece.finish_reason = "stop" if self._text.stopped else _reason(chunk)
        return piece


def _reason(chunk: TokenChunk) -> Literal["stop", "length"]:
    if chunk.finish_reason == "stop" or chunk.finish_reason == "length":
        return chunk.finish_reason
    raise ReplicaError(chunk.error or "the request was aborted by the server")
