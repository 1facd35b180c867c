"""One request on its way: what the user asks, what the engine gets, what comes back.

`SamplingParams` is the public form, also of the offline `LLM`. `RequestSpec` is complete: with it
and the tokens so far, any replica can carry the request on.
"""

import secrets
from dataclasses import dataclass
from typing import Literal

import msgspec

from plait.cluster.errors import ParameterError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20
_MAX_SEED = 2**63 - 1
_MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt.

    Args:
        n: how many continuations.
        temperature: 0 is greedy.
        top_p: smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: only the k likeliest tokens; 0 or -1 is no limit.
        min_p: only tokens at least this share as likely as the likeliest, in [0, 1].
        seed: same seed, same tokens, whatever else runs; None draws one.
        max_tokens: how many tokens at most; None is up to the context length.
        min_tokens: no end of sequence before so many tokens.
        stop: texts before which the output ends; they are not part of it.
        stop_token_ids: ids at which the output ends, besides those of the model.
        ignore_eos: go on past the end-of-sequence ids of the model.
        logprobs: log-probabilities of the drawn token and of so many likeliest ones.
    Raises:
        ParameterError: names the field, what it may be and what it was.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._number("temperature", low=0.0, high=100.0)
        self._number("top_p", low=0.0, high=1.0, above=True)
        self._number("min_p", low=0.0, high=1.0)
        self._integer("n", low=1, high=128)
        self._integer("top_k", low=-1, high=_MAX_ID)
        self._integer("min_tokens", low=0)
        self._integer("max_tokens", low=1, optional=True)
        self._integer("seed", low=-_MAX_SEED - 1, high=_MAX_SEED, optional=True)
        self._integer("logprobs", low=0, high=MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        if not isinstance(self.stop, str | list | tuple | None) or any(
            not isinstance(text, str) or not text for text in self.stop_texts
        ):
            raise ParameterError("stop", "must be a non-empty text or a list of them")
        if not isinstance(self.stop_token_ids, list | tuple | None):
            raise ParameterError("stop_token_ids", "must be a list of token ids")
        for token in self.stop_token_ids or ():
            is_id = isinstance(token, int) and not isinstance(token, bool)
            if not is_id or not 0 <= token <= _MAX_ID:
                raise ParameterError("stop_token_ids", f"{token!r} is not a token id")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _number(self, name: str, *, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ParameterError(name, f"must be a number, not {value!r}")
        if not low <= value <= high or (above and value == low):  # neither holds for NaN
            bracket = "(" if above else "["
            raise ParameterError(name, f"must lie in {bracket}{low:g}, {high:g}], not {value!r}")

    def _integer(
        self, name: str, *, low: int, high: int | None = None, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise ParameterError(name, f"must be an integer, not {value!r}")
        if value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ParameterError(name, f"must be {limit}, not {value}")


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A single continuation as the engine runs it.

    `output_token_ids` are tokens that an earlier attempt already delivered. `seed` is always
    given, so that another attempt draws the same tokens.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    attempt: int = 0
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int
    stop_token_ids: tuple[int, ...] = ()  # those of the model included, unless ignored
    num_logprobs: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of a drawn token under the raw model, and of the likeliest ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request that became known together; `index` is that of the first.

    The last chunk has a finish reason, and may be empty. A stop token is not part of the tokens.
    """

    request_id: str
    attempt: int = 0
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


def derive_seed(seed: int | None, index: int) -> int:
    """The seed of continuation `index`: the first one's is `seed` itself, or drawn if None."""
    if seed is None:
        return secrets.randbits(63)
    return (seed + index * 0x9E3779B97F4A7C15) % (1 << 63) if index else seed


def make_spec(
    params: SamplingParams,
    *,
    request_id: str,
    prompt_token_ids: tuple[int, ...],
    max_tokens: int,
    eos_token_ids: tuple[int, ...],
    index: int = 0,
    default_seed: int | None = None,
) -> RequestSpec:
    """Continuation `index` of a prompt; `max_tokens` has been fitted to the context already.

    `default_seed` stands in where the request brings no seed.
    """
    stop_ids = (*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids))
    return RequestSpec(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        temperature=float(params.temperature),
        top_k=max(0, params.top_k),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seed=derive_seed(default_seed if params.seed is None else params.seed, index),
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        num_logprobs=params.logprobs,
    )
