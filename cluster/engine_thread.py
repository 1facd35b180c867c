"""Runs an engine in a thread of its own, beside the event loop that talks to the world."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from plait.cluster.engine import Engine
from plait.cluster.errors import RequestError
from plait.cluster.request import RequestSpec, TokenChunk
from plait.worker.errors import PlaitError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Add:
    spec: RequestSpec
    accepted: Callable[[RequestError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abort:
    request_id: str


class EngineThread:
    """Adds, aborts and steps in one thread; what comes out is handed to callbacks there.

    Args:
        deliver: called with the chunks of every step.
        fail: called once when the engine cannot go on, with why; the thread has ended then.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        deliver: Callable[[list[TokenChunk]], None],
        fail: Callable[[str], None],
        stall_limit_s: float,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._fail = fail
        self._stall_limit_s = stall_limit_s
        self._inbox: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()
        self._working_since_s: float | None = None
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that runs now."""
        self._inbox.put(None)
        self._thread.join()

    def add(self, spec: RequestSpec, accepted: Callable[[RequestError | None], None]) -> None:
        """Queue a request; `accepted` is called in the engine's thread, with why not if refused."""
        self._inbox.put(_Add(spec=spec, accepted=accepted))

    def abort(self, request_id: str) -> None:
        self._inbox.put(_Abort(request_id=request_id))

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the last step ended while there is work, else 0."""
        since = self._working_since_s
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_healthy(self) -> bool:
        """Whether the engine runs and makes progress."""
        return self._failure is None and self.last_step_age_s < self._stall_limit_s

    def _run(self) -> None:
        try:
            while self._take_messages(wait=not self._engine.has_work):
                if not self._engine.has_work:
                    self._working_since_s = None
                    continue
                self._working_since_s = self._working_since_s or time.monotonic()
                self._deliver(self._engine.step())
                self._working_since_s = time.monotonic() if self._engine.has_work else None
        except PlaitError as exc:
            logger.error("the engine stopped: %s", exc)
            self._failure = str(exc)
        except Exception as exc:
            logger.exception("the engine stopped")
            self._failure = f"{type(exc).__name__}: {exc}"
        if self._failure is not None:
            self._fail(self._failure)

    def _take_messages(self, *, wait: bool) -> bool:
        """Handle what has come in, waiting for the first message if asked; False to end."""
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            match message:
                case None:
                    return False
                case _Add():
                    self._add(message)
                case _Abort():
                    self._engine.abort(message.request_id)

    def _add(self, message: _Add) -> None:
        try:
            self._engine.add(message.spec)
        except RequestError as exc:
            message.accepted(exc)
        else:
            message.accepted(None)
