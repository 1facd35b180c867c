"""Two copies of the model behind one address, with a key."""

import os
import signal
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from plait_testing.load import Ask, run_load
from plait_testing.processes import poll
from plait_testing.server import RANK, REPLICA, Server, started
from plait_testing.streams import Streams

pytestmark = pytest.mark.ray

MODEL = "demo_model"
KEY = "a-key-of-the-test"
NUM_STREAMS = 8
SHORT = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with started(num_replicas=2, api_key=KEY, max_num_seqs=8) as server:
        yield server
        assert server.stop() == 0
        assert server.left_behind() == []


@pytest.mark.parametrize("value", [None, "Bearer wrong", "Bearer", f"Basic {KEY}", KEY])
def test_a_wrong_key_is_refused(server, value):
    headers = {} if value is None else {"Authorization": value}
    for path in ("/v1/completions", "/v1/chat/completions"):
        reply = httpx.post(server.url + path, json=SHORT, headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401


def test_the_right_key_serves_and_probes_need_none(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        assert client.completions.create(**SHORT).choices[0].text
    for path in ("/health", "/ready", "/plan", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200


def test_both_serve_and_are_labelled(server):
    assert len(server.titled(REPLICA)) == 2
    assert len(server.titled(RANK)) == 4
    body = SHORT | {"max_tokens": 16, "stream": True, "ignore_eos": True}
    answers = run_load(server, [Ask(path="/v1/completions", body=body)] * 24, concurrency=8)
    assert all(answer.is_done for answer in answers)
    assert len({answer.text for answer in answers}) == 1  # greedy: the same from both copies
    tokens = server.metrics().by("replica", "plait_generation_tokens_total")
    assert len(tokens) == 2
    assert min(tokens.values()) > 0
    assert server.metrics().by("replica", "plait_replica_healthy") == dict.fromkeys(tokens, 1.0)


def test_a_killed_one_leaves_the_other_serving(server):
    streams = Streams(
        server, NUM_STREAMS, SHORT | {"max_tokens": 400, "ignore_eos": True, "stream": True}
    )
    assert poll(lambda: streams.all_draw(5), timeout_s=30.0)
    running = server.metrics().by("replica", "plait_running_requests")
    assert len(running) == 2
    assert min(running.values()) > 0
    assert sum(running.values()) == NUM_STREAMS
    killed_s = time.monotonic()
    os.kill(server.titled(RANK)[0].pid, signal.SIGKILL)

    statuses: set[int] = set()

    def alive_alone() -> bool:
        with server.client() as http:
            statuses.add(http.post("/v1/completions", json=SHORT).status_code)
        statuses.add(server.status("/health"))
        return len(server.metrics().by("replica", "plait_replica_healthy")) == 1

    assert poll(alive_alone, timeout_s=10.0)
    (survivor,) = server.metrics().by("replica", "plait_replica_healthy")
    assert survivor in running
    for _ in range(5):
        assert not alive_alone() or statuses <= {200, 503}
    assert streams.have_ended(120.0)
    failed = [answer for answer in streams.answers if answer.error is not None]
    served = [answer for answer in streams.answers if answer.error is None]
    assert len(served) == running[survivor]
    assert len(failed) == NUM_STREAMS - len(served)
    for answer in served:
        assert answer.is_done
        assert answer.finish_reason == "length"
        assert answer.tokens == served[0].tokens
    for answer in failed:
        assert answer.error["code"] == "replica_failed"
        assert answer.tokens == served[0].tokens[: len(answer.tokens)]
    assert 200 in statuses
    assert statuses <= {200, 503}

    def both_are_back() -> bool:
        return len(server.metrics().by("replica", "plait_replica_healthy")) == 2

    assert poll(both_are_back, timeout_s=40.0)
    print(f"two copies again {time.monotonic() - killed_s:.1f} s after the kill")
