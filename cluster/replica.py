"""A model copy on Ray Serve: controller, scheduler and the ranks of one placement group."""

import asyncio
import logging
import os
import signal
import threading
from typing import Any

import msgspec
import ray
from prometheus_client import CollectorRegistry
from ray import serve

from plait.cluster.controller import start_model
from plait.cluster.engine import Engine
from plait.cluster.engine_thread import EngineThread
from plait.cluster.errors import ReplicaError, RequestError
from plait.cluster.executors.ray import RayExecutor
from plait.cluster.metrics import EngineCollector, LatencyEvents
from plait.cluster.metrics_server import serve_metrics
from plait.cluster.request import FinishReason, RequestSpec, TokenChunk
from plait.cluster.settings import ServeSettings
from plait.cluster.token_stream import Address, TokenSender
from plait.worker.plan import encode

logger = logging.getLogger(__name__)


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """What an ingress sends: the request, and where its tokens go."""

    spec: RequestSpec
    address: Address


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """What `generate` returns once a request has ended."""

    finish_reason: FinishReason
    num_tokens: int


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What ingresses know of a replica."""

    replica: str
    is_healthy: bool
    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    plan: dict[str, Any]


class Replica:
    """One model copy. Its calls stay open while their request runs, so that Serve sees the load.

    `settings` come with `device` resolved. Any failure of a rank ends the whole replica: open calls
    fail at once, the ranks are killed, and Serve starts a new copy.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], model_path: str, decodable_vocab_size: int, app_id: str
    ) -> None:
        self._settings = ServeSettings.model_validate(settings)
        self._model_path = model_path
        self._name = serve.get_replica_context().replica_id.unique_id
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, asyncio.Future[Finished]] = {}
        self._num_tokens: dict[str, int] = {}
        self._failure: str | None = None
        self._sender = TokenSender(self._name, on_lost=self._abort_lost)
        registry = CollectorRegistry()
        events = LatencyEvents(registry, self._name)
        # The placement group belongs to this thread's context: ask before leaving it.
        group = ray.util.get_current_placement_group()
        self._executor, self._engine = await asyncio.to_thread(
            self._start, group, decodable_vocab_size, events
        )
        self._thread = EngineThread(
            self._engine,
            deliver=lambda chunks: self._call_soon(self._deliver, chunks),
            fail=self._fail,
            stall_limit_s=self._settings.step_timeout_s,
        )
        self._thread.start()
        self._executor.watch(self._fail)
        registry.register(EngineCollector(self._engine, self._thread, replica=self._name))
        serve_metrics(registry, self._settings, role="replica", name=self._name, app_id=app_id)

    async def generate(self, call: bytes) -> bytes:
        """Run a request (`GenerateCall`) to its end; `Finished` says how it ended.

        Raises:
            RequestError: the request could never finish here.
            ReplicaError: this model copy has failed.
        """
        message = msgspec.msgpack.decode(call, type=GenerateCall)
        spec, request_id = message.spec, message.spec.request_id
        self._check_alive()
        try:
            await self._sender.open(request_id, message.address)
        except OSError as exc:
            raise ReplicaError(f"the ingress of request {request_id} is gone: {exc}") from exc
        finished: asyncio.Future[Finished] = self._loop.create_future()
        self._open[request_id] = finished
        self._num_tokens[request_id] = len(spec.output_token_ids)
        try:
            await self._add(spec)
            return msgspec.msgpack.encode(await finished)
        finally:
            if not finished.done() or finished.cancelled():
                self._thread.abort(request_id)
            self._sender.close(request_id)
            del self._open[request_id]
            del self._num_tokens[request_id]

    async def status(self) -> bytes:
        """`ReplicaStatus`, without waiting for the engine."""
        model = self._engine.model
        return msgspec.msgpack.encode(
            ReplicaStatus(
                replica=self._name,
                is_healthy=self._failure is None and self._thread.is_healthy,
                max_model_len=model.limits.max_model_len,
                max_request_tokens=self._engine.scheduler.max_request_tokens,
                vocab_size=model.spec.vocab_size,
                plan={
                    **msgspec.json.decode(encode(model.plan)),
                    "layout_digest": model.plan.layout.digest,
                    "plan_digest": model.plan.digest,
                    "dtype": model.dtype,
                    "max_model_len": model.limits.max_model_len,
                    "max_num_seqs": model.limits.max_num_seqs,
                    "weight_bytes": model.weight_bytes,
                    "backends": model.backends,
                    "notes": model.limits.notes,
                },
            )
        )

    def check_health(self) -> None:
        """Serve asks this: progress, not a ping."""
        self._check_alive()
        if not self._thread.is_healthy:
            raise ReplicaError(
                f"no step has ended for {self._thread.last_step_age_s:.0f} s though there is work"
            )

    def _start(
        self,
        group: Any,  # noqa: ANN401 - ray has no types
        decodable_vocab_size: int,
        events: LatencyEvents,
    ) -> tuple[RayExecutor, Engine]:
        settings = self._settings
        size, device = settings.tensor_parallel_size, settings.device
        executor = RayExecutor(
            group,
            size=size,
            device=device,
            threads_per_rank=settings.threads_per_rank,
            load_timeout_s=settings.load_timeout_s,
            step_timeout_s=settings.step_timeout_s,
        )
        try:
            model = start_model(
                executor,
                self._model_path,
                settings,
                device=device,
                decodable_vocab_size=decodable_vocab_size,
            )
        except BaseException:
            executor.shutdown()
            raise
        depth = 2 if device == "cuda" else 1
        engine = Engine(
            executor, model, depth=depth, debug_poison=settings.debug_poison, events=events
        )
        return executor, engine

    async def _add(self, spec: RequestSpec) -> None:
        """Wait until the engine has taken the request in; raises why not if it refuses."""
        accepted: asyncio.Future[None] = self._loop.create_future()

        def answer(error: RequestError | None) -> None:
            self._call_soon(self._answer, spec, accepted, error)

        self._thread.add(spec, answer)
        await accepted

    def _answer(
        self, spec: RequestSpec, accepted: asyncio.Future[None], error: RequestError | None
    ) -> None:
        """Settle `accepted`, and tell the ingress before any token can: chunks are in order."""
        if accepted.done():
            return
        if error is None:
            self._sender.send([_accepted(spec)])
            accepted.set_result(None)
        else:
            accepted.set_exception(error)

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        """Send the tokens of a step, and end the calls of requests that are done."""
        self._sender.send(chunks)
        for chunk in chunks:
            finished = self._open.get(chunk.request_id)
            if finished is None or finished.done():
                continue
            self._num_tokens[chunk.request_id] += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                finished.set_result(
                    Finished(
                        finish_reason=chunk.finish_reason,
                        num_tokens=self._num_tokens[chunk.request_id],
                    )
                )

    def _abort_lost(self, request_id: str) -> None:
        finished = self._open.get(request_id)
        if finished is not None and not finished.done():
            finished.set_exception(ReplicaError("its ingress takes no tokens any more"))
            self._thread.abort(request_id)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise ReplicaError(f"this model copy has failed: {self._failure}")

    def _call_soon(self, function: Any, *arguments: Any) -> None:  # noqa: ANN401
        self._loop.call_soon_threadsafe(function, *arguments)

    def _fail(self, reason: str) -> None:
        """From any thread: end the ranks, fail every open call, then this process."""
        self._call_soon(self._fail_open, reason)

    def _fail_open(self, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = reason
        logger.error("replica %s fails: %s", self._name, reason)
        for finished in self._open.values():
            if not finished.done():
                finished.set_exception(ReplicaError(f"the model copy failed: {reason}"))
        # Off the loop, so that the errors of the open calls get out meanwhile.
        threading.Thread(target=self._end_process, daemon=True).start()

    def _end_process(self) -> None:
        self._executor.kill()
        threading.Event().wait(_LAST_WORDS_S)
        os.kill(os.getpid(), signal.SIGKILL)


_LAST_WORDS_S = 0.3  # for the errors of open calls to leave the process


def _accepted(spec: RequestSpec) -> TokenChunk:
    """An empty chunk: the ingress knows now that a replica has the request."""
    return TokenChunk(
        request_id=spec.request_id, attempt=spec.attempt, index=len(spec.output_token_ids)
    )
