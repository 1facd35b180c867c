"""Many requests at once, and clients that hang up: nothing leaks, nobody gets another's tokens."""

import asyncio
import random
from dataclasses import dataclass

import httpx
import psutil
import pytest
from plait_testing.greedy import Comparison, GreedyRun
from plait_testing.load import Ask, chat, leave_at_random, run_alone, run_load
from plait_testing.processes import Footprint, poll, title
from plait_testing.server import Server

from plait.deploy.make_demo_model import evaluate
from tests.e2e.conftest import MAX_NUM_SEQS

pytestmark = pytest.mark.ray

MODEL = "demo_model"
CONCURRENCY = 32
NUM_REQUESTS = 200
NUM_ABORTED = 60
STORY_TOKENS = 48
SETTLE_S = 20.0
MAX_GROWTH = 1.05
MAX_GROWTH_BYTES = 20 << 20


@dataclass(frozen=True, slots=True)
class Known:
    """A task and what the server answers to it when it has nothing else to do."""

    task: evaluate.Task
    kind: str
    max_tokens: int
    alone: GreedyRun

    def ask(self, max_tokens: int | None = None) -> dict:
        return chat(MODEL, self.task.messages, max_tokens=max_tokens or self.max_tokens)


@pytest.fixture(scope="module")
def known(server: Server) -> list[Known]:
    kinds = {
        "recall": (evaluate.recall_prompts(16, 14, seed=31), 32),
        "repeat": (evaluate.repeat_prompts(10, 14, seed=32), 48),
        "story": (evaluate.story_prompts(6, seed=33), STORY_TOKENS),
    }
    return [
        Known(task, kind, limit, run_alone(server, chat(MODEL, task.messages, max_tokens=limit)))
        for kind, (tasks, limit) in kinds.items()
        for task in tasks
    ]


def requests(known: list[Known], seed: int) -> tuple[list[Known], list[Ask]]:
    """Every known task whole, then others at random lengths; some clients hang up in between."""
    rng = random.Random(seed)
    chosen = [*known, *rng.choices(known, k=NUM_REQUESTS - len(known))]
    asks = [Ask(body=item.ask()) for item in known]
    for number, item in enumerate(chosen[len(known) :]):
        body = item.ask(rng.randint(1, item.max_tokens))
        asks.append(leave_at_random(rng, body) if number < NUM_ABORTED else Ask(body=body))
    order = rng.sample(range(NUM_REQUESTS), NUM_REQUESTS)
    return [chosen[i] for i in order], [asks[i] for i in order]


def is_idle(server: Server) -> bool:
    metrics = server.metrics()
    return metrics("plait_running_requests") == metrics("plait_waiting_requests") == 0


def free_pages(server: Server) -> float:
    return server.metrics()("plait_pages", kind="free")


@pytest.mark.timeout(600)
def test_load_with_aborts_changes_no_answer_and_leaks_nothing(server, known):
    pages = free_pages(server)
    assert pages == server.metrics()("plait_usable_pages")
    check_round(server, known, seed=41)
    processes = server.processes()
    before = settled(server, processes)
    check_round(server, known, seed=42)

    assert server.processes() == processes
    grown: list[str] = []

    def has_settled() -> bool:
        after = {process: Footprint.of(process) for process in processes}
        grown[:] = [
            f"{title(process)[:60]}: {before[process]} -> {now}"
            for process, now in after.items()
            if not _is_within(before[process], now)
        ]
        return not grown

    poll(has_settled, timeout_s=SETTLE_S, period_s=1.0)
    assert grown == []
    assert free_pages(server) == pages
    assert server.metrics()("plait_used_units") == 0


def settled(server: Server, processes: set[psutil.Process]) -> dict[psutil.Process, Footprint]:
    """What processes hold once nothing goes on and their open files stay the same."""
    assert poll(lambda: is_idle(server), timeout_s=SETTLE_S)
    last: dict[psutil.Process, Footprint] = {}

    def is_stable() -> bool:
        now = {process: Footprint.of(process) for process in processes}
        stable = all(
            process in last
            and (last[process].num_files, last[process].num_sockets)
            == (held.num_files, held.num_sockets)
            for process, held in now.items()
        )
        last.clear()
        last.update(now)
        return stable

    assert poll(is_stable, timeout_s=SETTLE_S, period_s=1.0)
    return last


def _is_within(before: Footprint, after: Footprint) -> bool:
    limit = max(before.rss_bytes * MAX_GROWTH, before.rss_bytes + MAX_GROWTH_BYTES)
    return (
        after.rss_bytes <= limit
        and after.num_files <= before.num_files
        and after.num_sockets <= before.num_sockets
    )


def check_round(server: Server, known: list[Known], seed: int) -> None:
    """200 requests: those who stay get the tokens that they get alone, and score as well."""
    before = server.metrics()
    items, asks = requests(known, seed)
    answers = run_load(server, asks, concurrency=CONCURRENCY)
    comparison = Comparison()
    right = dict.fromkeys(("recall", "repeat"), 0)
    for item, ask, answer in zip(items, asks, answers, strict=True):
        assert answer.error is None
        comparison.add(item.alone, answer.tokens)
        if ask.leaves:
            continue
        assert answer.status == 200
        assert answer.is_done
        is_whole = ask.body["max_tokens"] == item.max_tokens
        if answer.tokens == list(item.alone.tokens[: len(answer.tokens)]):
            expected = min(ask.body["max_tokens"], len(item.alone.tokens))
            assert len(answer.tokens) == expected
        if is_whole and item.kind in right:
            right[item.kind] += item.task.check(answer.text)
    comparison.check()
    for kind, count in right.items():
        whole = [
            item
            for item, ask in zip(items, asks, strict=True)
            if item.kind == kind and not ask.leaves and ask.body["max_tokens"] == item.max_tokens
        ]
        alone = sum(item.task.check(item.alone.text) for item in whole)
        assert alone >= 0.7 * len(whole) > 0, f"{kind}: {alone} of {len(whole)} alone"
        # A near-tie may turn one answer; a swapped or stale state turns most of them.
        assert count >= alone - 1, f"{kind}: {count} under load, {alone} alone"
    assert poll(lambda: is_idle(server), timeout_s=SETTLE_S)
    after = server.metrics()

    def ended(reason: str) -> float:
        name = "plait_finished_requests_total"
        return after(name, reason=reason) - before(name, reason=reason)

    assert ended("stop") + ended("length") >= NUM_REQUESTS - NUM_ABORTED
    assert 1 <= ended("abort") <= NUM_ABORTED
    assert ended("error") == 0
    # A client that leaves is no failure of ours.
    assert after("plait_http_requests_total", status="500") == 0
    assert after("plait_replica_failures_total") == 0
    assert after("plait_overloads_total") == 0
    assert after("plait_non_finite_rows_total") == 0


@pytest.mark.parametrize("state", ["queue", "prefill", "decode"])
def test_a_client_that_hangs_up_frees_everything(server, state):
    """In each state, made certain by looking at the metrics before hanging up."""
    pages = free_pages(server)
    before = server.metrics()("plait_finished_requests_total", reason="abort")
    num_clients = asyncio.run(_hang_up_in(server, state))
    assert poll(lambda: is_idle(server), timeout_s=SETTLE_S)
    after = server.metrics()
    assert after("plait_finished_requests_total", reason="abort") == before + num_clients
    assert after("plait_pages", kind="free") == pages
    assert after("plait_used_units") == 0
    with server.client() as http:
        ask = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 4}
        assert http.post("/v1/completions", json=ask).status_code == 200


async def _hang_up_in(server: Server, state: str) -> int:
    """Bring requests into a state and hang up; how many."""
    long = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "temperature": 0}
    long |= {"stream": True, "ignore_eos": True}
    big = long | {"prompt": [10 + i % 900 for i in range(8000)], "max_tokens": 100}
    bodies = {"queue": [long] * (MAX_NUM_SEQS + 8), "prefill": [big], "decode": [long] * 4}[state]
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
        drawn = await _scrape(http, "plait_generation_tokens_total")
        tasks = [asyncio.ensure_future(_drain(http, body)) for body in bodies]
        try:
            for _ in range(400):
                running = await _scrape(http, "plait_running_requests")
                waiting = await _scrape(http, "plait_waiting_requests")
                tokens = await _scrape(http, "plait_generation_tokens_total") - drawn
                if state == "queue" and (running, waiting) == (MAX_NUM_SEQS, 8):
                    break
                if state == "prefill" and running == 1:
                    assert tokens == 0, "the prompt was too short to be caught in its prefill"
                    break
                if state == "decode" and running == 4 and tokens > 40:
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError(f"never came to {state}: {running=} {waiting=} {tokens=}")
            if state == "queue":  # the last ones wait
                for task in tasks[MAX_NUM_SEQS:]:
                    task.cancel()
                await asyncio.gather(*tasks[MAX_NUM_SEQS:], return_exceptions=True)
                for _ in range(200):
                    if await _scrape(http, "plait_waiting_requests") == 0:
                        break
                    await asyncio.sleep(0.05)
                assert await _scrape(http, "plait_waiting_requests") == 0
                assert await _scrape(http, "plait_running_requests") == MAX_NUM_SEQS
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return len(bodies)


async def _drain(http: httpx.AsyncClient, body: dict) -> None:
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        async for _ in reply.aiter_bytes():
            pass


async def _scrape(http: httpx.AsyncClient, name: str) -> float:
    text = (await http.get("/metrics")).text
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{")
    )
