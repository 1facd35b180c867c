"""Streams say what whole replies say, fail in the open, and end when their client leaves."""

import asyncio
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster.api.transport import EventStream
from plait.cluster.errors import OverloadedError, ReplicaError
from tests.cluster.api_support import NAME, REPLY, TURN, encode, events, pieces, reached

cases = st.fixed_dictionaries(
    {
        "ids": st.one_of(
            st.lists(st.integers(0, 1023), max_size=30),
            st.text(max_size=15).map(encode),
            st.sampled_from(["aXYaXYZb", "end XY", REPLY]).map(encode),
        ),
        "sizes": st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any),
        "finish": st.sampled_from(["stop", "length"]),
        "limit": st.integers(1, 40),
        "stop": st.lists(st.sampled_from(["XYZ", "Y", "a", " ", "\ufffd"]), max_size=3),
        "n": st.integers(1, 3),
        "is_chat": st.booleans(),
        "logprobs": st.booleans(),
    }
)


@settings(max_examples=120, deadline=None)
@given(case=cases)
def test_streamed_and_whole_replies_are_the_same(http, scripted, case):
    scripted.reset()
    scripted.script = lambda spec: pieces(case["ids"], case["sizes"])
    scripted.finish = case["finish"]
    body = {"model": NAME, "n": case["n"], "stop": case["stop"], "max_tokens": case["limit"]}
    if case["is_chat"]:
        path, body = "/v1/chat/completions", body | {"messages": [TURN]}
        body |= {"logprobs": case["logprobs"]}
    else:
        path, body = "/v1/completions", body | {"prompt": "a"}
        body |= {"logprobs": 1 if case["logprobs"] else None}
    whole = http.post(path, json=body).json()
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    chunks, is_done = events(http.post(path, json=asked))
    assert is_done
    assert chunks[-1]["usage"] == whole["usage"]
    assert join(chunks) == [summary(choice) for choice in whole["choices"]]


def summary(choice):
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return [text, listed(choice["logprobs"]), choice["finish_reason"]]


def listed(logprobs):
    return [value for values in (logprobs or {}).values() for value in values or ()]


def join(chunks):
    """Streamed choices in the form of `summary`."""
    joined = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            entry = joined.setdefault(choice["index"], ["", {}, None])
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            entry[0] += text
            for name, values in (choice["logprobs"] or {}).items():
                entry[1].setdefault(name, []).extend(values or ())
            assert entry[2] is None
            entry[2] = choice["finish_reason"]
    return [[text, listed(logprobs), reason] for _, (text, logprobs, reason) in
            sorted(joined.items())]  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OverloadedError("full", retry_after_s=7), 503, "overloaded"),
        (ReplicaError("lost"), 500, "replica_failed"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
def test_failures_before_the_first_token_are_ordinary_answers(
    http, engine, path, stream, error, status, code
):
    engine.script = lambda spec: [error]
    body = {"model": NAME, "prompt": "a", "messages": [TURN], "n": 2, "stream": stream}
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers.get("Retry-After") == ("7" if status == 503 else None)
    assert "secret" not in answer.text


def test_an_unexpected_failure_leaves_the_connection_usable(base, engine):
    engine.script = lambda spec: [RuntimeError("secret detail")]
    body = json.dumps({"model": NAME, "prompt": "a"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    where = urlsplit(base)
    with socket.create_connection((where.hostname, where.port), timeout=5) as connection:
        for _ in range(3):
            connection.sendall(head.encode() + body)
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 500")
            assert b"internal_error" in answer
            time.sleep(0.05)  # a server that closes has done so by now


@pytest.mark.parametrize("n", [1, 2])
def test_failures_in_a_stream_are_an_event_and_no_done(http, engine, n):
    engine.script = lambda spec: [encode("ab"), 0.05, ReplicaError("lost rank 1")]
    body = {"model": NAME, "prompt": "a", "stream": True, "n": n}
    answer = http.post("/v1/completions", json=body)
    chunks, is_done = events(answer)
    assert answer.status_code == 200
    assert not is_done
    assert chunks[0]["choices"][0]["text"] == "ab"
    assert chunks[-1]["error"]["message"] == "lost rank 1"
    assert sum("error" in chunk for chunk in chunks) == 1


def test_one_failed_choice_ends_the_others(http, engine):
    def script(spec):
        is_first = spec.request_id.endswith("-0")
        return [encode("a"), 0.1, ReplicaError("lost")] if is_first else [encode("b"), 30.0]

    engine.script = script
    start = time.monotonic()
    answer = http.post("/v1/completions", json={"model": NAME, "prompt": "a", "n": 3})
    assert answer.status_code == 500
    assert time.monotonic() - start < 5
    assert sorted(engine.aborted) == sorted(s.request_id for s in engine.started[1:])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("finish", "error", "message"),
    [("error", "logits are not finite", "not finite"), ("abort", None, "aborted")],
)
def test_requests_that_the_engine_ends_are_failures(http, engine, stream, finish, error, message):
    engine.script, engine.finish, engine.error = (lambda spec: []), finish, error
    body = {"model": NAME, "prompt": "a", "stream": stream}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 500
    assert message in answer.json()["error"]["message"]


def test_an_engine_that_just_stops_is_a_failure(http, engine):
    engine.script, engine.finish = (lambda spec: [[8]]), None
    answer = http.post("/v1/completions", json={"model": NAME, "prompt": "a"})
    assert answer.status_code == 500
    assert "finish reason" in answer.json()["error"]["message"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before", [[], [encode("ab")]])
def test_a_client_that_hangs_up_aborts_its_request(base, engine, stream, before, n):
    engine.script = lambda spec: [*before, 30.0]
    body = json.dumps({"model": NAME, "prompt": "a", "stream": stream, "n": n}).encode()
    where = urlsplit(base)
    with socket.create_connection((where.hostname, where.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if stream and before:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert reached(lambda: len(engine.started) == n)
        time.sleep(0.1)
        assert engine.aborted == []
    assert reached(lambda: len(engine.aborted) == n)


def test_tokens_are_sent_as_they_come(base, engine):
    engine.script = lambda spec: [encode("a"), 0.3, encode("b"), 0.3, encode("c")]
    times = []
    body = {"model": NAME, "prompt": "a", "stream": True}
    with (
        httpx.Client(base_url=base, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    assert times[1] - times[0] > 0.2
    assert times[2] - times[1] > 0.2


def test_choices_that_send_at_once_wait_for_the_status():
    sent = []

    async def slow_send(message):
        if message["type"] == "http.response.start":
            await asyncio.sleep(0.01)
        sent.append(message)

    async def produce(send_events):
        await asyncio.gather(send_events([{"a": 1}]), send_events([{"b": 2}]))

    async def receive():
        await asyncio.sleep(60)

    asyncio.run(EventStream(produce)({"type": "http"}, receive, slow_send))
    assert [message["type"].split(".")[-1] for message in sent] == ["start"] + ["body"] * 4
    assert [message.get("body") for message in sent[1:4]] == [
        b'data: {"a":1}\n\n', b'data: {"b":2}\n\n', b"data: [DONE]\n\n",
    ]  # fmt: skip


def test_servers_that_fail_to_send_count_as_clients_that_hung_up():
    produced = []

    async def broken_send(message):
        if produced:
            raise OSError("gone")

    async def produce(send_events):
        await send_events([{"a": 1}])
        produced.append(1)
        await send_events([{"b": 2}])
        produced.append(2)

    async def receive():
        await asyncio.sleep(60)

    asyncio.run(EventStream(produce)({"type": "http"}, receive, broken_send))
    assert produced == [1]
