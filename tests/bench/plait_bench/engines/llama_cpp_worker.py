"""llama.cpp, by its C interface, so that a batch of sequences is one batch of its own.

The model is a GGUF file; the most likely token is taken from the logits with numpy.
"""

import ctypes
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np

from plait_bench.cases import Case, EngineOptions, Timing

_BATCH = 2048
_UBATCH = 512
_CONTEXT_STEP = 256


class LlamaCpp:
    """A model with a context per batch size: sequences keep their keys and values apart."""

    def __init__(self, options: EngineOptions) -> None:
        if options.is_compiled or options.tensor_parallel_size > 1:
            raise ValueError("llama.cpp is measured on one rank only")
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            options.model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {options.model}")
        self._options = options
        self._contexts: dict[tuple[int, int], Any] = {}
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        system = llama_cpp.llama_print_system_info().decode()
        self.versions = {"llama-cpp-python": llama_cpp.__version__, "features": system.strip()}

    def time(self, case: Case, prompts: list[list[int]]) -> Timing:
        self._open(case.batch, case.prompt_tokens + case.num_steps + 1)
        start = perf_counter()
        tokens = self._prefill(prompts)
        first = perf_counter()
        for step in range(case.num_steps):
            tokens = self._decode(tokens, case.prompt_tokens + step)
        return Timing(first_token_s=first - start, decode_s=perf_counter() - first)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        self._open(1, len(prompt) + num_tokens)
        drawn = self._prefill([prompt])
        while len(drawn) < num_tokens:
            drawn += self._decode(drawn[-1:], len(prompt) + len(drawn) - 1)
        return drawn

    def _open(self, batch: int, num_tokens: int) -> None:
        """Take an empty context for so many sequences of so many tokens."""
        num_tokens += -num_tokens % _CONTEXT_STEP
        if (batch, num_tokens) not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = batch * num_tokens
            params.n_seq_max = batch
            params.n_batch = _BATCH
            params.n_ubatch = _UBATCH
            params.n_threads = params.n_threads_batch = self._options.threads
            context = llama_cpp.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"llama.cpp creates no context for {batch} sequences")
            self._contexts[batch, num_tokens] = context
        self._context = self._contexts[batch, num_tokens]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """All prompts in one batch; the next token of each."""
        batch, row = self._batch, 0
        last_rows = []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                is_last = position == len(prompt) - 1
                self._set(row, token, position, sequence, wants_logits=is_last)
                row += 1
            last_rows.append(row - 1)
        batch.n_tokens = row
        return self._run(last_rows)

    def _decode(self, tokens: list[int], position: int) -> list[int]:
        """One token of every sequence; the next one of each."""
        for sequence, token in enumerate(tokens):
            self._set(sequence, token, position, sequence, wants_logits=True)
        self._batch.n_tokens = len(tokens)
        return self._run(list(range(len(tokens))))

    def _set(
        self, row: int, token: int, position: int, sequence: int, *, wants_logits: bool
    ) -> None:
        batch = self._batch
        batch.token[row] = token
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence
        batch.logits[row] = wants_logits

    def _run(self, rows: list[int]) -> list[int]:
        if status := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode gives {status}")
        shape = (self._vocab_size,)
        return [
            int(
                np.ctypeslib.as_array(
                    ctypes.cast(
                        llama_cpp.llama_get_logits_ith(self._context, row),
                        ctypes.POINTER(ctypes.c_float),
                    ),
                    shape=shape,
                ).argmax()
            )
            for row in rows
        ]


def create(options: EngineOptions) -> LlamaCpp:
    return LlamaCpp(options)
