"""The FastAPI application: routes, and the way from a body to an answer."""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from pydantic import ValidationError

from plait.cluster.api.engine import Engine, ModelInfo
from plait.cluster.api.errors import AuthenticationError, install_error_handlers, refuse_invalid
from plait.cluster.api.generation import Generation, Piece, Reply, run_generation
from plait.cluster.api.prompts import Prompt, Prompter, new_request_id
from plait.cluster.api.replies import ChatReply, CompletionReply
from plait.cluster.api.schema import ChatBody, CompletionBody, GenerationBody
from plait.cluster.api.transport import EventStream, SendEvents, read_body, run_until_disconnect
from plait.cluster.errors import UnknownModelError
from plait.cluster.tokenizer import Tokenizer
from plait.worker.errors import ConfigError

_logger = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=GenerationBody)
_LARGE_BODY = 32 * 1024  # bytes; from here on other requests should not wait for the tokenizer
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(
    engine: Engine,
    tokenizer: Tokenizer,
    model: ModelInfo,
    *,
    api_key: str | None = None,
    default_seed: int | None = None,
    max_body_bytes: int = 16 * 1024 * 1024,
    max_choices: int = 256,
    probe_timeout_s: float = 0.5,
) -> FastAPI:
    """The OpenAI-compatible server of one model.

    Sampling defaults are OpenAI's (temperature 1), whatever generation_config.json says.

    Args:
        api_key: what `/v1/*` asks for as `Authorization: Bearer`; None leaves it open.
        default_seed: seed of requests that bring none; None draws one.
        max_body_bytes: largest body that is read.
        max_choices: continuations, over all prompts, that one request may ask for.
        probe_timeout_s: after this long without a word from the engine, `/health` and `/ready`
            answer no.
    Raises:
        ConfigError: an API key without characters.
    """
    if api_key is not None and not api_key.strip():
        raise ConfigError("the API key is empty; give one, or none at all")
    prompter = Prompter(
        tokenizer=tokenizer, model=model, default_seed=default_seed, max_choices=max_choices
    )
    service = _Service(
        engine=engine,
        tokenizer=tokenizer,
        model=model,
        prompter=prompter,
        max_body_bytes=max_body_bytes,
    )
    app = FastAPI(
        title="Plait", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    install_error_handlers(app)
    app.include_router(_openai_routes(service, api_key))
    app.include_router(_operator_routes(engine, probe_timeout_s))
    return app


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    """What answering a request takes."""

    engine: Engine
    tokenizer: Tokenizer
    model: ModelInfo
    prompter: Prompter
    max_body_bytes: int

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, self._prepare_completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, self._prepare_chat)

    async def _answer(
        self, request: Request, kind: type[_Body], prepare: Callable[[_Body], Generation]
    ) -> Response:
        raw = await read_body(request, max_bytes=self.max_body_bytes)
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as exc:
            raise refuse_invalid(exc) from exc
        is_large = len(raw) > _LARGE_BODY
        generation = await asyncio.to_thread(prepare, body) if is_large else prepare(body)
        if generation.is_stream:

            async def produce(send_events: SendEvents) -> None:
                await self._stream(generation, send_events)

            return EventStream(produce)
        reply = await run_until_disconnect(self._whole(generation), request.receive)
        return _json(reply)

    def _prepare_completion(self, body: CompletionBody) -> Generation:
        prompts = self.prompter.completion(body)
        echoes = [prompt.echo for prompt in prompts for _ in range(body.n or 1)]
        reply = CompletionReply(
            self.tokenizer, has_logprobs=body.num_logprobs is not None, echoes=echoes
        )
        return self._prepare(body, prompts, reply, new_request_id("cmpl"))

    def _prepare_chat(self, body: ChatBody) -> Generation:
        prompts = self.prompter.chat(body)
        reply = ChatReply(self.tokenizer, has_logprobs=body.num_logprobs is not None)
        return self._prepare(body, prompts, reply, new_request_id("chatcmpl"))

    def _prepare(
        self, body: GenerationBody, prompts: Sequence[Prompt], reply: Reply, request_id: str
    ) -> Generation:
        return Generation(
            request_id=request_id,
            specs=self.prompter.specs(body, prompts, request_id),
            stop=tuple(body.stop or ()),
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            is_stream=bool(body.stream),
            includes_usage=body.includes_usage,
            reply=reply,
        )

    async def _whole(self, generation: Generation) -> dict[str, Any]:
        """Everything in one answer."""
        choices = [Piece(index=i, is_first=True) for i in range(len(generation.specs))]

        async def emit(piece: Piece) -> None:
            choices[piece.index].add(piece)

        await run_generation(self.engine, self.tokenizer, generation, emit)
        return {
            **self._envelope(generation, generation.reply.kind),
            "choices": [generation.reply.choice(piece) for piece in choices],
            "usage": _usage(generation, sum(piece.num_tokens for piece in choices)),
        }

    async def _stream(self, generation: Generation, send_events: SendEvents) -> None:
        """Each piece as it comes, then the usage if asked for."""
        envelope = self._envelope(generation, generation.reply.chunk_kind)
        no_usage = {"usage": None} if generation.includes_usage else {}
        num_tokens = 0

        async def emit(piece: Piece) -> None:
            nonlocal num_tokens
            num_tokens += piece.num_tokens
            deltas = generation.reply.deltas(piece)
            await send_events([{**envelope, "choices": [d], **no_usage} for d in deltas])

        await run_generation(self.engine, self.tokenizer, generation, emit)
        if generation.includes_usage:
            usage = _usage(generation, num_tokens)
            await send_events([{**envelope, "choices": [], "usage": usage}])

    def _envelope(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {
            "id": generation.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model.name,
        }


def _openai_routes(service: _Service, api_key: str | None) -> APIRouter:
    async def check_key(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # Compared in constant time, so that the time tells nothing about the key.
        same = hmac.compare_digest(given.strip().encode("latin-1"), api_key.strip().encode())
        if scheme.lower() != "bearer" or not same:
            raise AuthenticationError(
                "a valid API key is needed, as `Authorization: Bearer KEY`", code="invalid_api_key"
            )

    async def list_models() -> Response:
        return _json({"object": "list", "data": [_model_entry(service.model)]})

    async def show_model(model_id: str) -> Response:
        if model_id != service.model.name:
            raise UnknownModelError(model_id, service.model.name)
        return _json(_model_entry(service.model))

    router = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])
    router.add_api_route("/models", list_models)
    router.add_api_route("/models/{model_id:path}", show_model)
    router.add_api_route("/completions", service.completions, methods=["POST"])
    router.add_api_route("/chat/completions", service.chat_completions, methods=["POST"])
    return router


def _operator_routes(engine: Engine, probe_timeout_s: float) -> APIRouter:
    async def probe(question: Coroutine[Any, Any, bool], yes: str, no: str) -> Response:
        said_yes = await _ask(question, probe_timeout_s)
        return _json({"status": yes if said_yes else no}, 200 if said_yes else 503)

    async def health() -> Response:
        return await probe(engine.is_healthy(), "ok", "unhealthy")

    async def ready() -> Response:
        return await probe(engine.is_ready(), "ready", "not ready")

    async def plan() -> Response:
        return _json(await engine.plan())

    async def metrics() -> Response:
        return Response(await engine.metrics(), media_type=_METRICS_TYPE)

    router = APIRouter()
    routes: tuple[tuple[str, Callable[[], Awaitable[Response]]], ...] = (
        ("/health", health),
        ("/ready", ready),
        ("/plan", plan),
        ("/metrics", metrics),
    )
    for path, answer in routes:
        router.add_api_route(path, answer)
    return router


async def _ask(question: Coroutine[Any, Any, bool], timeout_s: float) -> bool:
    """The answer, or no where none comes in time; never waits for a cancellation to be heard."""
    task = asyncio.ensure_future(question)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done() or task.cancelled():
            return False
        if (failure := task.exception()) is not None:
            _logger.error("a probe of the engine failed", exc_info=failure)
            return False
        return task.result()
    finally:
        task.cancel()


def _model_entry(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "plait",
        "max_model_len": model.max_model_len,
    }


def _usage(generation: Generation, num_output: int) -> dict[str, int]:
    num_prompt = generation.num_prompt_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
