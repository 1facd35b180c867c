"""One rank of a model: loads its slices, verifies the plan, owns the arena, runs steps."""

import dataclasses
import logging
import time
from collections.abc import Callable

import psutil
import torch

from plait.kernels.dispatch import NATIVE, chosen_backends
from plait.kernels.linear.packed import PackedWeight
from plait.kernels.moe.packed import PackedExperts
from plait.worker import protocol
from plait.worker.architectures import load_spec
from plait.worker.arena import Arena
from plait.worker.batch import Batch, SeatTable
from plait.worker.collectives import TensorParallel
from plait.worker.decoder import Decoder
from plait.worker.errors import PlanMismatch
from plait.worker.loader import Checkpoint, check_complete, load_parameters
from plait.worker.parameters import rank_parameters
from plait.worker.plan import check_layout, compare_sections, layout_sections
from plait.worker.replay import ReplayedDecode
from plait.worker.sampler import logprobs, sample, token_digest

logger = logging.getLogger(__name__)

# Of the device's free memory, what is left to activations and the allocator once weights stand.
_RESERVED_CUDA_BYTES = 1 << 30
_PROGRESS_PERIOD_S = 2.0


class Rank:
    """One tensor-parallel rank. Talks in `plait.worker.protocol` messages, knows no sockets."""

    def __init__(self, group: TensorParallel, *, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._decoder: Decoder | None = None
        self._arena: Arena | None = None
        self._forward: Callable[[Batch], torch.Tensor] | None = None

    def load(self, request: protocol.Load) -> protocol.Loaded:
        """Read the weights, build the layers, and compare them with the layout.

        Raises:
            PlanMismatch: the built layers differ from the layout; one line per difference.
            WeightsError: a tensor is missing, unexpected or has another shape.
        """
        self._arena = None
        self._decoder = None
        self._forward = None
        rank, tp = self._group.rank, self._group.size
        spec = dataclasses.replace(load_spec(request.model_path), dtype=request.dtype)
        layout = request.layout
        check_layout(layout)
        self._check_size(layout.tensor_parallel_size)
        parameters = rank_parameters(spec, tp=tp, rank=rank)
        checkpoint = Checkpoint(request.model_path)
        tied = (spec.names.head,) if spec.tie_embeddings else ()
        check_complete(checkpoint, parameters, tied=tied)
        weights: dict[str, torch.Tensor | PackedWeight | PackedExperts] = {}
        weights |= load_parameters(
            checkpoint,
            parameters,
            dtype=request.dtype,
            device=self._device,
            progress=_LoadProgress(rank, sum(parameter.numel for parameter in parameters)),
        )
        decoder = Decoder(
            spec,
            weights,
            layout,
            self._group,
            decodable_vocab_size=request.decodable_vocab_size,
            quantization=request.quantization,
            rounding_seed=request.rounding_seed,
        )
        differences = compare_sections(layout_sections(layout, rank=rank), decoder.sections())
        if differences:
            raise PlanMismatch(
                f"rank {rank} built other layers than the plan says:\n  " + "\n  ".join(differences)
            )
        self._decoder = decoder
        self._request = request
        free_bytes, total_bytes = self._memory()
        return protocol.Loaded(
            layout_digest=layout.digest,
            sections=decoder.sections(),
            weight_bytes=sum(value.nbytes for value in weights.values()),
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            backends=chosen_backends(self._device),
        )

    def allocate(self, request: protocol.Allocate) -> protocol.Ready:
        """Allocate the arena and run every shape class once on null rows.

        Raises:
            PlanMismatch: the plan's layout is not the one that was verified.
        """
        assert self._decoder is not None, "load comes first"
        plan = request.plan
        if plan.layout != self._request.layout:
            raise PlanMismatch(
                f"rank {self._group.rank} verified layout {self._request.layout.digest[:12]}, "
                f"but the plan holds {plan.layout.digest[:12]}"
            )
        self._arena = Arena(
            plan, self._group.rank, device=self._device, poison=self._request.debug_poison
        )
        self._decoder.bind(self._arena)
        self._forward = self._forward_pass(self._decoder)
        self._warm_up()
        self._seats = self._new_seats()
        return protocol.Ready(plan_digest=plan.digest, arena_bytes=plan.arena_bytes)

    @torch.inference_mode()
    def step(self, step: protocol.StepInput) -> protocol.StepOutput:
        """Advance every row of `step` and draw its tokens."""
        assert self._arena is not None, "load and allocate come first"
        assert self._forward is not None, "load and allocate come first"
        seats = self._seats
        for kind, units in step.poison.items():
            self._arena.poison_units(kind, units)
        seats.apply(step)
        batch = seats.batch(step)
        logits = self._forward(batch)
        specs = [seats.sampling[seat] for seat in batch.sampled_seats]
        best = logits.max(dim=-1)  # NaN where a row has one
        tokens = sample(logits, specs, batch.sampled_positions, likeliest=best.indices)
        if not step.all_logits:
            index = torch.tensor(batch.sampled_seats, dtype=torch.int64, device=self._device)
            seats.last_tokens[index] = tokens
        finite = best.values.isfinite().tolist()
        token_ids = tuple(tokens.tolist())
        if self._group.rank != 0:
            return protocol.StepOutput(step=step.step, token_digest=token_digest(token_ids))
        return protocol.StepOutput(
            step=step.step,
            token_ids=token_ids,
            finite=tuple(finite),
            logprobs=logprobs(logits, tokens, specs),
            token_digest=token_digest(token_ids),
            logits=logits.cpu().numpy().tobytes() if step.all_logits else b"",
        )

    def _forward_pass(self, decoder: Decoder) -> Callable[[Batch], torch.Tensor]:
        """The forward pass; where all kernels are C code, short decode steps are replayed."""
        if set(chosen_backends(self._device).values()) != {NATIVE.name}:
            return decoder.forward
        request = self._request
        width = -(-request.max_model_len // request.layout.block_size)
        return ReplayedDecode(
            decoder.forward,
            max_rows=request.max_num_seqs,
            table_widths=(width,) * len(request.layout.kv_kinds),
        )

    def _warm_up(self) -> None:
        """Run a prefill, a decode and a mixed batch on null rows, which touch no memory."""
        request = self._request
        self._seats = self._new_seats()
        tokens = (0,) * min(request.max_num_batched_tokens - 1, request.max_model_len - 1)
        prefill = protocol.PrefillRow(seat=0, start=0, token_ids=tokens or (0,), sample=True)
        decode = tuple(range(request.max_num_seqs))
        for step in (
            protocol.StepInput(step=-3, prefill=(prefill,)),
            protocol.StepInput(step=-2, decode=decode),
            protocol.StepInput(step=-1, prefill=(prefill,), decode=decode[-1:]),
        ):
            self.step(step)

    def _new_seats(self) -> SeatTable:
        request = self._request
        return SeatTable(
            request.layout,
            num_seats=request.max_num_seqs,
            max_model_len=request.max_model_len,
            device=self._device,
        )

    def _check_size(self, planned: int) -> None:
        if planned != self._group.size:
            raise PlanMismatch(
                f"rank {self._group.rank}: the plan is for tensor_parallel_size={planned}, "
                f"but {self._group.size} ranks run"
            )

    def _memory(self) -> tuple[int, int]:
        """Free and total bytes of what the arena will be taken from."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self._device)
            return max(0, free - _RESERVED_CUDA_BYTES), total
        memory = psutil.virtual_memory()
        return memory.available, memory.total


class _LoadProgress:
    """Logs how much of the weights is read, every few seconds."""

    def __init__(self, rank: int, total: int) -> None:
        self._rank = rank
        self._total = total
        self._done = 0
        self._next_s = time.monotonic() + _PROGRESS_PERIOD_S

    def __call__(self, numel: int) -> None:
        self._done += numel
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_PERIOD_S
            share = self._done / self._total
            logger.info("rank %d: %.0f %% of the weights read", self._rank, 100 * share)
