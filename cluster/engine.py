"""The engine: scheduler and ranks, advanced one step at a time."""

import time
from collections import deque

from plait.cluster.controller import StartedModel
from plait.cluster.executors.base import Executor
from plait.cluster.request import RequestSpec, TokenChunk
from plait.cluster.scheduler import ScheduledStep, Scheduler, SchedulerEvents


class Engine:
    """Runs requests on a started model. Not thread-safe: one thread adds, aborts and steps.

    Up to `depth` steps are with the ranks at once: the next one is sent before the last one's
    tokens are back, so that a device never waits for the host.
    """

    def __init__(
        self,
        executor: Executor,
        model: StartedModel,
        *,
        depth: int = 1,
        debug_poison: bool = False,
        events: SchedulerEvents | None = None,
    ) -> None:
        self.model = model
        self.scheduler = Scheduler(
            model.plan,
            model.limits,
            max_num_batched_tokens=model.max_num_batched_tokens,
            chunk_size=model.spec.chunk_size,
            debug_poison=debug_poison,
            events=events,
        )
        self._executor = executor
        self._depth = depth
        self._in_flight: deque[tuple[ScheduledStep, float]] = deque()
        self._events = events or SchedulerEvents()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def add(self, spec: RequestSpec) -> None:
        """Queue a request; raises `ContextLengthError` if it could never finish."""
        self.scheduler.add(spec)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if it is not here (any more)."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[TokenChunk]:
        """Send what can be sent, then wait for the oldest step; new tokens by request.

        Raises:
            RankError: a rank failed; nothing can run here any more.
        """
        while len(self._in_flight) < self._depth:
            step = self.scheduler.schedule()
            if step is None:
                break
            self._executor.submit(step.input)
            self._in_flight.append((step, time.monotonic()))
        if not self._in_flight:
            return []
        step, sent_s = self._in_flight.popleft()
        output = self._executor.collect()
        self._events.stepped(time.monotonic() - sent_s, phase=_phase(step))
        return self.scheduler.complete(step, output)


def _phase(step: ScheduledStep) -> str:
    """What a step held: "prefill", "decode" or "mixed"."""
    if step.input.prefill and step.input.decode:
        return "mixed"
    return "prefill" if step.input.prefill else "decode"
