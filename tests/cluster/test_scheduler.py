"""The scheduler against a rank that computes from its simulated cache: see `FakeRank`."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plait_testing.fake_rank import VOCAB_SIZE, continuation
from plait_testing.simulation import LAYOUTS, Simulation

from plait.cluster.errors import ContextLengthError
from plait.cluster.scheduler import SchedulerEvents
from plait.worker.protocol import StepOutput, TokenLogprobs

# Any schedule


class AnySchedule(RuleBasedStateMachine):
    """Requests, aborts, submits and collects in any order, on pools that are too small."""

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        num_pages=st.integers(4, 14),
        num_seats=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 7, 8, 13, 32]),
        depth=st.sampled_from([1, 2, 3]),
        debug_poison=st.booleans(),
    )
    def start(self, **options):
        self.sim = Simulation(**options)

    @rule(data=st.data())
    def add(self, data):
        sim = self.sim
        prompt = data.draw(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=sim.max_len - 1)
        )
        count = data.draw(st.integers(1, sim.max_len - len(prompt)))
        sim.add(
            prompt,
            max_tokens=count,
            stop=data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2, unique=True)),
            min_tokens=data.draw(st.integers(0, count)),
            sent=data.draw(st.sampled_from([0, 0, 1, 3])),
        )

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data())
    def abort(self, data):
        self.sim.abort(data.draw(st.sampled_from(sorted(self.sim.live))))

    @precondition(lambda self: len(self.sim.in_flight) < self.sim.depth)
    @rule()
    def submit(self):
        self.sim.submit()

    @precondition(lambda self: self.sim.in_flight)
    @rule()
    def collect(self):
        self.sim.collect()

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.sim.step()

    @invariant()
    def accounts_are_right(self):
        if hasattr(self, "sim"):
            self.sim.scheduler.allocator.check_invariants()

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.drain()


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def load(sim, count=12):
    """Requests of all sizes; together they need far more than a small pool has."""
    for i in range(count):
        length = 1 + i * 7 % (sim.max_len - 9)
        sim.add([(i * 5 + j) % VOCAB_SIZE for j in range(length)], max_tokens=1 + i % 9)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_pool_too_small_for_all_gives_the_same_tokens(layout, depth):
    sim = Simulation(layout, num_pages=8, depth=depth)
    load(sim)
    sim.drain()


def test_a_preempted_request_is_let_in_only_when_its_last_step_is_back():
    """A counter-example once found: what another request frees meanwhile is room for it."""
    sim = Simulation("two kv groups", num_pages=9, num_seats=2, budget=3, depth=3)
    sim.add([0], max_tokens=21)
    for _ in range(12):
        sim.step()
    second = sim.add([0], max_tokens=9)
    sim.drain()
    assert sim.clients[second].num_seated == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_happens_and_is_counted(depth):
    sim = Simulation(num_pages=8, depth=depth, num_seats=4)
    for i in range(4):
        sim.add([i] * 4, max_tokens=28)
    sim.drain()
    assert sim.scheduler.counters.preemptions > 0
    assert sum(client.num_seated for client in sim.clients.values()) == (
        4 + sim.scheduler.counters.preemptions
    )


# Which rows a step has


def rows_of(sim):
    """(request, start, tokens, sample) of the prefill rows of the next step; it is collected."""
    sim.step()
    step = sim.steps[-1]
    by_seat = {sequence.seat: sequence.request_id for sequence in step.touched}
    return [
        (by_seat.get(row.seat), row.start, len(row.token_ids), row.sample)
        for row in step.input.prefill
    ], len(step.input.decode)


def test_a_prompt_is_cut_at_multiples_of_the_scan_chunk():
    sim = Simulation(budget=19)
    first = sim.add([1] * 40, max_tokens=2)
    assert rows_of(sim) == ([(first, 0, 16, False)], 0)
    assert rows_of(sim) == ([(first, 16, 16, False)], 0)
    assert rows_of(sim) == ([(first, 32, 8, True)], 0)
    assert rows_of(sim) == ([], 1)


def test_a_budget_below_the_scan_chunk_cuts_at_blocks_and_below_a_block_anywhere():
    sim = Simulation(budget=7)
    first = sim.add([1] * 15)
    assert [rows_of(sim)[0][0][1:3] for _ in range(2)] == [(0, 4), (4, 4)]
    assert rows_of(sim) == ([(first, 8, 7, True)], 0)
    sim = Simulation(budget=3)
    sim.add([1] * 8)
    assert [rows_of(sim)[0][0][1:3] for _ in range(3)] == [(0, 3), (3, 1), (4, 3)]


def test_decode_rows_come_first_and_prompts_share_what_is_left():
    sim = Simulation(budget=16)
    sim.add([1] * 3, max_tokens=20)
    sim.step()
    second, third = sim.add([2] * 12), sim.add([3] * 12)
    assert rows_of(sim) == ([(second, 0, 12, True), (third, 0, 3, False)], 1)


def test_requests_are_let_in_in_order_of_arrival():
    """A long prompt at the head of the queue is not overtaken by short ones that would fit."""
    sim = Simulation("attention only", num_pages=6, num_seats=4)
    sim.add([1] * 40, max_tokens=8)
    sim.step()
    long, short = sim.add([2] * 40, max_tokens=2), sim.add([3], max_tokens=2)
    order = []
    while sim.live:
        sim.step()
        order += [s.request_id for s in sim.steps[-1].touched if s.request_id not in order]
    assert order[1:] == [long, short]


def test_seats_bound_what_runs_and_are_used_again():
    sim = Simulation(num_seats=2, budget=64)
    for _ in range(5):
        sim.add([1, 2], max_tokens=2)
    sim.step()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (2, 3)
    sim.drain()
    assert {new.seat for step in sim.steps for new in step.input.new} == {0, 1}


def test_nothing_to_do_is_no_step():
    sim = Simulation()
    assert sim.scheduler.schedule() is None
    sim.add([1], max_tokens=1)
    assert sim.submit()
    assert not sim.submit()


# Refusals


def test_a_request_that_could_never_finish_is_refused_with_the_numbers():
    sim = Simulation()
    with pytest.raises(ContextLengthError) as caught:
        sim.add([1] * 50, max_tokens=11)
    assert str(caught.value) == (
        "prompt of 50 tokens and up to 11 output tokens make 61; at most 60 fit"
    )
    assert sim.scheduler.is_idle
    sim.add([1] * 50, max_tokens=10)
    sim.drain()


def test_the_largest_request_that_is_let_in_finishes_in_the_smallest_pool():
    for layout in LAYOUTS:
        sim = Simulation(layout, num_pages=4)
        sim.add([1] * (sim.max_len - 1), max_tokens=1)
        sim.add([2], max_tokens=sim.max_len - 1)
        sim.drain()


def test_a_second_request_of_the_same_name_is_refused():
    sim = Simulation()
    name = sim.add([1])
    with pytest.raises(ValueError, match=f"{name} is already here"):
        sim.scheduler.add(sim.clients[name].spec)


# Every way out


def held(sim):
    """Units in use, of all kinds."""
    allocator = sim.scheduler.allocator
    return sum(allocator.used_units(kind) for kind in allocator.pages_by_kind())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_length_and_stop_end_a_request_and_free_everything(layout):
    sim = Simulation(layout)
    prompt = [4, 5, 6]
    tokens = continuation(prompt, seed=1, count=12)
    sim.add(prompt, max_tokens=12)
    sim.add(prompt, max_tokens=12, stop=[continuation(prompt, seed=2, count=3)[2]])
    sim.drain()
    assert sim.clients["r1"].received == tokens
    assert sim.clients["r2"].finish_reason == "stop"
    assert len(sim.clients["r2"].received) <= 2
    assert sim.scheduler.counters.finished == {"length": 1, "stop": 1}
    assert sim.scheduler.counters.prompt_tokens == 6
    assert sim.scheduler.counters.generation_tokens == sum(
        len(client.received) for client in sim.clients.values()
    )


def test_a_stop_token_is_not_drawn_before_min_tokens():
    sim = Simulation()
    free = continuation([4, 5], seed=1, count=3)
    sim.add([4, 5], max_tokens=6, stop=free[:1], min_tokens=3)
    sim.drain()
    assert len(sim.clients["r1"].received) >= 3


@pytest.mark.parametrize("depth", [1, 2])
def test_logits_that_are_not_finite_end_their_request_alone(depth):
    sim = Simulation(depth=depth)
    bad, good = sim.add([1, 2, 3], max_tokens=9), sim.add([4, 5, 6], max_tokens=9)
    sim.rank.broken_seeds.add(sim.clients[bad].spec.seed)
    sim.submit()
    step, output, _ = sim.in_flight[0]
    chunks = sim.scheduler.complete(step, output)
    sim.in_flight.clear()
    assert [(c.request_id, c.finish_reason) for c in chunks] == [(bad, "error"), (good, None)]
    assert chunks[0].token_ids == ()
    assert "not finite" in chunks[0].error
    assert sim.scheduler.counters.non_finite_rows == 1
    assert sim.scheduler.counters.finished == {"error": 1}
    assert not sim.scheduler.abort(bad)
    sim.live.pop(bad).finish_reason = "error"
    sim.clients[good].received += chunks[1].token_ids
    sim.drain()


def test_abort_of_a_waiting_request():
    sim = Simulation(num_seats=1)
    sim.add([1] * 5)
    waiting = sim.add([2] * 5)
    sim.step()
    before = held(sim)
    sim.abort(waiting)
    assert sim.scheduler.num_waiting == 0
    assert held(sim) == before
    sim.drain()


@pytest.mark.parametrize("num_steps", [1, 3], ids=["in prefill", "in decode"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_abort_between_steps_frees_at_once(layout, num_steps):
    sim = Simulation(layout, budget=8)
    name = sim.add([1] * 12, max_tokens=20)
    for _ in range(num_steps):
        sim.step()
    assert held(sim) > 0
    sim.abort(name)
    assert held(sim) == 0
    assert sim.scheduler.is_idle
    sim.drain()


@pytest.mark.parametrize("num_flying", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 3], ids=["prefill in flight", "decode in flight"])
def test_abort_with_steps_in_flight_frees_when_the_last_one_is_back(num_steps, num_flying):
    sim = Simulation(budget=8, depth=2)
    name = sim.add([1] * 30, max_tokens=20)
    for _ in range(num_steps):
        sim.step()
    while len(sim.in_flight) < num_flying:
        assert sim.submit()
    before = held(sim)
    sim.abort(name)
    assert (held(sim), sim.scheduler.has_work, sim.scheduler.is_idle) == (before, False, False)
    while len(sim.in_flight) > 1:
        sim.collect()
        assert held(sim) == before
    sim.collect()
    assert held(sim) == 0
    assert sim.scheduler.is_idle
    sim.drain()


def preempted(depth):
    """A simulation in which the youngest of two requests has just been preempted."""
    sim = Simulation("hybrid", num_pages=6, depth=depth)
    first, second = (sim.add([i] * 4, max_tokens=28) for i in (1, 2))
    while not sim.scheduler.counters.preemptions:
        assert len(sim.in_flight) == depth or sim.submit() or sim.in_flight
        if sim.scheduler.counters.preemptions:
            break
        sim.collect()
    return sim, first, second


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_of_a_preempted_request(depth):
    sim, first, second = preempted(depth)
    sim.abort(second)
    assert sim.scheduler.num_waiting == 0
    sim.drain()
    assert sim.clients[first].finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_starts_over_and_loses_nothing(depth):
    sim, first, second = preempted(depth)
    sim.drain()
    assert sim.clients[second].num_seated > 1
    assert sim.clients[first].num_seated == 1


def test_a_preempted_request_comes_before_those_that_never_ran():
    sim = Simulation("hybrid", num_pages=6)
    second = [sim.add([i] * 4, max_tokens=28) for i in (1, 2)][1]
    sim.step()
    third = sim.add([3] * 30, max_tokens=5)
    order = []
    while sim.live:
        sim.step()
        names = {client.spec.seed: name for name, client in sim.clients.items()}
        order += [names[new.sampling.seed] for new in sim.steps[-1].input.new]
    assert order == [second, third]


def test_an_abort_of_nobody_says_so():
    assert not Simulation().scheduler.abort("nobody")


def test_the_oldest_waits_for_units_on_their_way_back_instead_of_giving_up_its_own():
    """Two aborted requests hold the last blocks until their step is back."""
    sim = Simulation("attention only", num_pages=3, num_seats=3, depth=2)
    oldest = sim.add([1] * 4, max_tokens=20)
    others = [sim.add([2] * 12, max_tokens=2), sim.add([3] * 4, max_tokens=2)]
    sim.submit()
    for name in others:
        sim.abort(name)
    for _ in range(3):
        if len(sim.in_flight) < 2:
            sim.submit()
        if len(sim.in_flight) == 2:
            sim.collect()
    sim.drain()
    assert sim.clients[oldest].num_seated == 1
    assert sim.scheduler.counters.preemptions == 0


# What is told


def test_poison_names_every_freed_unit_once_and_only_if_asked():
    for asked in (True, False):
        sim = Simulation(debug_poison=asked)
        sim.add([1] * 9, max_tokens=1)
        sim.step()
        sim.add([1] * 2, max_tokens=2)
        sim.step()
        poison = sim.steps[-1].input.poison
        assert {kind: len(units) for kind, units in poison.items()} == (
            {"kv": 3, "state": 1} if asked else {}
        )
        sim.step()
        assert sim.steps[-1].input.poison == {}


def test_events_tell_waiting_first_token_and_end():
    seen = []

    class Events(SchedulerEvents):
        def admitted(self, wait_s):
            seen.append(("admitted", wait_s))

        def drew_token(self, latency_s, *, is_first):
            seen.append(("token", latency_s, is_first))

        def ended(self, elapsed_s):
            seen.append(("ended", elapsed_s))

    sim = Simulation(events=Events())
    sim.add([1, 2], max_tokens=2)
    sim.now_s = 3.0
    assert sim.scheduler.oldest_wait_s() == 3.0
    sim.submit()
    sim.now_s = 5.0
    sim.collect()
    sim.now_s = 6.0
    sim.step()
    assert seen == [
        ("admitted", 3.0),
        ("token", 5.0, True),
        ("token", 1.0, False),
        ("ended", 6.0),
    ]
    assert sim.scheduler.oldest_wait_s() == 0.0


def test_logprobs_of_the_rank_reach_the_chunk():
    sim = Simulation()
    sim.add([1, 2], max_tokens=1)
    sim.submit()
    step, output, _ = sim.in_flight.popleft()
    entry = TokenLogprobs(logprob=-0.5, top_ids=(3, 4), top_logprobs=(-0.5, -1.5))
    told = StepOutput(
        step=output.step, token_ids=output.token_ids, finite=output.finite, logprobs=(entry,)
    )
    (chunk,) = sim.scheduler.complete(step, told)
    assert chunk.logprobs[0].logprob == -0.5
    assert chunk.logprobs[0].top == ((3, -0.5), (4, -1.5))


def test_tokens_of_an_earlier_attempt_are_not_drawn_again():
    sim = Simulation()
    name = sim.add([1, 2, 3], max_tokens=8, sent=5)
    sim.step()
    assert len(sim.clients[name].received) == 6
    sim.drain()
