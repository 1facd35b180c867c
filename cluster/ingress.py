"""The HTTP front on Ray Serve: stateless, does all text work, outlives any model copy."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import ray
from prometheus_client import CollectorRegistry
from ray import serve
from ray.exceptions import RayError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.cluster.api.app import build_app
from plait.cluster.api.engine import ModelInfo
from plait.cluster.errors import OverloadedError, ReplicaError, RequestError
from plait.cluster.http_metrics import MeasuredApp
from plait.cluster.metrics import IngressMetrics
from plait.cluster.metrics_server import merged_metrics, serve_metrics
from plait.cluster.replica import GenerateCall, ReplicaStatus
from plait.cluster.request import RequestSpec, TokenChunk
from plait.cluster.settings import ServeSettings
from plait.cluster.token_stream import Address, TokenReceiver
from plait.cluster.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_STATUS_PERIOD_S = 0.5
_STATUS_TIMEOUT_S = 2.0
_SILENCE_LIMIT_S = 5.0  # without a token, while the replicas cannot be asked
_RETRY_PAUSE_S = 0.2
_LATE_TOKENS_S = 5.0  # how long tokens may lag behind the end of their call


class ReplicaEngine:
    """The model as an ingress sees it: calls to replicas, tokens back over the socket."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        settings: ServeSettings,
        *,
        receiver: TokenReceiver,
        address: Address,
        metrics: IngressMetrics,
        app_id: str,
    ) -> None:
        self._replicas = replicas
        self._settings = settings
        self._receiver = receiver
        self._address = address
        self._metrics = metrics
        self._app_id = app_id
        self._status: ReplicaStatus | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def generate(self, spec: RequestSpec) -> AsyncIterator[TokenChunk]:
        """The tokens of a request; see `plait.cluster.api.engine.Engine`."""
        queue = self._receiver.open(spec.request_id)
        call: _Call | None = None
        finished = False
        try:
            call = await self._place(spec, queue)
            while not finished:
                chunk = await call.next(queue)
                finished = chunk.finish_reason is not None
                yield chunk
        except OverloadedError:
            self._metrics.overloads.inc()
            raise
        except ReplicaError:
            self._metrics.replica_failures.inc()
            raise
        finally:
            self._receiver.close(spec.request_id)
            if call is not None:
                self._leave(call, has_ended=finished)

    async def is_ready(self) -> bool:
        return self._status is not None

    async def is_healthy(self) -> bool:
        return self._status is not None

    async def plan(self) -> dict[str, Any]:
        if self._status is None:
            raise OverloadedError("no model copy is ready")
        return self._status.plan

    async def metrics(self) -> bytes:
        return await asyncio.to_thread(merged_metrics, self._settings, app_id=self._app_id)

    async def first_status(self) -> ReplicaStatus:
        """Wait until a replica is up."""
        return msgspec.msgpack.decode(await self._replicas.status.remote(), type=ReplicaStatus)

    async def watch(self) -> None:
        """Keep the status of some healthy replica fresh; None while there is none."""
        while True:
            self._status = await self._ask_status()
            await asyncio.sleep(_STATUS_PERIOD_S)

    async def _ask_status(self) -> ReplicaStatus | None:
        response = self._replicas.status.remote()
        try:
            reply = await asyncio.wait_for(_outcome(response), _STATUS_TIMEOUT_S)
        except ReplicaError:
            return None
        except (TimeoutError, OverloadedError):
            _cancel(response)
            # Full queues hold this question up too; while tokens come, all is well.
            return self._status if self._receiver.silence_s < _SILENCE_LIMIT_S else None
        status = msgspec.msgpack.decode(reply, type=ReplicaStatus)
        return status if status.is_healthy else None

    async def _place(self, spec: RequestSpec, queue: "asyncio.Queue[TokenChunk]") -> "_Call":
        """A call that a replica has taken: its first, empty chunk is here.

        A replica that dies before it takes the request has drawn nothing, so the next one is asked.

        Raises:
            OverloadedError: none took it in time, or the queue is full.
            RequestError: a replica refused it.
        """
        timeout_s = self._settings.queue_timeout_s
        deadline = time.monotonic() + timeout_s
        for attempt in itertools.count(spec.attempt):
            call = _Call(
                self._replicas, msgspec.structs.replace(spec, attempt=attempt), self._address
            )
            try:
                await asyncio.wait_for(call.next(queue), deadline - time.monotonic())
                return call
            except TimeoutError:
                self._leave(call, has_ended=False)
            except ReplicaError as exc:
                logger.info("request %s is sent again: %s", spec.request_id, exc)
            except BaseException:
                self._leave(call, has_ended=False)
                raise
            if time.monotonic() + _RETRY_PAUSE_S >= deadline:
                break
            await asyncio.sleep(_RETRY_PAUSE_S)
        raise OverloadedError(f"no model copy took the request in {timeout_s:g} s")

    def _leave(self, call: "_Call", *, has_ended: bool) -> None:
        """Let a call end on its own, or cancel it; nobody waits for it any more."""
        if not has_ended:
            call.cancel()
        task = asyncio.ensure_future(call.wait())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _Call:
    """A request that was sent to some replica."""

    def __init__(self, replicas: DeploymentHandle, spec: RequestSpec, address: Address) -> None:
        message = GenerateCall(spec=spec, address=address)
        self._attempt = spec.attempt
        self._response = replicas.generate.remote(msgspec.msgpack.encode(message))
        self._ended = asyncio.ensure_future(_outcome(self._response))

    async def next(self, queue: "asyncio.Queue[TokenChunk]") -> TokenChunk:
        """The next chunk of this attempt; raises how the call ended if it ended without one."""
        while True:
            chunk = await self._next(queue)
            if chunk.attempt == self._attempt:
                return chunk

    def cancel(self) -> None:
        _cancel(self._response)

    async def wait(self) -> None:
        """Until the call has ended, however it does."""
        with contextlib.suppress(ReplicaError, OverloadedError, RequestError, ClientDisconnect):
            await self._ended

    async def _next(self, queue: "asyncio.Queue[TokenChunk]") -> TokenChunk:
        getter = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait({getter, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                return getter.result()
            self._ended.result()  # raises if the call failed
            try:
                return await asyncio.wait_for(asyncio.shield(getter), _LATE_TOKENS_S)
            except TimeoutError as exc:
                raise ReplicaError("the call ended, but its last tokens did not come") from exc
        finally:
            getter.cancel()


def _cancel(response: "DeploymentResponse[bytes]") -> None:
    """Cancel a call; one that never reached a replica raises here why, which is known already."""
    with contextlib.suppress(RayError, RayServeException):
        response.cancel()


async def _outcome(response: "DeploymentResponse[bytes]") -> bytes:
    """What a call to a replica returned; foreign errors become ours here.

    Raises:
        RequestError: the replica refused the request.
        ClientDisconnect: nobody waits for the answer any more.
        OverloadedError: Serve's queue is full.
        ReplicaError: the replica failed or is gone.
    """
    try:
        result: bytes = await response
        return result
    except RequestError as exc:
        raise _plain(exc) from exc
    except BackPressureError as exc:
        raise OverloadedError("the queue is full") from exc
    except DeploymentUnavailableError as exc:
        raise OverloadedError("no model copy is ready") from exc
    except (TaskCancelledError, asyncio.CancelledError) as exc:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise ClientDisconnect from exc  # Serve cancels the calls of a request that is given up
    except ReplicaError as exc:
        raise ReplicaError(str(getattr(exc, "cause", exc))) from exc
    except (RayError, RayServeException) as exc:
        raise ReplicaError(f"the model copy is gone ({type(exc).__name__})") from exc


def _plain(error: RequestError) -> RequestError:
    """A request error without what Ray wraps around it."""
    cause = getattr(error, "cause", error)
    return cause if isinstance(cause, RequestError) else error


@serve.ingress()
class Ingress:
    """Validates, tokenizes, calls a replica, detokenizes and streams."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, replicas: DeploymentHandle, settings: dict[str, Any], model_path: str, app_id: str
    ) -> None:
        self._settings = ServeSettings.model_validate(settings)
        self._model_path = model_path
        name = serve.get_replica_context().replica_id.unique_id
        registry = CollectorRegistry()
        self._metrics = IngressMetrics(registry, name)
        receiver = TokenReceiver()
        address = await receiver.start(ray.util.get_node_ip_address())
        self._engine = ReplicaEngine(
            replicas,
            self._settings,
            receiver=receiver,
            address=address,
            metrics=self._metrics,
            app_id=app_id,
        )
        serve_metrics(registry, self._settings, role="ingress", name=name, app_id=app_id)
        self._tokenizer = Tokenizer(model_path)
        self._first = await self._engine.first_status()
        self._watch = asyncio.ensure_future(self._engine.watch())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve calls this once the constructor is done."""
        settings, status = self._settings, self._first
        info = ModelInfo(
            name=served_name(settings, self._model_path),
            max_model_len=status.max_model_len,
            max_request_tokens=status.max_request_tokens,
            vocab_size=status.vocab_size,
            created=int(time.time()),
        )
        app = build_app(
            self._engine,
            self._tokenizer,
            info,
            api_key=settings.api_key,
            default_seed=settings.seed,
        )
        return MeasuredApp(_HangUps(app), self._metrics)


class _HangUps:
    """An ASGI application that hears of a client's end by a message, where Serve raises."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def heard() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await self._app(scope, heard, send)


def served_name(settings: ServeSettings, model_path: str) -> str:
    """The model's name in the API: as set, else its folder's."""
    return settings.served_model_name or Path(model_path).resolve().name
