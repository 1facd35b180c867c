"""The HTTP surface as clients meet it: a real server, the official client, a scripted engine."""

import pytest

from plait.cluster.request import TokenChunk
from tests.cluster.api_support import (
    MODEL,
    NAME,
    REPLY,
    TOKENIZER,
    TURN,
    encode,
    events,
    logprob_of,
    pieces,
    says,
    strict,
)


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
