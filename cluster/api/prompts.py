"""From a checked body to what the engine gets: token ids that fit, one request per choice."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.cluster.api.engine import ModelInfo
from plait.cluster.api.schema import ChatBody, CompletionBody, GenerationBody
from plait.cluster.errors import ContextLengthError, ParameterError, UnknownModelError
from plait.cluster.request import RequestSpec, make_spec
from plait.cluster.tokenizer import Tokenizer

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for completions; a chat fills the context


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids, and the text that a client who asks for an echo gets back."""

    token_ids: tuple[int, ...]
    echo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompter:
    """Checks prompts against one model.

    Args:
        default_seed: seed of requests that bring none; None draws one.
        max_choices: continuations, over all prompts, that one HTTP request may ask for.
    """

    tokenizer: Tokenizer
    model: ModelInfo
    default_seed: int | None = None
    max_choices: int = 256

    def completion(self, body: CompletionBody) -> list[Prompt]:
        """The prompts of a completion: a text, texts, token ids, or lists of token ids."""
        self._check_model(body)
        values = _split_prompts(body.prompt)
        self._check_choices(body, len(values), "prompt")
        prompts = []
        for value in values:
            is_text = isinstance(value, str)
            ids = self.tokenizer.encode(value) if is_text else value
            token_ids = self._check_ids(ids, "prompt")
            echo = ""
            if body.echo:
                echo = value if is_text else self.tokenizer.decode(token_ids)
            prompts.append(Prompt(token_ids=token_ids, echo=echo))
        return prompts

    def chat(self, body: ChatBody) -> list[Prompt]:
        """The prompt of a chat, through the model's template."""
        self._check_model(body)
        self._check_choices(body, 1, "n")
        ids = self.tokenizer.apply_chat_template(
            [message.for_template() for message in body.messages],
            template_kwargs=body.chat_template_kwargs,
        )
        return [Prompt(token_ids=self._check_ids(ids, "messages"))]

    def specs(
        self, body: GenerationBody, prompts: Sequence[Prompt], request_id: str
    ) -> tuple[RequestSpec, ...]:
        """One request per choice: the `n` of the first prompt, then those of the next."""
        self._check_stop_ids(body.stop_token_ids)
        specs: list[RequestSpec] = []
        for prompt in prompts:
            max_tokens = self._fit_output(body, len(prompt.token_ids))
            params = body.sampling_params(max_tokens)
            for index in range(params.n):
                spec = make_spec(
                    params,
                    request_id=f"{request_id}-{len(specs)}",
                    prompt_token_ids=prompt.token_ids,
                    max_tokens=max_tokens,
                    eos_token_ids=self.tokenizer.eos_token_ids,
                    index=index,
                    default_seed=self.default_seed,
                )
                specs.append(spec)
        return tuple(specs)

    def _check_model(self, body: GenerationBody) -> None:
        if body.model != self.model.name:
            raise UnknownModelError(body.model, self.model.name)

    def _check_choices(self, body: GenerationBody, num_prompts: int, param: str) -> None:
        n = 1 if body.n is None else body.n
        if n > 1 and num_prompts == 1:
            param = "n"
        if num_prompts * n > self.max_choices:
            raise ParameterError(
                param, f"{num_prompts} prompts with n={n} are more than {self.max_choices} choices"
            )

    @property
    def _vocab_size(self) -> int:
        known = self.tokenizer.vocab_size
        return known if self.model.vocab_size is None else min(known, self.model.vocab_size)

    def _check_ids(self, ids: Sequence[Any], param: str) -> tuple[int, ...]:
        if not ids:
            raise ParameterError(param, "has no tokens")
        limit = self._vocab_size
        for value in ids:
            if type(value) is not int or not 0 <= value < limit:
                raise ParameterError(
                    param, f"{value!r:.40} is not a token id; they go from 0 to {limit - 1}"
                )
        return tuple(ids)

    def _check_stop_ids(self, ids: Sequence[int] | None) -> None:
        for value in ids or ():
            if not 0 <= value < self._vocab_size:
                raise ParameterError(
                    "stop_token_ids", f"{value} is not a token id below {self._vocab_size}"
                )

    def _fit_output(self, body: GenerationBody, num_prompt: int) -> int:
        """How many tokens the output may have; what was asked for is never cut silently."""
        asked = body.asked_max_tokens
        limit, what = self.model.max_model_len, "this model's maximum context length is"
        if self.model.max_request_tokens < limit:
            limit, what = self.model.max_request_tokens, "the cache of this server holds at most"
        room = limit - num_prompt
        if room < 1 or (asked is not None and asked > room):
            output = "at least 1" if asked is None else f"{asked}"
            raise ContextLengthError(
                f"{what} {limit} tokens per request, but you asked for "
                f"{num_prompt + (asked or 1)}: {num_prompt} in the prompt and {output} for the "
                "output",
                param=_blame(body, room),
            )
        if asked is not None:
            return asked
        return room if isinstance(body, ChatBody) else min(_DEFAULT_COMPLETION_TOKENS, room)


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def _blame(body: GenerationBody, room: int) -> str:
    if room < 1:
        return "messages" if isinstance(body, ChatBody) else "prompt"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "max_tokens"


def _split_prompts(value: Any) -> list[Any]:  # noqa: ANN401 - any JSON
    """A list of prompts, each a text or a list of what should be ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ParameterError("prompt", "must be a text, a list of texts, or lists of token ids")
    if not value:
        raise ParameterError("prompt", "is empty")
    kinds = {type(entry) for entry in value}
    if kinds in ({str}, {list}):
        return value
    if kinds & {str, list, dict}:
        raise ParameterError("prompt", "mixes texts, token ids and lists")
    return [value]
