"""Whatever a client sends, the answer is OpenAI's error shape, and the next request works."""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster.api.app import build_app
from tests.cluster.api_support import MODEL, TOKENIZER, TURN, ScriptedEngine, serve
from tests.cluster.malformed import CHAT, COMPLETIONS, malformed_requests

CASES = malformed_requests(model=MODEL.name, context=MODEL.max_model_len, vocab_size=1024)
GOOD = {"model": MODEL.name, "prompt": "a"}
ENGINE = ScriptedEngine()


@pytest.fixture(scope="module")
def http():
    with (
        serve(ENGINE, max_body_bytes=200_000, max_choices=8) as base,
        httpx.Client(base_url=base, timeout=20, trust_env=False) as client,
    ):
        yield client


def check_error(answer, status, param=None, code=None):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param
    if code is not None:
        assert body["error"]["code"] == code
    return body["error"]["message"]


def check_works(http):
    answer = http.post(COMPLETIONS, json=GOOD)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_there_are_many_cases_with_names_of_their_own():
    assert len(CASES) >= 100
    assert len({case.name for case in CASES if case.code != "invalid_json"}) == len(
        [case for case in CASES if case.code != "invalid_json"]
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_malformed_request_is_refused_and_the_next_one_works(http, case):
    ENGINE.reset()
    answer = http.post(case.path, content=case.body)
    check_error(answer, case.status, case.param, case.code)
    assert ENGINE.started == []
    check_works(http)


def test_a_message_names_the_field_and_what_it_may_be(http):
    body = {"model": MODEL.name, "prompt": "a", "temperature": 5}
    message = check_error(http.post(COMPLETIONS, json=body), 400, "temperature")
    assert message == "temperature: Input should be less than or equal to 2"
    message = check_error(http.post(COMPLETIONS, json=GOOD | {"prompt": [1024]}), 400, "prompt")
    assert message == "prompt: 1024 is not a token id; they go from 0 to 1023"


@pytest.mark.parametrize(
    ("num_prompt", "asked", "total", "param", "parts"),
    [
        (60, 10, 70, "max_tokens", "60 in the prompt and 10 for"),
        (70, None, 71, "prompt", "70 in the prompt and at least 1 for"),
        (64, 1, 65, "prompt", "64 in the prompt and 1 for"),
    ],
)
def test_a_request_beyond_the_context_is_told_both_counts(
    http, num_prompt, asked, total, param, parts
):
    body = GOOD | {"prompt": [9] * num_prompt, "max_tokens": asked}
    message = check_error(
        http.post(COMPLETIONS, json=body), 400, param, code="context_length_exceeded"
    )
    assert "maximum context length is 64 tokens" in message
    assert f"asked for {total}: {parts}" in message


def test_a_request_that_just_fits_is_served(http):
    body = GOOD | {"prompt": [9] * 60, "max_tokens": 4}
    assert http.post(COMPLETIONS, json=body).status_code == 200


def test_a_request_that_the_cache_cannot_hold_is_told_its_limit():
    small = dataclasses.replace(MODEL, max_request_tokens=20, vocab_size=900)
    client = TestClient(build_app(ENGINE, TOKENIZER, small))
    ENGINE.reset()
    answer = client.post(COMPLETIONS, json=GOOD | {"prompt": [9] * 15, "max_tokens": 6})
    message = check_error(answer, 400, "max_tokens", code="context_length_exceeded")
    assert "the cache of this server holds at most 20 tokens per request" in message
    body = {"model": MODEL.name, "messages": [{"role": "user", "content": "a"}]}
    assert client.post(CHAT, json=body).status_code == 200
    spec = ENGINE.started[0]
    assert len(spec.prompt_token_ids) + spec.max_tokens == 20
    # Ids that only the tokenizer knows are refused too.
    check_error(client.post(COMPLETIONS, json=GOOD | {"prompt": [900]}), 400, "prompt")


@pytest.mark.parametrize(
    ("more", "param"),
    [({"n": 9}, "n"), ({"prompt": ["a"] * 9}, "prompt"), ({"prompt": ["a"] * 3, "n": 3}, "prompt")],
)
def test_choices_are_limited(http, more, param):
    check_error(http.post(COMPLETIONS, json=GOOD | more), 400, param)
    check_works(http)


def test_bodies_are_limited(http):
    body = json.dumps(GOOD | {"user": "x" * 200_000}).encode()
    check_error(http.post(COMPLETIONS, content=body), 413, code="request_too_large")
    check_works(http)


def test_a_long_text_does_not_keep_other_requests_waiting():
    body = {"model": MODEL.name, "prompt": "hello world " * 60_000}
    with (
        serve(ScriptedEngine(), probe_timeout_s=5) as base,
        httpx.Client(base_url=base, timeout=60, trust_env=False) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        start, waits = time.monotonic(), []
        long = pool.submit(http.post, COMPLETIONS, json=body)
        while not long.done():
            before = time.monotonic()
            assert http.get("/health").status_code == 200
            waits.append(time.monotonic() - before)
        took = time.monotonic() - start
        check_error(long.result(), 400, "prompt", code="context_length_exceeded")
    assert max(waits) < took / 2


def test_long_values_are_not_sent_back_whole(http):
    message = check_error(http.post(COMPLETIONS, json=GOOD | {"model": "x" * 50_000}), 404, "model")
    assert len(message) < 3000


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/openapi.json", 404, "unknown_url"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_supported"),
        ("DELETE", "/v1/models", 405, "method_not_supported"),
        ("POST", "/health", 405, "method_not_supported"),
    ],
)
def test_unknown_routes_and_methods(http, method, path, status, code):
    check_error(http.request(method, path), status, code=code)


def test_unknown_models_are_not_found(http):
    for path in ("/v1/models/x", "/v1/models/org/x", "/v1/models/"):
        check_error(http.get(path), 404, "model", code="model_not_found")


# --- random bodies

FIELDS = [
    "model", "prompt", "messages", "n", "stream", "stream_options", "stop", "seed", "temperature",
    "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos",
    "stop_token_ids", "logprobs", "top_logprobs", "echo", "best_of", "suffix", "logit_bias",
    "response_format", "tools", "tool_choice", "chat_template_kwargs", "presence_penalty", "user",
]  # fmt: skip
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.sampled_from(["", "a", "text", "user", "bot", MODEL.name]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "x"]), inner
        ),
    ),
    max_leaves=8,
)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": values}),
    max_size=2,
)
bases = st.one_of(
    st.just({}),
    st.just({"model": MODEL.name, "prompt": "a", "messages": [TURN]}),
    st.fixed_dictionaries({"model": st.just(MODEL.name), "prompt": values, "messages": turns}),
)


@settings(max_examples=250, deadline=None)
@given(
    path=st.sampled_from([COMPLETIONS, CHAT]),
    base=bases,
    more=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
)
def test_no_body_makes_the_server_fail(http, path, base, more):
    answer = http.post(path, content=json.dumps(base | more).encode())
    if answer.status_code != 200:
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text


@settings(max_examples=50, deadline=None)
@given(path=st.sampled_from([COMPLETIONS, CHAT]), body=st.binary(max_size=60))
def test_no_bytes_make_the_server_fail(http, path, body):
    answer = http.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_it_still_works_after_all_of_that(http):
    ENGINE.reset()
    check_works(http)
    assert len(ENGINE.started) == 1
