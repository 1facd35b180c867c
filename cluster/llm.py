"""Offline generation without a server and without Ray.

A script for vLLM's offline API ports by its import: `LLM(path, tensor_parallel_size=2)`, then
`generate(prompts, sampling_params)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from plait.cluster.controller import StartedModel, start_model
from plait.cluster.devices import num_cuda_devices, resolve_device
from plait.cluster.engine import Engine
from plait.cluster.errors import ContextLengthError, ParameterError, RequestError
from plait.cluster.executors.base import Executor
from plait.cluster.request import (
    FinishReason,
    RequestSpec,
    SamplingParams,
    TokenChunk,
    make_spec,
)
from plait.cluster.settings import EngineSettings, engine_settings
from plait.cluster.text import TextStream
from plait.cluster.tokenizer import Tokenizer

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of a token under the raw model, and its text."""

    logprob: float
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One continuation. `logprobs` has an entry per token: the drawn one and the likeliest."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its continuations."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """A model in this process (one rank) or in local rank processes (several).

    Args:
        model: checkpoint folder.
        executor: where ranks run; default is inline for one rank, processes for more.
        options: fields of `EngineSettings`, named as the flags of `plait serve`.
    Raises:
        PlaitError: what is wrong with options, config, memory or weights.
    """

    def __init__(
        self,
        model: str,
        *,
        executor: Literal["inline", "process"] | None = None,
        **options: Any,  # noqa: ANN401 - checked against EngineSettings, unknown names refused
    ) -> None:
        settings = engine_settings(options)
        device = resolve_device(
            settings.device,
            tensor_parallel_size=settings.tensor_parallel_size,
            available=num_cuda_devices(),
        )
        self.tokenizer = Tokenizer(model)
        self._seed = settings.seed
        self._num_requests = 0
        self._executor = _create_executor(executor, settings, device)
        try:
            self.model: StartedModel = start_model(
                self._executor,
                model,
                settings,
                device=device,
                decodable_vocab_size=self.tokenizer.vocab_size,
            )
        except BaseException:
            self._executor.shutdown()
            raise
        self.engine = Engine(
            self._executor,
            self.model,
            depth=2 if device == "cuda" else 1,
            debug_poison=settings.debug_poison,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or a list of token ids.

        `sampling_params` is one for all, or one each. All prompts are checked before any runs.

        Raises:
            RequestError: a prompt or a parameter cannot be used; says which.
        """
        batch = _as_list(prompts)
        params = _as_params(sampling_params, len(batch))
        runs = [self._prepare(prompt, param) for prompt, param in zip(batch, params, strict=True)]
        self._run([continuation for run in runs for continuation in run.continuations])
        return [run.result() for run in runs]

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Answer one conversation through the model's chat template."""
        ids = self.tokenizer.apply_chat_template(messages)
        return self.generate([ids], sampling_params)[0]

    def close(self) -> None:
        """End the ranks. The object cannot be used afterwards."""
        self._executor.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> "_Run":
        if not isinstance(prompt, Sequence):
            raise ParameterError("prompt", f"must be a text or a list of token ids, not {prompt!r}")
        if not isinstance(params, SamplingParams):
            raise ParameterError("sampling_params", f"must be SamplingParams, not {params!r}")
        ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        vocab_size = self.model.spec.vocab_size
        if not ids:
            raise ParameterError("prompt", "is empty")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ParameterError("prompt", f"{token!r} is not a token id below {vocab_size}")
        limit = self.engine.scheduler.max_request_tokens
        max_tokens = limit - len(ids) if params.max_tokens is None else params.max_tokens
        if max_tokens < 1 or len(ids) + max_tokens > limit:
            raise ContextLengthError(
                f"a prompt of {len(ids)} tokens and up to {max(1, max_tokens)} output tokens do "
                f"not fit: at most {limit} tokens do",
                param="prompt",
            )
        run = _Run(prompt if isinstance(prompt, str) else None, ids)
        for index in range(params.n):
            self._num_requests += 1
            spec = make_spec(
                params,
                request_id=f"offline-{self._num_requests}",
                prompt_token_ids=ids,
                max_tokens=max_tokens,
                eos_token_ids=self.tokenizer.eos_token_ids,
                index=index,
                default_seed=self._seed,
            )
            run.continuations.append(_Continuation(spec, index, params, self.tokenizer))
        return run

    def _run(self, continuations: list["_Continuation"]) -> None:
        """Step until every continuation has ended; whatever happens, none stays behind."""
        open_ones = {continuation.request_id: continuation for continuation in continuations}
        try:
            for continuation in continuations:
                self.engine.add(continuation.spec)
            while open_ones:
                for chunk in self.engine.step():
                    taker = open_ones.get(chunk.request_id)
                    if taker is not None and taker.take(chunk):
                        self.engine.abort(chunk.request_id)
                        del open_ones[chunk.request_id]
        finally:
            for request_id in open_ones:
                self.engine.abort(request_id)


class _Continuation:
    """Collects the tokens and the text of one request."""

    def __init__(
        self, spec: RequestSpec, index: int, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, stop=params.stop_texts)
        self.output = CompletionOutput(
            index=index, logprobs=None if params.logprobs is None else []
        )

    def take(self, chunk: TokenChunk) -> bool:
        """Add a chunk; True once the continuation has ended."""
        output = self.output
        if chunk.error is not None:
            raise RequestError(chunk.error)
        output.token_ids += chunk.token_ids
        output.text += self._text.push(chunk.token_ids)
        if output.logprobs is not None:
            for token, entry in zip(chunk.token_ids, chunk.logprobs, strict=True):
                output.logprobs.append(
                    {
                        id_: Logprob(logprob=value, decoded_token=self._tokenizer.token_text(id_))
                        for id_, value in ((token, entry.logprob), *entry.top)
                    }
                )
        if self._text.stopped is not None:
            output.finish_reason = "stop"
        elif chunk.finish_reason is not None:
            output.text += self._text.finish()
            output.finish_reason = "stop" if self._text.stopped else chunk.finish_reason
        return output.finish_reason is not None


class _Run:
    """The continuations of one prompt."""

    def __init__(self, prompt: str | None, ids: tuple[int, ...]) -> None:
        self._prompt = prompt
        self._ids = ids
        self.continuations: list[_Continuation] = []

    def result(self) -> RequestOutput:
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=list(self._ids),
            outputs=[continuation.output for continuation in self.continuations],
        )


def _create_executor(
    kind: Literal["inline", "process"] | None, settings: EngineSettings, device: str
) -> Executor:
    # The ranks import torch: only here, so that settings and errors come without it.
    from plait.cluster.executors.inline import InlineExecutor
    from plait.cluster.executors.process import ProcessExecutor

    size = settings.tensor_parallel_size
    if kind is None:
        kind = "inline" if size == 1 else "process"
    if kind == "inline" and size > 1:
        raise ParameterError("executor", f"inline runs one rank, not {size}: use process")
    if kind == "inline":
        return InlineExecutor(device=device)
    if kind == "process":
        return ProcessExecutor(
            size=size,
            device=device,
            threads_per_rank=settings.threads_per_rank,
            load_timeout_s=settings.load_timeout_s,
            step_timeout_s=settings.step_timeout_s,
        )
    raise ParameterError("executor", f"must be inline or process, not {kind!r}")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, as text or ids, or a list of prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise ParameterError("sampling_params", f"must be SamplingParams, not {params!r}")
    if len(params) != count:
        raise ParameterError("sampling_params", f"{len(params)} for {count} prompts")
    return list(params)
