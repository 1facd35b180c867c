"""Requests that a client gets wrong, each with the answer it has to get.

Used against the HTTP layer alone and against a whole server, which must serve the next request.
"""

import json
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    name: str
    path: str
    body: bytes
    status: int = 400
    param: str | None = None
    code: str | None = None  # None: whatever it is


def malformed_requests(*, model: str, context: int, vocab_size: int) -> list[Malformed]:
    """Cases for a server of `model` whose requests have at most `context` tokens."""
    return [
        *_bodies(model),
        *_prompts(model, context, vocab_size),
        *_sampling(model, vocab_size),
        *_chats(model, context),
        *_unsupported(model),
    ]


def _bodies(model: str) -> list[Malformed]:
    raw = {
        "empty body": b"",
        "cut json": b'{"model": "' + model.encode(),
        "not utf-8": b'{"model": "\xff\xfe"}',
        "lone surrogate": b'{"model": "\\ud800", "prompt": "a"}',
        "deep nesting": b'{"model": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        "endless number": b'{"model": "m", "prompt": "a", "seed": 1' + b"0" * 6000 + b"}",
    }
    cases = [
        Malformed(name=name, path=path, body=body, code="invalid_json")
        for name, body in raw.items()
        for path in (COMPLETIONS, CHAT)
    ]
    for name, value in (("a list", []), ("a text", "hi"), ("null", None), ("a number", 3)):
        cases.append(_case(f"body is {name}", COMPLETIONS, value, None))
    for wrong, param in ((7, "model"), (None, "model"), ([], "model")):
        body = {"model": wrong, "prompt": "a"}
        cases.append(_case(f"model is {wrong}", COMPLETIONS, body, param))
    missing = {"prompt": "a"}
    cases.append(
        _case("no model", COMPLETIONS, missing, "model", code="missing_required_parameter")
    )
    unknown = {"model": "nobody", "prompt": "a"}
    cases.append(
        _case("other model", COMPLETIONS, unknown, "model", status=404, code="model_not_found")
    )
    return cases


def _prompts(model: str, context: int, vocab_size: int) -> list[Malformed]:
    wrong: dict[str, Any] = {
        "huge id": [1, 2, 5279552648203111001],
        "beyond 64 bits": [2**70],
        "negative id": [-1],
        "id one past the vocabulary": [vocab_size],
        "no ids": [],
        "one of the lists is empty": [[1], []],
        "bad id in a list": [[1], [-2]],
        "fraction": [1.5],
        "whole fraction": [1.0],
        "bool": [True],
        "null id": [None],
        "mixed": ["a", 1],
        "nested": [[[1]]],
        "object": {"text": "a"},
        "null": None,
        "number": 3,
    }
    cases = [
        _case(f"prompt: {name}", COMPLETIONS, {"model": model, "prompt": value}, "prompt")
        for name, value in wrong.items()
    ]
    long = {"model": model, "prompt": [1] * (context - 3), "max_tokens": 10}
    cases.append(
        _case("too many tokens", COMPLETIONS, long, "max_tokens", code="context_length_exceeded")
    )
    longer = {"model": model, "prompt": [1] * (context + 1)}
    cases.append(
        _case("prompt too long", COMPLETIONS, longer, "prompt", code="context_length_exceeded")
    )
    return cases


def _sampling(model: str, vocab_size: int) -> list[Malformed]:
    wrong: list[tuple[str, Any]] = [
        ("n", 0),
        ("n", 1.5),
        ("n", 10**6),
        ("n", True),
        ("temperature", -1),
        ("temperature", 5),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2**64),
        ("min_p", -0.1),
        ("max_tokens", -5),
        ("max_tokens", 0),
        ("max_tokens", "16"),
        ("max_tokens", 2**100),
        ("min_tokens", -1),
        ("min_tokens", 10**9),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", ""),
        ("stop", 7),
        ("stop", [["a"]]),
        ("stop", ["a"] * 17),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("stop_token_ids", [vocab_size]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 3),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("best_of", 3),
    ]
    return [
        _case(
            f"{param}={value!r:.30}",
            COMPLETIONS,
            {"model": model, "prompt": "a", param: value},
            param,
        )
        for param, value in wrong
    ] + [
        _case("NaN", COMPLETIONS, {"model": model, "prompt": "a", "top_p": float("nan")}, "top_p"),
        _case(
            "echo of nothing more",
            COMPLETIONS,
            {"model": model, "prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1},
            "max_tokens",
        ),
        _case(
            "echo with logprobs",
            COMPLETIONS,
            {"model": model, "prompt": "a", "echo": True, "logprobs": 1},
            "echo",
            code="unsupported_parameter",
        ),
    ]


def _chats(model: str, context: int) -> list[Malformed]:
    turn = {"role": "user", "content": "a"}
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    wrong: list[tuple[str, Any, str]] = [
        ("no turns", [], "messages"),
        ("messages is a text", "hi", "messages"),
        ("empty turn", [{}], "messages[0].role"),
        ("unknown role", [turn, {"role": "bot", "content": "a"}], "messages[1].role"),
        ("content is a number", [{"role": "user", "content": 7}], "messages[0].content"),
        ("no content", [{"role": "user"}], "messages[0]"),
        ("null content", [{"role": "system", "content": None}], "messages[0]"),
        ("image", [{"role": "user", "content": [image]}], "messages[0].content"),
        ("part is a text", [{"role": "user", "content": ["a"]}], "messages[0].content"),
        ("part lacks text", [{"role": "user", "content": [{"type": "text"}]}],
         "messages[0].content"),
        ("turn is a text", ["hi"], "messages[0]"),
    ]  # fmt: skip
    cases = [
        _case(f"chat: {name}", CHAT, {"model": model, "messages": messages}, param)
        for name, messages, param in wrong
    ]
    more: list[tuple[str, Any, str]] = [
        ("top_logprobs", 21, "top_logprobs"),
        ("top_logprobs", 2, "top_logprobs"),
        ("logprobs", 1, "logprobs"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("max_completion_tokens", context + 1, "max_completion_tokens"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
        ("chat_template_kwargs", [], "chat_template_kwargs"),
    ]
    return cases + [
        _case(f"chat: {field}={value!r:.30}", CHAT,
              {"model": model, "messages": [turn], field: value}, param)
        for field, value, param in more
    ]  # fmt: skip


def _unsupported(model: str) -> list[Malformed]:
    everywhere: list[tuple[str, Any]] = [
        ("logit_bias", {"999999": 5}),
        ("logit_bias", "abc"),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -2),
        ("repetition_penalty", 1.1),
        ("response_format", {"type": "json_schema"}),
        ("guided_json", {}),
    ]
    in_chat: list[tuple[str, Any]] = [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
    ]
    completion = {"model": model, "prompt": "a"}
    chat = {"model": model, "messages": [{"role": "user", "content": "a"}]}
    rows = [
        *((COMPLETIONS, completion, field, value) for field, value in everywhere),
        (COMPLETIONS, completion, "suffix", "end"),
        *((CHAT, chat, field, value) for field, value in (*everywhere, *in_chat)),
    ]
    return [
        _case(
            f"{path} {field}={value!r:.30}",
            path,
            {**base, field: value},
            field,
            code="unsupported_parameter",
        )
        for path, base, field, value in rows
    ]


def _case(
    name: str,
    path: str,
    body: Any,
    param: str | None,
    *,
    status: int = 400,
    code: str | None = None,
) -> Malformed:
    raw = json.dumps(body).encode()
    return Malformed(name=name, path=path, body=raw, status=status, param=param, code=code)
