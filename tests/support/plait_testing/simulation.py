"""A scheduler and a `FakeRank` with steps between them, and every check of what passes there."""

from collections import deque
from dataclasses import dataclass, field

from plait.cluster.planner import Limits, max_tokens
from plait.cluster.request import RequestSpec
from plait.cluster.scheduler import ScheduledStep, Scheduler
from plait.worker.protocol import StepOutput
from plait_testing.fake_rank import FakeRank, continuation, fake_plan

BLOCK, CHUNK = 4, 8
LAYOUTS = {
    "hybrid": {"kv": 3, "state": 2},
    "two kv groups": {"kv": 4, "kv_other": 2, "state": 1},
    "attention only": {"kv": 4},
    "recurrent only": {"state": 2},
}


@dataclass
class Client:
    """A request as its client sees it."""

    spec: RequestSpec
    expected: list[int]
    reason: str
    received: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    last_row: int = 0  # the step in which it last had a row
    oldest_since: int | None = None  # since which step nobody older is here
    num_seated: int = 0


class Simulation:
    """A scheduler and a fake rank with up to `depth` steps between them; checks every move."""

    def __init__(
        self,
        layout="hybrid",
        *,
        num_pages=40,
        num_seats=4,
        budget=32,
        depth=1,
        debug_poison=True,
        events=None,
    ):
        plan = fake_plan(LAYOUTS[layout], num_pages=num_pages, block_size=BLOCK)
        fitting = max_tokens(plan.layout, num_pages)
        self.max_len = min(60, 60 if fitting is None else fitting)
        self.budget, self.depth, self.now_s = budget, depth, 0.0
        self.scheduler = Scheduler(
            plan,
            Limits(num_pages=num_pages, max_model_len=self.max_len, max_num_seqs=num_seats),
            max_num_batched_tokens=budget,
            chunk_size=CHUNK,
            debug_poison=debug_poison,
            clock=lambda: self.now_s,
            events=events,
        )
        self.free_pages = self.scheduler.allocator.free_pages
        self.rank = FakeRank(plan, num_seats=num_seats)
        self.in_flight: deque[tuple[ScheduledStep, StepOutput, set]] = deque()
        self.clients: dict[str, Client] = {}
        self.live: dict[str, Client] = {}  # in order of arrival
        self.steps: list[ScheduledStep] = []

    def add(self, prompt, *, max_tokens=5, stop=(), min_tokens=0, sent=0):
        """A request, `sent` of whose tokens an earlier attempt has delivered already."""
        seed = len(self.clients) + 1
        drawn = continuation(prompt, seed=seed, count=max_tokens, stop=stop, min_tokens=min_tokens)
        sent = min(sent, max(0, len(drawn) - 1))
        spec = RequestSpec(
            request_id=f"r{seed}",
            prompt_token_ids=tuple(prompt),
            output_token_ids=tuple(drawn[:sent]),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=tuple(stop),
            seed=seed,
        )
        self.scheduler.add(spec)
        reason = "length" if len(drawn) == max_tokens else "stop"
        client = Client(spec, drawn, reason, received=drawn[:sent])
        self.clients[spec.request_id] = self.live[spec.request_id] = client
        self._note_oldest()
        return spec.request_id

    def abort(self, request_id):
        assert self.scheduler.abort(request_id)
        self.live.pop(request_id).finish_reason = "abort"
        assert not self.scheduler.abort(request_id)
        self._note_oldest()

    def submit(self):
        """Schedule a step and run it; False if there was nothing to run."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        self.steps.append(step)
        self._check_units(step)
        output = self.rank.step(step.input)
        self._check_budget(step)
        self._check_oldest(step)
        seats = self.rank.row_seats(step.input)
        self.in_flight.append((step, output, self.rank.units_of(seats)))
        return True

    def collect(self):
        step, output, _ = self.in_flight.popleft()
        for chunk in self.scheduler.complete(step, output):
            client = self.live[chunk.request_id]
            assert chunk.index == len(client.received)
            client.received += chunk.token_ids
            if chunk.finish_reason is not None:
                client.finish_reason = chunk.finish_reason
                del self.live[chunk.request_id]
                self._note_oldest()

    def step(self):
        """What the engine does."""
        while len(self.in_flight) < self.depth and self.submit():
            pass
        if self.in_flight:
            self.collect()

    def drain(self):
        """Run until nothing is left, in a bounded number of steps, and check what remains."""
        most = 8 + sum(
            2 * (len(client.spec.prompt_token_ids) + client.spec.max_tokens) + 4
            for client in self.live.values()
        )
        for _ in range(most):
            if not (self.scheduler.has_work or self.in_flight):
                break
            self.step()
            self.scheduler.allocator.check_invariants()
        assert not self.live, f"{list(self.live)} did not end within {most} steps"
        assert self.scheduler.is_idle
        assert self.scheduler.allocator.free_pages == self.free_pages
        counts: dict[str, int] = {}
        for client in self.clients.values():
            counts[client.finish_reason] = counts.get(client.finish_reason, 0) + 1
            if client.finish_reason in ("stop", "length"):
                assert client.finish_reason == client.reason
                assert client.received == client.expected
            else:
                assert client.received == client.expected[: len(client.received)]
        assert self.scheduler.counters.finished == counts

    def _note_oldest(self):
        for client in list(self.live.values())[:1]:
            if client.oldest_since is None:
                client.oldest_since = len(self.steps)

    def _check_units(self, step):
        """Nothing is handed out or poisoned that a step in flight still works on."""
        busy = set().union(*(units for _, _, units in self.in_flight))
        freed = {(kind, unit) for kind, units in step.input.poison.items() for unit in units}
        assert not busy & self.rank.granted(step.input)
        assert not busy & freed

    def _check_budget(self, step):
        """Rows keep to the budget, and chunks end at round positions where it allows."""
        rows = step.input
        left = self.budget - len(rows.decode)
        assert left >= 0
        for row in rows.prefill:
            end, furthest = row.start + len(row.token_ids), row.start + left
            left -= len(row.token_ids)
            assert left >= 0
            if row.sample:
                continue
            grains = [g for g in (CHUNK, BLOCK, 1) if furthest // g * g > row.start]
            assert end == furthest // grains[0] * grains[0]

    def _check_oldest(self, step):
        """No sequence is preempted while it is the oldest."""
        number = len(self.steps)
        by_seed = {client.spec.seed: client for client in self.clients.values()}
        for new in step.input.new:
            client = by_seed[new.sampling.seed]
            client.num_seated += 1
            if client.num_seated > 1 and client.oldest_since is not None:
                assert client.oldest_since >= client.last_row, f"{client} was preempted"
        for sequence in step.touched:
            self.clients[sequence.request_id].last_row = number
