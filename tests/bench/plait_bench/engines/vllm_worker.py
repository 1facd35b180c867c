"""vLLM on CPU, by the step loop of its engine in this process. Caching of prefixes is off."""

import itertools
from time import perf_counter

import torch
import vllm
from vllm import LLM, SamplingParams

from plait_bench.cases import Case, EngineOptions, Timing


class Vllm:
    """An engine, eager or compiled; all prompts of a case fit into one of its steps."""

    def __init__(self, options: EngineOptions) -> None:
        if options.quantization or options.tensor_parallel_size > 1:
            raise ValueError("vLLM is measured without quantisation and on one rank only")
        self._llm = LLM(
            model=options.model,
            dtype=options.dtype,
            max_model_len=options.max_tokens,
            max_num_seqs=options.max_batch,
            max_num_batched_tokens=4096,
            enforce_eager=not options.is_compiled,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        if torch.get_num_threads() != options.threads:
            raise RuntimeError(
                f"vLLM set {torch.get_num_threads()} threads, expected {options.threads}"
            )
        self._ids = itertools.count()
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}

    def time(self, case: Case, prompts: list[list[int]]) -> Timing:
        engine = self._llm.llm_engine
        start = perf_counter()
        for prompt in prompts:
            params = _greedy(case.num_steps + 1)
            engine.add_request(f"bench-{next(self._ids)}", {"prompt_token_ids": prompt}, params)
        started: set[str] = set()
        while len(started) < len(prompts) and engine.has_unfinished_requests():
            outputs = engine.step()
            started |= {output.request_id for output in outputs if output.outputs[0].token_ids}
        if len(started) < len(prompts):
            raise RuntimeError(f"vLLM started {len(started)} of {len(prompts)} sequences")
        first = perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return Timing(first_token_s=first - start, decode_s=perf_counter() - first)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        output = self._llm.generate(
            {"prompt_token_ids": prompt}, _greedy(num_tokens), use_tqdm=False
        )
        return list(output[0].outputs[0].token_ids)


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def create(options: EngineOptions) -> Vllm:
    return Vllm(options)
