"""A rank that dies or hangs, and more clients than there is room for."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

import httpx
import pytest
from plait_testing.load import Ask, run_load
from plait_testing.processes import is_alive, poll
from plait_testing.server import INGRESS, RANK, REPLICA, Server, started
from plait_testing.streams import Streams

pytestmark = pytest.mark.ray

MODEL = "demo_model"
MAX_NUM_SEQS = 4
MAX_QUEUED = 8
QUEUE_TIMEOUT_S = 30.0
STEP_TIMEOUT_S = 5.0
FIRST_ANSWER_LIMIT_S = 20.0
NO_REQUEST_AFTER_S = 1.0
NUM_STREAMS = 3

SHORT = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 2}
LONG = SHORT | {"max_tokens": 6000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with started(
        max_num_seqs=MAX_NUM_SEQS,
        max_queued_requests=MAX_QUEUED,
        queue_timeout_s=QUEUE_TIMEOUT_S,
        step_timeout_s=STEP_TIMEOUT_S,
    ) as server:
        yield server
        assert server.stop() == 0
        assert server.left_behind() == []


@dataclass(frozen=True, slots=True)
class Probe:
    """A short request while the server is in trouble."""

    sent_s: float
    took_s: float
    status: int
    retry_after: str | None
    body: str


@dataclass(slots=True)
class Probes:
    """Asks for the health, from a thread, while a test does harm."""

    server: Server
    health: list[tuple[float, int]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in self.loops()]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(QUEUE_TIMEOUT_S + 10.0)

    def loops(self) -> list[Callable[[], None]]:
        return [self._ask_health]

    def _ask_health(self) -> None:
        while not self._stop.wait(0.1):
            start = time.monotonic()
            self.health.append((start, self.server.status("/health")))


@dataclass(slots=True)
class Watch(Probes):
    """Sends short requests too."""

    probes: list[Probe] = field(default_factory=list)

    def loops(self) -> list[Callable[[], None]]:
        return [self._ask_health, *[self._ask] * 3]

    def first_answer_s(self, since_s: float) -> float | None:
        """When the first request sent after `since_s` was served."""
        served = [
            probe.sent_s + probe.took_s
            for probe in self.probes
            if probe.sent_s > since_s and probe.status == 200
        ]
        return min(served, default=None)

    def _ask(self) -> None:
        with self.server.client(QUEUE_TIMEOUT_S + 5.0) as http:
            while not self._stop.wait(0.2):
                start = time.monotonic()
                try:
                    reply = http.post("/v1/completions", json=SHORT)
                    status, body, headers = reply.status_code, reply.text, reply.headers
                except httpx.TransportError as exc:
                    status, body, headers = 0, repr(exc), httpx.Headers()
                took = time.monotonic() - start
                self.probes.append(Probe(start, took, status, headers.get("Retry-After"), body))


def check_replacement(server: Server, harm: signal.Signals, *, notice_s: float) -> None:
    """Do harm to a rank: the copy is replaced and clients are told, within `notice_s` of it."""
    old = {*server.titled(RANK), *server.titled(REPLICA)}
    assert len(old) == 3
    assert len(server.ray_state()["CREATED"]) == 1
    (ingress,) = server.titled(INGRESS)
    streams = Streams(server, NUM_STREAMS, LONG)
    assert poll(lambda: streams.all_draw(5), timeout_s=30.0)
    num_sockets = len(ingress.net_connections(kind="all"))

    with Watch(server) as watch:
        harmed_s = time.monotonic()
        os.kill(server.titled(RANK)[1].pid, harm)
        assert streams.have_ended(notice_s + 10.0), "the streams hang"
        known_s = harmed_s + notice_s + NO_REQUEST_AFTER_S
        poll(
            lambda: watch.first_answer_s(known_s) is not None,
            timeout_s=notice_s + FIRST_ANSWER_LIMIT_S + 20.0,
        )
        answered_s = watch.first_answer_s(known_s)
        poll(lambda: server.status("/health") == 200, timeout_s=10.0)
        time.sleep(0.5)

    for answer in streams.answers:
        assert answer.status == 200
        assert not answer.is_done
        assert answer.error is not None
        assert answer.error["code"] == "replica_failed"
    assert answered_s is not None, [p for p in watch.probes if p.sent_s > harmed_s]
    print(f"first answer {answered_s - harmed_s:.1f} s after {harm.name}")
    assert answered_s - harmed_s - notice_s < FIRST_ANSWER_LIMIT_S

    later = [probe for probe in watch.probes if probe.sent_s > known_s]
    assert {probe.status for probe in later} <= {200, 503}, later
    for probe in later:
        assert probe.took_s < QUEUE_TIMEOUT_S + 2.0
        if probe.status == 503:
            assert int(probe.retry_after or 0) > 0
            assert json.loads(probe.body)["error"]["code"] == "overloaded"
    statuses = [status for start, status in watch.health if start > harmed_s]
    assert set(statuses) == {200, 503}
    assert statuses[-1] == 200

    assert poll(lambda: not any(map(is_alive, old)), timeout_s=15.0), [
        process for process in old if is_alive(process)
    ]
    assert len(server.titled(RANK)) == 2
    assert len(server.titled(REPLICA)) == 1
    assert server.own_folders() == []
    poll(lambda: len(ingress.net_connections(kind="all")) <= num_sockets, timeout_s=15.0)
    assert len(ingress.net_connections(kind="all")) <= num_sockets
    after = server.ray_state()
    assert len(after.pop("CREATED")) == 1
    assert after.keys() <= {"REMOVED"}


def test_killed_rank(server):
    check_replacement(server, signal.SIGKILL, notice_s=0.0)


def test_stopped_rank(server):
    """It hangs with requests running; only the time of its step tells."""
    check_replacement(server, signal.SIGSTOP, notice_s=STEP_TIMEOUT_S)


def test_flood_gets_503_and_never_hangs(server):
    num_clients = 60
    body = SHORT | {"max_tokens": 60, "ignore_eos": True, "stream": True}
    asks = [Ask(path="/v1/completions", body=body) for _ in range(num_clients)]
    start = time.monotonic()
    with Probes(server) as probes:
        answers = run_load(server, asks, concurrency=num_clients)
    took_s = time.monotonic() - start
    # Full is not broken: who restarts a server that says so makes things worse.
    assert {status for _, status in probes.health} == {200}
    assert len(probes.health) > 10
    refused = [answer for answer in answers if answer.status == 503]
    served = [answer for answer in answers if answer.status == 200]
    print(f"{len(served)} served, {len(refused)} refused in {took_s:.1f} s")
    others = [answer for answer in answers if answer.status not in (200, 503)]
    assert others == []
    assert len(served) >= MAX_NUM_SEQS + MAX_QUEUED
    assert len(refused) >= num_clients // 3
    for answer in refused:
        assert int(answer.headers["retry-after"]) > 0
        assert answer.error is not None
        assert answer.error["code"] == "overloaded"
    for answer in served:
        assert answer.is_done
        assert answer.error is None
    assert server.metrics()("plait_overloads_total") >= len(refused)
    with server.client() as http:
        assert http.post("/v1/completions", json=SHORT).status_code == 200
