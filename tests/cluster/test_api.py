"""The HTTP surface as clients meet it: a real server, the official client, a scripted engine."""

import asyncio
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster.api.transport import EventStream
from plait.cluster.errors import OverloadedError, ReplicaError
from plait.cluster.request import TokenChunk
from plait.cluster.tokenizer import Tokenizer
from tests.cluster.api_support import DEMO_MODEL, MODEL, ScriptedEngine, logprob_of, pieces, serve

TOKENIZER = Tokenizer(DEMO_MODEL)
NAME = MODEL.name
TURN = {"role": "user", "content": "Hi"}
REPLY = "Dobrý večer 😀 水"
KEY_HEADER = {"Authorization": "Bearer s3cret"}


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


ENGINE = ScriptedEngine()


@pytest.fixture(scope="module")
def base():
    with serve(ENGINE) as address:
        yield address


@pytest.fixture
def engine(base):
    ENGINE.reset()
    return ENGINE


@pytest.fixture(scope="module")
def http(base):
    with httpx.Client(base_url=base, timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(base):
    with openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0, timeout=20) as made:
        yield made


def says(text, sizes=(1,)):
    return lambda spec: pieces(encode(text), sizes)


def events(response):
    """The events of a stream; every one must be strict JSON, and the last [DONE] or an error."""
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") for part in parts[:-1])
    data = [part.removeprefix("data: ") for part in parts[:-1]]
    if data[-1] != "[DONE]":
        assert "error" in json.loads(data[-1])
    return [strict(part) for part in data if part != "[DONE]"], data[-1] == "[DONE]"


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


# --- the official client


def test_a_completion(client, engine):
    engine.script = says(REPLY)
    reply = client.completions.create(model=NAME, prompt="abc", max_tokens=40)
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (REPLY, "stop")
    assert reply.usage.prompt_tokens == len(TOKENIZER.encode("abc"))
    assert reply.usage.completion_tokens == len(encode(REPLY))
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert engine.started[0].prompt_token_ids == tuple(TOKENIZER.encode("abc"))
    assert engine.aborted == []


def test_a_chat(client, engine):
    engine.script = says(REPLY)
    reply = client.chat.completions.create(model=NAME, messages=[TURN])
    assert reply.object == "chat.completion"
    message = reply.choices[0].message
    assert (message.role, message.content) == ("assistant", REPLY)
    ids = TOKENIZER.apply_chat_template([TURN])
    assert engine.started[0].prompt_token_ids == tuple(ids)
    assert reply.usage.prompt_tokens == len(ids)


def test_a_streamed_completion(client, engine):
    engine.script = says(REPLY)
    chunks = list(client.completions.create(model=NAME, prompt="abc", max_tokens=40, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_streamed_chat(client, engine):
    engine.script = says(REPLY)
    chunks = list(client.chat.completions.create(model=NAME, messages=[TURN], stream=True))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_usage_counts_all_choices_and_each_prompt_once(client, engine, stream):
    engine.script = says("one two three", [2, 1])
    asked = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(model=NAME, prompt=["a", "b c d"], n=3, **asked)
    reply = list(answer)[-1] if stream else answer
    assert (reply.choices == []) is stream
    prompt = len(TOKENIZER.encode("a")) + len(TOKENIZER.encode("b c d"))
    assert reply.usage.prompt_tokens == prompt
    assert reply.usage.completion_tokens == 6 * len(encode("one two three"))
    assert len(engine.started) == 6


def test_usage_is_not_mentioned_unless_asked_for(http, engine):
    body = {"model": NAME, "prompt": "a", "stream": True}
    plain, is_done = events(http.post("/v1/completions", json=body))
    assert is_done
    assert not any("usage" in chunk for chunk in plain)
    asked = body | {"stream_options": {"include_usage": True}}
    with_usage, _ = events(http.post("/v1/completions", json=asked))
    assert [chunk["usage"] is None for chunk in with_usage] == [True] * (len(with_usage) - 1) + [
        False
    ]


def test_several_prompts_and_choices_keep_their_places(client, engine):
    engine.script = lambda spec: [encode(f"{spec.prompt_token_ids[-1]}.{spec.seed % 1000}")]
    reply = client.completions.create(model=NAME, prompt=[[1, 20], [1, 30]], n=2, seed=5)
    texts = [choice.text for choice in reply.choices]
    seeds = [spec.seed for spec in engine.started[:2]]
    assert texts == [f"{p}.{seed % 1000}" for p in (20, 30) for seed in seeds]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({spec.request_id for spec in engine.started}) == 4
    assert seeds[0] == 5 != seeds[1]


@pytest.mark.parametrize("stream", [True, False])
def test_token_ids_and_text_give_the_same_with_a_stop_string(client, engine, stream):
    engine.script = says("one foo two")
    texts = []
    for prompt in ("abc", TOKENIZER.encode("abc"), ["abc"], [TOKENIZER.encode("abc")]):
        answer = client.completions.create(model=NAME, prompt=prompt, stop="foo", stream=stream)
        chunks = list(answer) if stream else [answer]
        texts.append("".join(chunk.choices[0].text for chunk in chunks))
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert texts == ["one "] * 4
    assert len({spec.prompt_token_ids for spec in engine.started}) == 1


def test_a_stop_string_ends_the_request_and_counts_its_last_token(client, engine):
    ids = encode("a") + encode("b") + encode("c") + encode("d")
    engine.script = lambda spec: [ids, 30.0]
    reply = client.completions.create(model=NAME, prompt="x", stop=["zz", "bc"])
    assert (reply.choices[0].text, reply.usage.completion_tokens) == ("a", 3)
    assert engine.aborted == [engine.started[0].request_id]


class Chunks:
    """An iterator that is no generator, so that nothing but a call closes it."""

    def __init__(self, request_id):
        self._request_id = request_id
        self.num_closed = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        ids = tuple(encode("a") + encode("b"))
        return TokenChunk(request_id=self._request_id, index=0, token_ids=ids)

    async def aclose(self):
        self.num_closed += 1


def test_iterators_are_closed_whatever_ends_the_reply(http, engine, monkeypatch):
    made = []

    def generate(spec):
        made.append(Chunks(spec.request_id))
        return made[-1]

    monkeypatch.setattr(engine, "generate", generate)
    body = {"model": NAME, "prompt": "a", "stop": "b"}
    for stream in (True, False):
        answer = http.post("/v1/completions", json=body | {"stream": stream})
        assert answer.status_code == 200
    assert [chunks.num_closed for chunks in made] == [1, 1]


def test_iterators_need_not_be_closable(http, engine, monkeypatch):
    monkeypatch.delattr(Chunks, "aclose")
    monkeypatch.setattr(engine, "generate", lambda spec: Chunks(spec.request_id))
    answer = http.post("/v1/completions", json={"model": NAME, "prompt": "a", "stop": "b"})
    assert answer.json()["choices"][0]["text"] == "a"


def test_held_back_text_comes_with_the_end(client, engine):
    engine.script = says("aXY")
    stream = client.completions.create(model=NAME, prompt="x", stop="XYZW", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "aXY"


# --- parameters


def test_parameters_reach_the_engine(client, engine):
    client.completions.create(
        model=NAME, prompt="a", max_tokens=9, temperature=0.5, top_p=0.25, seed=-3, logprobs=2,
        extra_body={"top_k": 4, "min_p": 0.125, "min_tokens": 2, "stop_token_ids": [50, 6]},
    )  # fmt: skip
    spec = engine.started[0]
    assert (spec.max_tokens, spec.min_tokens, spec.num_logprobs) == (9, 2, 2)
    assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (0.5, 0.25, 4, 0.125)
    assert (spec.seed, spec.stop_token_ids) == (-3, (50, 6, 2))


def test_defaults_are_those_of_openai(client, engine):
    client.completions.create(model=NAME, prompt="a")
    client.chat.completions.create(model=NAME, messages=[TURN])
    first, second = engine.started
    assert (first.temperature, first.top_p, first.top_k, first.num_logprobs) == (1, 1, 0, None)
    assert first.max_tokens == 16
    assert second.max_tokens == MODEL.max_model_len - len(second.prompt_token_ids)
    assert first.stop_token_ids == (6, 2)


def test_nulls_are_defaults(http, engine):
    names = ["n", "stream", "stream_options", "stop", "seed", "temperature", "top_p", "max_tokens",
             "logit_bias", "presence_penalty", "frequency_penalty", "user", "logprobs"]  # fmt: skip
    completion = {"model": NAME, "prompt": "a", **dict.fromkeys([*names, "suffix", "echo"])}
    chat = {"model": NAME, "messages": [TURN], **dict.fromkeys([*names, "tools", "top_logprobs"])}
    assert http.post("/v1/completions", json=completion).status_code == 200
    assert http.post("/v1/chat/completions", json=chat).status_code == 200


def test_neutral_and_unknown_fields_are_accepted(http, engine):
    neutral = {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me",
               "repetition_penalty": 1.0, "response_format": {"type": "text"}, "n": 1,
               "parallel_tool_calls": True, "store": False, "from_the_future": [1]}  # fmt: skip
    chat = {**neutral, "tools": [], "tool_choice": "none", "modalities": ["text"]}
    completion = {**neutral, "best_of": 1, "suffix": ""}
    body = {"model": NAME, "prompt": "a", **completion}
    assert http.post("/v1/completions", json=body).status_code == 200
    body = {"model": NAME, "messages": [TURN], **chat}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_end_of_sequence_can_be_ignored(client, engine):
    extra = {"ignore_eos": True, "stop_token_ids": [9]}
    client.completions.create(model=NAME, prompt="a", extra_body=extra)
    assert engine.started[0].stop_token_ids == (9,)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 4, "max_tokens": 30}, 4),
    ],
)
def test_limits_of_a_chat(client, engine, limits, expected):
    engine.script = says("one two three four five")
    reply = client.chat.completions.create(model=NAME, messages=[TURN], **limits)
    assert reply.usage.completion_tokens == expected
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize(("num_prompt", "left"), [(40, 16), (60, 4), (63, 1)])
def test_the_default_limit_of_a_completion_gives_way_to_the_context(
    client, engine, num_prompt, left
):
    client.completions.create(model=NAME, prompt=[9] * num_prompt)
    assert engine.started[0].max_tokens == left


def test_content_parts_and_roles(client, engine):
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    messages = [
        {"role": "developer", "content": "Be kind"},
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    client.chat.completions.create(model=NAME, messages=messages)
    assert TOKENIZER.decode(engine.started[0].prompt_token_ids, False) == (
        "<|bos|><|system|>Be kind<|end|><|user|>Hi\nyou<|end|><|assistant|><|end|>"
        "<|tool|>3<|end|><|assistant|>"
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("as_ids", [True, False])
def test_echo_puts_the_prompt_before_the_text(client, engine, stream, as_ids):
    engine.script = says(" def")
    prompts = ["abc", "xyz"]
    given_prompts = [TOKENIZER.encode(p) for p in prompts] if as_ids else prompts
    answer = client.completions.create(model=NAME, prompt=given_prompts, echo=True, stream=stream)
    texts = ["", ""]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["abc def", "xyz def"]


# --- log-probabilities


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_of_a_completion(client, engine, stream, count):
    ids = encode(REPLY)
    engine.script = lambda spec: pieces(ids, [2])
    answer = client.completions.create(
        model=NAME, prompt="a", logprobs=count, max_tokens=40, stream=stream
    )
    tokens, logprobs, tops, offsets = [], [], [], []
    for chunk in answer if stream else [answer]:
        if (part := chunk.choices[0].logprobs) is not None:
            tokens += part.tokens
            logprobs += part.token_logprobs
            tops += part.top_logprobs
            offsets += part.text_offset
    assert tokens == [TOKENIZER.token_text(i) for i in ids]
    assert logprobs == [-0.25] * len(ids)
    assert offsets == [len(TOKENIZER.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids))]
    for token_id, top in zip(ids, tops, strict=True):
        expected = dict(logprob_of(token_id, count).top) | {token_id: -0.25}
        assert top == {TOKENIZER.token_text(i): max(v, -9999.0) for i, v in expected.items()}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("top", [None, 0, 1, 20])
def test_logprobs_of_a_chat(client, engine, stream, top):
    ids = encode(REPLY)
    engine.script = lambda spec: pieces(ids, [3])
    more = {} if top is None else {"top_logprobs": top}
    answer = client.chat.completions.create(
        model=NAME, messages=[TURN], logprobs=True, stream=stream, **more
    )
    entries = []
    for chunk in answer if stream else [answer]:
        if (part := chunk.choices[0].logprobs) is not None:
            entries += part.content
    assert [entry.token for entry in entries] == [TOKENIZER.token_text(i) for i in ids]
    assert bytes(b for entry in entries for b in entry.bytes) == REPLY.encode()
    for token_id, entry in zip(ids, entries, strict=True):
        assert entry.logprob == -0.25
        assert [(t.token, t.logprob) for t in entry.top_logprobs] == [
            (TOKENIZER.token_text(i), max(v, -9999.0))
            for i, v in logprob_of(token_id, top or 0).top
        ]


def test_logprobs_are_strict_json(http, engine):
    engine.script = lambda spec: [list(range(7, 60))]
    body = {"model": NAME, "prompt": "a", "logprobs": 20, "max_tokens": 50}
    assert len(strict(http.post("/v1/completions", json=body).text)["choices"]) == 1


def test_no_logprobs_unless_asked_for(client, engine):
    assert client.completions.create(model=NAME, prompt="a").choices[0].logprobs is None
    chat = client.chat.completions.create(model=NAME, messages=[TURN], logprobs=False)
    assert chat.choices[0].logprobs is None


# --- whole and streamed replies are the same

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
def test_streamed_and_whole_replies_are_the_same(http, base, case):
    ENGINE.reset()
    ENGINE.script = lambda spec: pieces(case["ids"], case["sizes"])
    ENGINE.finish = case["finish"]
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


# --- when things go wrong


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


def reached(condition, limit_s=1.0):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


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


# --- models, probes, keys


def test_models(client):
    assert [entry.id for entry in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).created == MODEL.created
    with pytest.raises(openai.NotFoundError, match="serves 'org/demo'"):
        client.models.retrieve("org/other")


def test_probes_plan_and_metrics(http, engine):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert strict(http.get("/plan").text) == {"digest": "abc", "waste": None}
    metrics = http.get("/metrics")
    assert metrics.content == b"plait_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize("how", ["no", "hang", "raise"])
def test_probes_say_no_in_time(how, path):
    engine = ScriptedEngine()
    engine.answers_ready, engine.is_hanging = how != "no", how == "hang"
    if how == "raise":
        engine.is_ready = failing
    with serve(engine, probe_timeout_s=0.2) as base:
        start = time.monotonic()
        answer = httpx.get(base + path, trust_env=False)
        assert time.monotonic() - start < 1
    assert answer.status_code == 503
    assert answer.json()["status"] in ("unhealthy", "not ready")
    assert engine.num_cancelled_probes == (how == "hang")


async def failing():
    raise ReplicaError("gone")


def test_keys_guard_the_openai_routes_only():
    with serve(ScriptedEngine(), api_key="s3cret") as base:
        with httpx.Client(base_url=base, trust_env=False) as http:
            for path in ("/health", "/ready", "/plan", "/metrics"):
                assert http.get(path).status_code == 200
            for headers in (
                {}, {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cre"},
                {"Authorization": "Basic s3cret"}, {"Authorization": b"Bearer \xe9"},
            ):  # fmt: skip
                for path in ("/v1/models", f"/v1/models/{NAME}"):
                    check_refused(http.get(path, headers=headers))
                for path in ("/v1/completions", "/v1/chat/completions"):
                    check_refused(http.post(path, headers=headers, content=b"{"))
            assert http.get("/v1/models", headers=KEY_HEADER).status_code == 200
        with openai.OpenAI(base_url=f"{base}/v1", api_key="s3cret", max_retries=0) as client:
            assert client.completions.create(model=NAME, prompt="a").choices


def check_refused(answer):
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_default_seed_serves_requests_that_bring_none():
    engine = ScriptedEngine()
    with serve(engine, default_seed=11) as base:
        for more in ({}, {"seed": 12}):
            body = {"model": NAME, "prompt": "a", **more}
            httpx.post(f"{base}/v1/completions", json=body, trust_env=False)
    assert [spec.seed for spec in engine.started] == [11, 12]
