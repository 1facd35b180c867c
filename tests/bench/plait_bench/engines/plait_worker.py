"""Plait, by the step loop that `LLM.generate` and the server run."""

import itertools
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import torch

from plait.cluster.llm import LLM, SamplingParams
from plait.cluster.request import RequestSpec, make_spec
from plait_bench.cases import Case, EngineOptions, Timing
from plait_bench.host_time import KernelTimer


class Plait:
    """A model in this process, or in rank processes for tensor parallelism."""

    def __init__(self, options: EngineOptions) -> None:
        torch.set_num_threads(options.threads)
        settings: dict[str, Any] = {
            "dtype": options.dtype,
            "device": "cpu",
            "max_model_len": options.max_tokens,
            "max_num_seqs": options.max_batch,
            "tensor_parallel_size": options.tensor_parallel_size,
            "threads_per_rank": options.threads,
        }
        if options.quantization is not None:
            settings["quantization"] = options.quantization
        self._llm = LLM(options.model, executor=options.executor, **settings)  # type: ignore[arg-type]
        self._ids = itertools.count()
        self.versions = {
            "plait": _own_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def time(self, case: Case, prompts: list[list[int]]) -> Timing:
        engine = self._llm.engine
        start = perf_counter()
        waiting = set()
        for prompt in prompts:
            spec = self._spec(prompt, case.num_steps + 1)
            engine.add(spec)
            waiting.add(spec.request_id)
        while waiting and engine.has_work:
            waiting -= {chunk.request_id for chunk in engine.step() if chunk.token_ids}
        if waiting:
            raise RuntimeError(f"{len(waiting)} sequences ended without a token")
        first = perf_counter()
        while engine.has_work:
            engine.step()
        return Timing(first_token_s=first - start, decode_s=perf_counter() - first)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return self._llm.generate([prompt], params)[0].outputs[0].token_ids

    def backends(self) -> dict[str, str]:
        """The backend of every kernel."""
        return dict(self._llm.model.backends)

    def host_time(self, case: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        """Seconds of the decode steps of a case, and how much of them was spent in kernels."""
        run = Case(**case)
        with KernelTimer() as timer:
            self.time(run, prompts)
            timing = self._timed_steps(run, prompts, timer.reset)
        kernels = {op: seconds / run.num_steps for op, seconds in timer.seconds.items()}
        return {"step_s": timing / run.num_steps, "kernels_s": kernels}

    def _timed_steps(
        self, case: Case, prompts: list[list[int]], started: Callable[[], None]
    ) -> float:
        engine = self._llm.engine
        for prompt in prompts:
            engine.add(self._spec(prompt, case.num_steps + 1))
        engine.step()
        started()
        start = perf_counter()
        while engine.has_work:
            engine.step()
        return perf_counter() - start

    def _spec(self, prompt: list[int], max_tokens: int) -> RequestSpec:
        return make_spec(
            SamplingParams(temperature=0, ignore_eos=True),
            request_id=f"bench-{next(self._ids)}",
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            eos_token_ids=(),
        )


def _own_version() -> str:
    try:
        return version("plait")
    except PackageNotFoundError:  # run out of the tree
        return "tree"


def create(options: EngineOptions) -> Plait:
    return Plait(options)
