"""The bodies that clients send, with OpenAI's names, and vLLM's for what OpenAI lacks.

Types are strict: "1" is no number and 1.0 no integer. Unknown fields are ignored, since clients
send ever new ones; a known field that would change the reply and is not supported is refused,
unless it has the value that changes nothing.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from plait.cluster.errors import ParameterError, RequestError
from plait.cluster.request import MAX_LOGPROBS, SamplingParams

MAX_STOPS = 16
_Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[int, Field(ge=1, le=2**63 - 1)]

# Field -> values that change nothing, besides null.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
}
_UNSUPPORTED_IN_COMPLETIONS: dict[str, tuple[object, ...]] = {"suffix": ("",)}
_UNSUPPORTED_IN_CHAT: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
}


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Model):
    """`include_usage` asks for a last chunk with the usage."""

    include_usage: bool | None = None


class GenerationBody(_Model):
    """What both endpoints share. Absent and null mean the same: OpenAI's default."""

    model: str
    n: _Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: list[str] | None = None
    seed: _Int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: _Int | None = None
    min_p: float | None = None
    max_tokens: _Count | None = None
    min_tokens: _Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[_Int] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError("must be a non-empty text or a list of them")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"has {len(stops)} texts; at most {MAX_STOPS} are allowed")
        return stops

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "is only allowed with stream=true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def asked_max_tokens(self) -> int | None:
        """The limit that the client sets on the output."""
        return self.max_tokens

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to show beside the drawn one; None shows neither."""

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """The checked parameters, for an output of at most `max_tokens`."""
        names = ("n", "seed", "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.num_logprobs,
        )


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. The prompt is checked by `prompts`."""

    prompt: Any
    echo: bool | None = None
    best_of: _Int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:  # noqa: ANN401 - any JSON
        return _refuse(body, _UNSUPPORTED | _UNSUPPORTED_IN_COMPLETIONS)

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionBody":
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            raise _not_supported("best_of", f"other than n={n}")
        if self.echo and self.logprobs is not None:
            raise _not_supported("echo", "together with logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class Message(_Model):
    """One turn. Lists of text parts are joined by line breaks, as vLLM does."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: object) -> object:
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise ValueError("must be a text or a list of text parts")
        return "\n".join(_part_text(i, part) for i, part in enumerate(content))

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        return {**self.model_dump(exclude_none=True), "content": self.content or ""}


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`. `max_completion_tokens` outranks `max_tokens`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:  # noqa: ANN401 - any JSON
        return _refuse(body, _UNSUPPORTED | _UNSUPPORTED_IN_CHAT)

    @model_validator(mode="after")
    def _check_together(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs", "needs logprobs=true")
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        asked = self.max_completion_tokens
        return self.max_tokens if asked is None else asked

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _part_text(i: int, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise ValueError(f"part {i} is {kind!r:.80}; only parts of type 'text' are supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"part {i} has no text")
    return text


def _refuse(body: Any, unsupported: Mapping[str, tuple[object, ...]]) -> Any:  # noqa: ANN401
    if isinstance(body, dict):
        for name, neutral in unsupported.items():
            value = body.get(name)
            if value is not None and value not in neutral:
                raise _not_supported(name)
    return body


def _not_supported(name: str, detail: str = "") -> RequestError:
    message = f"{name} {detail}".rstrip() + " is not supported by this server"
    return RequestError(message, param=name, code="unsupported_parameter")
