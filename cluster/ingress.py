"""The HTTP front on Ray Serve: stateless, does all text work, outlives any model copy."""

import asyncio
import contextlib
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
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from starlette.types import ASGIApp

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
        message = GenerateCall(spec=spec, address=self._address)
        response = self._replicas.generate.remote(msgspec.msgpack.encode(message))
        ended = asyncio.ensure_future(_outcome(response))
        finished = False
        try:
            await self._accepted(queue, ended)
            while not finished:
                chunk = await self._next(queue, ended)
                finished = chunk.finish_reason is not None
                yield chunk
        except ReplicaError:
            self._metrics.replica_failures.inc()
            raise
        finally:
            self._receiver.close(spec.request_id)
            if not finished:
                response.cancel()
            self._keep(ended)

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
        except (TimeoutError, ReplicaError, OverloadedError):
            response.cancel()
            return None
        status = msgspec.msgpack.decode(reply, type=ReplicaStatus)
        return status if status.is_healthy else None

    async def _accepted(
        self, queue: asyncio.Queue[TokenChunk], ended: "asyncio.Future[bytes]"
    ) -> None:
        """Wait for the first, empty chunk: a replica has the request."""
        timeout_s = self._settings.queue_timeout_s
        try:
            await asyncio.wait_for(self._next(queue, ended), timeout_s)
        except TimeoutError as exc:
            self._metrics.overloads.inc()
            raise OverloadedError(f"no model copy took the request in {timeout_s:g} s") from exc
        except OverloadedError:
            self._metrics.overloads.inc()
            raise

    async def _next(
        self, queue: asyncio.Queue[TokenChunk], ended: "asyncio.Future[bytes]"
    ) -> TokenChunk:
        """The next chunk; raises how the call ended if it ended without one."""
        getter = asyncio.ensure_future(queue.get())
        try:
            waiting: set[asyncio.Future[Any]] = {getter, ended}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                return getter.result()
            ended.result()  # raises if the call failed
            try:
                return await asyncio.wait_for(asyncio.shield(getter), _LATE_TOKENS_S)
            except TimeoutError as exc:
                raise ReplicaError("the call ended, but its last tokens did not come") from exc
        finally:
            getter.cancel()

    def _keep(self, ended: "asyncio.Future[bytes]") -> None:
        """Let a call end on its own and take what it raises: nobody waits for it any more."""

        async def wait() -> None:
            with contextlib.suppress(ReplicaError, OverloadedError, RequestError):
                await ended

        task = asyncio.ensure_future(wait())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _outcome(response: "DeploymentResponse[bytes]") -> bytes:
    """What a call to a replica returned; foreign errors become ours here.

    Raises:
        RequestError: the replica refused the request.
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
    except (TaskCancelledError, asyncio.CancelledError):
        raise
    except ReplicaError as exc:
        raise ReplicaError(str(getattr(exc, "cause", exc))) from exc
    except RayError as exc:
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
        self._tokenizer = Tokenizer(model_path)
        self._first = await self._engine.first_status()
        self._watch = asyncio.ensure_future(self._engine.watch())
        serve_metrics(registry, self._settings, role="ingress", name=name, app_id=app_id)

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
        return MeasuredApp(app, self._metrics)


def served_name(settings: ServeSettings, model_path: str) -> str:
    """The model's name in the API: as set, else its folder's."""
    return settings.served_model_name or Path(model_path).resolve().name
