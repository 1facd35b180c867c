"""Which rows the next step has: continuous batching under one token budget.

Decode rows first, then prefill chunks of running sequences, then new sequences in order of
arrival. A sequence is let in when its slot and the blocks of all its known tokens are free; when a
decode row finds no block, the youngest running sequence is preempted and starts over later, so the
oldest always progresses. All ways out of running go through one release function.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from plait.cluster.errors import ContextLengthError
from plait.cluster.pages import PageAllocator
from plait.cluster.planner import Limits
from plait.cluster.request import FinishReason, RequestSpec, TokenChunk, TokenLogprob
from plait.cluster.sequence import Phase, Sequence
from plait.worker.plan import NULL_UNIT, STATE, CachePlan
from plait.worker.protocol import (
    Growth,
    NewSequence,
    PrefillRow,
    SamplingSpec,
    StepInput,
    StepOutput,
    TokenLogprobs,
)


@dataclass(slots=True)
class SchedulerCounters:
    """What happened since the start; exported as metrics."""

    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    non_finite_rows: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class SchedulerEvents:
    """What a scheduler tells about time; a subclass records it. Durations are in seconds."""

    def admitted(self, wait_s: float) -> None:
        """A request runs for the first time, `wait_s` after it came."""

    def drew_token(self, latency_s: float, *, is_first: bool) -> None:
        """A token came, so long after the request's arrival (the first) or its last token."""

    def ended(self, elapsed_s: float) -> None:
        """A request ended, so long after it came."""

    def stepped(self, seconds: float, *, phase: str) -> None:
        """A step came back so long after it was sent; phase is prefill, decode or mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """A step on its way to the ranks, and the sequence behind each of its sampled rows."""

    input: StepInput
    sampled: tuple[Sequence, ...]
    touched: tuple[Sequence, ...]


class Scheduler:
    """Owns the cache units and the order of work. Pure Python; knows no sockets and no tensors."""

    def __init__(
        self,
        plan: CachePlan,
        limits: Limits,
        *,
        max_num_batched_tokens: int,
        chunk_size: int,
        debug_poison: bool = False,
        clock: Callable[[], float] = time.monotonic,
        events: SchedulerEvents | None = None,
    ) -> None:
        self._events = events or SchedulerEvents()
        self.counters = SchedulerCounters()
        self.allocator = PageAllocator(plan)
        self._layout = plan.layout
        self._block_size = plan.layout.block_size
        self._num_kinds = len(plan.layout.kv_kinds)
        self._has_state = plan.layout.state_kind is not None
        self.max_request_tokens = limits.max_model_len
        self._budget = max_num_batched_tokens
        self._chunk_size = chunk_size
        self._debug_poison = debug_poison
        self._clock = clock
        self._free_seats = list(range(limits.max_num_seqs - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._releasing: list[Sequence] = []
        self._poison: dict[str, list[int]] = {}
        self._num_steps = 0
        self._num_added = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or still holds units."""
        return not (self.has_work or self._releasing)

    def oldest_wait_s(self) -> float:
        """How long the sequence at the head of the queue has waited, 0 if none does."""
        return self._clock() - self._waiting[0].arrival_s if self._waiting else 0.0

    def add(self, spec: RequestSpec) -> None:
        """Queue a request.

        Raises:
            ContextLengthError: it could not finish even alone; says what fits.
        """
        if spec.request_id in self._by_id:
            raise ValueError(f"request {spec.request_id} is already here")
        needed = len(spec.prompt_token_ids) + spec.max_tokens
        if needed > self.max_request_tokens:
            raise ContextLengthError(
                f"prompt of {len(spec.prompt_token_ids)} tokens and up to {spec.max_tokens} "
                f"output tokens make {needed}; at most {self.max_request_tokens} fit"
            )
        self._num_added += 1
        sequence = Sequence(spec, order=self._num_added, arrival_s=self._clock())
        self._by_id[spec.request_id] = sequence
        self._waiting.append(sequence)
        self.counters.prompt_tokens += len(spec.prompt_token_ids)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if it is not here (any more)."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence, "abort")
        return True

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when no row can run now."""
        builder = _StepBuilder(self._budget)
        self._schedule_decode(builder)
        self._schedule_prefill(builder)
        self._admit(builder)
        if builder.is_empty:
            return None
        for sequence in builder.touched:
            sequence.num_in_flight += 1
        self._num_steps += 1
        poison = {kind: tuple(units) for kind, units in self._poison.items()}
        self._poison = {}
        return builder.build(self._num_steps, poison)

    def complete(self, step: ScheduledStep, output: StepOutput) -> list[TokenChunk]:
        """Take in what a step drew; chunks of tokens for the requests that got some."""
        now = self._clock()
        for sequence in step.touched:
            sequence.num_in_flight -= 1
        chunks = []
        logprobs: Iterable[TokenLogprobs | None] = output.logprobs or (None,) * len(step.sampled)
        for sequence, token, finite, logprob in zip(
            step.sampled, output.token_ids, output.finite, logprobs, strict=True
        ):
            sequence.num_pending -= 1
            if sequence.phase is not Phase.DONE:
                chunks.append(self._take(sequence, token, finite, logprob, now))
        self._release_done()
        return chunks

    def _take(
        self,
        sequence: Sequence,
        token: int,
        finite: bool,
        logprob: TokenLogprobs | None,
        now: float,
    ) -> TokenChunk:
        """Append a drawn token, or end the sequence at it."""
        spec, index = sequence.spec, sequence.num_output
        reason: FinishReason | None = None
        error: str | None = None
        tokens: tuple[int, ...] = (token,)
        logprobs: tuple[TokenLogprob, ...] = ()
        if not finite:
            self.counters.non_finite_rows += 1
            reason, tokens = "error", ()
            error = "the model gave logits that are not finite for this request"
        elif token in spec.stop_token_ids:
            reason, tokens = "stop", ()
        else:
            sequence.tokens.append(token)
            self.counters.generation_tokens += 1
            if logprob is not None:
                top = tuple(zip(logprob.top_ids, logprob.top_logprobs, strict=True))
                logprobs = (TokenLogprob(logprob=logprob.logprob, top=top),)
            if sequence.num_output >= spec.max_tokens:
                reason = "length"
        since = sequence.arrival_s if sequence.last_token_s is None else sequence.last_token_s
        self._events.drew_token(now - since, is_first=sequence.last_token_s is None)
        sequence.last_token_s = now
        if reason is not None:
            self._finish(sequence, reason)
        return TokenChunk(
            request_id=spec.request_id,
            attempt=spec.attempt,
            index=index,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            error=error,
        )

    def _schedule_decode(self, builder: "_StepBuilder") -> None:
        for sequence in list(self._running):
            if sequence.phase is not Phase.DECODE or not sequence.wants_token:
                continue
            if builder.budget == 0:
                return
            if not self._grow(sequence, builder):
                continue
            builder.decode(sequence)

    def _schedule_prefill(self, builder: "_StepBuilder") -> None:
        for sequence in self._running:
            if sequence.phase is Phase.PREFILL and builder.budget:
                self._prefill(sequence, builder)

    def _admit(self, builder: "_StepBuilder") -> None:
        while self._waiting and self._free_seats and builder.budget:
            sequence = self._waiting[0]
            count = self._blocks_for(len(sequence.tokens))
            # One block more for each running sequence, lest letting this one in preempts it again.
            spare = [count + len(self._running)] * self._num_kinds
            if sequence.is_releasing or not self.allocator.can_allocate(
                spare, int(self._has_state)
            ):
                return
            self._waiting.popleft()
            sequence.seat = self._free_seats.pop()
            sequence.slot = self.allocator.allocate_slot() if self._has_state else None
            sequence.blocks = [[] for _ in range(self._num_kinds)]
            sequence.phase = Phase.PREFILL
            if not sequence.was_admitted:
                sequence.was_admitted = True
                self._events.admitted(self._clock() - sequence.arrival_s)
            insort(self._running, sequence, key=lambda running: running.order)
            builder.admit(sequence)
            for kind in range(self._num_kinds):
                self._append_blocks(sequence, kind, count, builder)
            self._prefill(sequence, builder)

    def _prefill(self, sequence: Sequence, builder: "_StepBuilder") -> None:
        """The next chunk of a prompt; its end falls on a round position where the budget allows."""
        start, total = sequence.num_computed, len(sequence.tokens)
        end = min(total, start + builder.budget)
        if end < total:
            for grain in (self._chunk_size, self._block_size):
                if end // grain * grain > start:
                    end = end // grain * grain
                    break
        builder.prefill(sequence, start, end, is_last=end == total)
        if end == total:
            sequence.phase = Phase.DECODE

    def _grow(self, sequence: Sequence, builder: "_StepBuilder") -> bool:
        """Make room for one more position in every kv kind, all or nothing.

        Preempts the youngest sequences while there is none. False if `sequence` was the youngest
        itself, or if units that steps in flight still hold have to come back first.
        """
        needed = [self._blocks_for(sequence.length) - len(held) for held in sequence.blocks]
        while not self.allocator.can_allocate(needed, 0):
            if self._releasing:
                return False
            victim = self._youngest(builder)
            self._preempt(victim)
            if victim is sequence:
                return False
        for kind, count in enumerate(needed):
            self._append_blocks(sequence, kind, count, builder)
        return True

    def _youngest(self, builder: "_StepBuilder") -> Sequence:
        """The running sequence that came last and has no row in the step being built."""
        return next(seq for seq in reversed(self._running) if seq not in builder.touched)

    def _append_blocks(
        self, sequence: Sequence, kind: int, count: int, builder: "_StepBuilder"
    ) -> None:
        ids = self.allocator.allocate_blocks(kind, count)
        assert ids is not None, "blocks were taken without a check"
        sequence.blocks[kind] += ids
        builder.grow(sequence, kind, ids)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence; it starts over at the head of the queue."""
        self.counters.preemptions += 1
        self._running.remove(sequence)
        sequence.phase = Phase.WAITING
        self._waiting.appendleft(sequence)
        self._release(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        sequence.phase = Phase.DONE
        del self._by_id[sequence.request_id]
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self._events.ended(self._clock() - sequence.arrival_s)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back seat, slot and blocks, once no step in flight touches them."""
        if sequence.is_releasing or sequence.seat is None:
            return
        if sequence.num_in_flight:
            sequence.is_releasing = True
            self._releasing.append(sequence)
            return
        self._free_seats.append(sequence.seat)
        for kind, ids in enumerate(sequence.blocks):
            self.allocator.free_blocks(kind, ids)
            self._note_freed(self._layout.kv_kinds[kind].name, ids)
        if sequence.slot is not None:
            self.allocator.free_slot(sequence.slot)
            self._note_freed(STATE, [sequence.slot.id])
        sequence.seat = sequence.slot = None
        sequence.blocks = []
        sequence.num_computed = 0

    def _note_freed(self, kind: str, units: list[int]) -> None:
        if self._debug_poison:
            self._poison.setdefault(kind, []).extend(units)

    def _release_done(self) -> None:
        done = [sequence for sequence in self._releasing if not sequence.num_in_flight]
        for sequence in done:
            self._releasing.remove(sequence)
            sequence.is_releasing = False
            self._release(sequence)


class _StepBuilder:
    """Collects the rows of one step while the budget lasts."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.touched: dict[Sequence, None] = {}
        self._new: list[NewSequence] = []
        self._growth: list[Growth] = []
        self._prefill: list[PrefillRow] = []
        self._decode: list[int] = []
        self._sampled_prefill: list[Sequence] = []
        self._sampled_decode: list[Sequence] = []

    @property
    def is_empty(self) -> bool:
        return not self.touched

    def admit(self, sequence: Sequence) -> None:
        spec, slot = sequence.spec, sequence.slot
        self._new.append(
            NewSequence(
                seat=_seat(sequence),
                slot=NULL_UNIT if slot is None else slot.id,
                generation=0 if slot is None else slot.generation,
                sampling=SamplingSpec(
                    temperature=spec.temperature,
                    top_k=spec.top_k,
                    top_p=spec.top_p,
                    min_p=spec.min_p,
                    seed=spec.seed,
                    num_logprobs=spec.num_logprobs,
                    banned_token_ids=spec.stop_token_ids,
                    banned_until=len(spec.prompt_token_ids) + spec.min_tokens,
                ),
            )
        )

    def grow(self, sequence: Sequence, kind: int, ids: list[int]) -> None:
        if ids:
            self._growth.append(Growth(seat=_seat(sequence), kind=kind, block_ids=tuple(ids)))

    def prefill(self, sequence: Sequence, start: int, end: int, *, is_last: bool) -> None:
        self._prefill.append(
            PrefillRow(
                seat=_seat(sequence),
                start=start,
                token_ids=tuple(sequence.tokens[start:end]),
                sample=is_last,
            )
        )
        if is_last:
            self._sampled_prefill.append(sequence)
        self._count(sequence, end - start, samples=is_last)

    def decode(self, sequence: Sequence) -> None:
        self._decode.append(_seat(sequence))
        self._sampled_decode.append(sequence)
        self._count(sequence, 1, samples=True)

    def build(self, step: int, poison: dict[str, tuple[int, ...]]) -> ScheduledStep:
        return ScheduledStep(
            input=StepInput(
                step=step,
                new=tuple(self._new),
                growth=tuple(self._growth),
                prefill=tuple(self._prefill),
                decode=tuple(self._decode),
                poison=poison,
            ),
            sampled=(*self._sampled_prefill, *self._sampled_decode),
            touched=tuple(self.touched),
        )

    def _count(self, sequence: Sequence, num_tokens: int, *, samples: bool) -> None:
        self.budget -= num_tokens
        sequence.num_computed += num_tokens
        sequence.num_pending += samples
        self.touched[sequence] = None


def _seat(sequence: Sequence) -> int:
    assert sequence.seat is not None, f"{sequence.request_id} has no seat"
    return sequence.seat
