"""transformers, by the model's forward pass: cheaper than `generate`, and the same work."""

import inspect
from time import perf_counter

import torch
import transformers

from plait_bench.cases import Case, EngineOptions, Timing

# Newest first; a name that `forward` does not list would be swallowed in silence.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


class Transformers:
    """A model in eager mode, with its own cache."""

    def __init__(self, options: EngineOptions) -> None:
        if options.quantization or options.is_compiled or options.tensor_parallel_size > 1:
            raise ValueError("transformers runs eager, not quantised and on one rank only")
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(options.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype)
        ).eval()
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in parameters), None)
        if self._cache_name is None:
            names = ", ".join(_CACHE_NAMES)
            raise RuntimeError(f"{type(self._model).__name__}.forward takes none of {names}")
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    @torch.inference_mode()
    def time(self, case: Case, prompts: list[list[int]]) -> Timing:
        start = perf_counter()
        tokens, cache = self._forward(torch.tensor(prompts), None)
        first = perf_counter()
        for _ in range(case.num_steps):
            tokens, cache = self._forward(tokens, cache)
        return Timing(first_token_s=first - start, decode_s=perf_counter() - first)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens, cache = self._forward(torch.tensor([prompt]), None)
        drawn = [int(tokens)]
        while len(drawn) < num_tokens:
            tokens, cache = self._forward(tokens, cache)
            drawn.append(int(tokens))
        return drawn

    def _forward(self, tokens: torch.Tensor, cache: object | None) -> tuple[torch.Tensor, object]:
        """(B, L) -> the likeliest next token (B, 1), and the advanced cache."""
        past = {} if cache is None else {self._cache_name: cache}
        output = self._model(tokens, use_cache=True, logits_to_keep=1, **past)
        drawn = output.logits[:, -1].argmax(-1, keepdim=True)
        drawn[0, 0].item()  # the token is needed on the host
        return drawn, output[self._cache_name]


def create(options: EngineOptions) -> Transformers:
    return Transformers(options)
