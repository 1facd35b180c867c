"""Drives ranks at the worker's own interface: teacher-forced, in any pieces and batches."""

from typing import Literal

import numpy as np
import torch

from plait.cluster.executors.base import Executor
from plait.cluster.pages import PageAllocator, Slot
from plait.cluster.planner import pages_for, plan_layout
from plait.worker import protocol
from plait.worker.architectures import load_spec
from plait.worker.dtypes import CacheDtypes
from plait.worker.plan import CachePlan

FLOAT32 = CacheDtypes(kv="float32", conv="float32", ssm="float32")


class RankDriver:
    """A model loaded on an executor, with sequences that a test feeds token by token or in chunks.

    `feed` takes what each sequence gets in one step and returns the logits of every position.
    """

    def __init__(
        self,
        executor: Executor,
        model_path: str,
        *,
        dtype: str = "float32",
        dtypes: CacheDtypes = FLOAT32,
        max_num_seqs: int = 16,
        max_model_len: int = 512,
        debug_poison: bool = True,
        quantization: Literal["int8"] | None = None,
    ) -> None:
        self._executor = executor
        spec = load_spec(model_path)
        self.vocab_size = spec.vocab_size
        layout = plan_layout(spec, tp=executor.tensor_parallel_size, dtypes=dtypes)
        plan = CachePlan(
            layout=layout, num_pages=1 + pages_for(layout, max_num_seqs, max_model_len)
        )
        self.loaded = executor.load(
            protocol.Load(
                model_path=model_path,
                layout=layout,
                dtype=dtype,
                decodable_vocab_size=spec.vocab_size,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=64,
                debug_poison=debug_poison,
                quantization=quantization,
            )
        )
        executor.allocate(protocol.Allocate(plan=plan))
        self._layout = layout
        self._allocator = PageAllocator(plan)
        self._seats: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._num_blocks: dict[str, int] = {}
        self._free_seats = list(range(max_num_seqs))
        self._units: dict[str, tuple[Slot | None, list[list[int]]]] = {}
        self._step = 0

    def feed(
        self, prefill: dict[str, list[int]], decode: dict[str, int] | None = None
    ) -> dict[str, torch.Tensor]:
        """One step: chunks for `prefill` sequences (new or known), one token for `decode` ones."""
        decode = decode or {}
        new, growth, rows = [], [], []
        for name, tokens in prefill.items():
            if name not in self._seats:
                new.append(self._start(name))
            growth += self._grow(name, len(tokens))
            rows.append(
                protocol.PrefillRow(
                    seat=self._seats[name],
                    start=self._lengths[name],
                    token_ids=tuple(tokens),
                    sample=True,
                )
            )
            self._lengths[name] += len(tokens)
        for name in decode:
            growth += self._grow(name, 1)
            self._lengths[name] += 1
        self._step += 1
        self._executor.submit(
            protocol.StepInput(
                step=self._step,
                new=tuple(new),
                growth=tuple(growth),
                prefill=tuple(rows),
                decode=tuple(self._seats[name] for name in decode),
                set_tokens=tuple((self._seats[name], token) for name, token in decode.items()),
                all_logits=True,
            )
        )
        output = self._executor.collect()
        logits = torch.from_numpy(np.frombuffer(output.logits, dtype=np.float32).copy())
        counts = [len(tokens) for tokens in prefill.values()] + [1] * len(decode)
        parts = logits.view(-1, self.vocab_size).split(counts)
        return dict(zip([*prefill, *decode], parts, strict=True))

    def end(self, name: str) -> None:
        """Give back what a sequence holds."""
        slot, blocks = self._units.pop(name)
        if slot is not None:
            self._allocator.free_slot(slot)
        for kind, ids in enumerate(blocks):
            self._allocator.free_blocks(kind, ids)
        self._free_seats.append(self._seats.pop(name))

    def run(self, name: str, tokens: list[int], *, prompt: int, piece: int) -> torch.Tensor:
        """Prefill `prompt` tokens in pieces, then decode the rest one by one; all logits."""
        parts = []
        for start in range(0, prompt, piece):
            stop = min(prompt, start + piece)
            parts.append(self.feed({name: tokens[start:stop]})[name])
        for token in tokens[prompt:]:
            parts.append(self.feed({}, {name: token})[name])
        self.end(name)
        return torch.cat(parts)

    def _start(self, name: str) -> protocol.NewSequence:
        slot = self._allocator.allocate_slot() if self._layout.state_kind else None
        self._units[name] = (slot, [[] for _ in self._layout.kv_kinds])
        self._seats[name] = self._free_seats.pop()
        self._lengths[name] = 0
        return protocol.NewSequence(
            seat=self._seats[name],
            slot=slot.id if slot else 0,
            generation=slot.generation if slot else 0,
            sampling=protocol.SamplingSpec(),
        )

    def _grow(self, name: str, count: int) -> list[protocol.Growth]:
        needed = -(-(self._lengths[name] + count) // self._layout.block_size)
        growth = []
        for kind, held in enumerate(self._units[name][1]):
            ids = self._allocator.allocate_blocks(kind, needed - len(held))
            assert ids is not None
            held += ids
            growth.append(protocol.Growth(seat=self._seats[name], kind=kind, block_ids=tuple(ids)))
        return growth
