"""From a `StepInput` to the tensors of one forward pass, and what a rank remembers by seat.

A batch holds the tokens of its prefill rows, packed, then one token of each decode row. The two
sorts are typed by the controller; nothing is guessed from a length.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plait.worker.plan import NULL_UNIT, CacheLayout
from plait.worker.protocol import NewSequence, PrefillRow, SamplingSpec, StepInput

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """R prefill rows with T packed tokens; block tables are by kv kind."""

    num_tokens: int
    cu_seqlens: torch.Tensor  # (R + 1,) int32
    context_lens: torch.Tensor  # (R,) int32: tokens already in the cache
    slots: torch.Tensor  # (R,) int64
    has_initial_state: torch.Tensor  # (R,) bool
    block_tables: tuple[torch.Tensor, ...]  # each (R, M) int64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """B decode rows of one token; `seq_lens` counts that token, 0 marks a null row."""

    num_tokens: int
    seq_lens: torch.Tensor  # (B,) int32
    slots: torch.Tensor  # (B,) int64
    block_tables: tuple[torch.Tensor, ...]  # each (B, M) int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Everything that layers read about a step. T = prefill tokens + decode rows."""

    token_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64
    token_slots: tuple[torch.Tensor, ...]  # by kv kind: (T,) int64, block * block_size + offset
    prefill: PrefillBatch | None
    decode: DecodeBatch | None
    logit_rows: torch.Tensor  # rows of T whose logits are wanted, int64
    sampled_seats: tuple[int, ...]  # the seat of each of those rows
    sampled_positions: tuple[int, ...]  # where the drawn token will stand


class SeatTable:
    """What a rank remembers of the sequences that run: tokens so far, blocks, slot, sampling.

    Host arrays are the truth for integers known to the controller; only the last drawn token lives
    on the device, so that a step can start before the previous one's tokens are read back.
    """

    def __init__(
        self, layout: CacheLayout, *, num_seats: int, max_model_len: int, device: torch.device
    ) -> None:
        self._device = device
        self._block_size = layout.block_size
        max_blocks = -(-max_model_len // layout.block_size)
        kinds = len(layout.kv_kinds)
        self._tables = np.full((kinds, num_seats, max_blocks), NULL_UNIT, dtype=np.int64)
        self._num_blocks = np.zeros((kinds, num_seats), dtype=np.int64)
        self._num_tokens = np.zeros(num_seats, dtype=np.int64)
        self._slots = np.full(num_seats, NULL_UNIT, dtype=np.int64)
        self._is_live = np.zeros(num_seats, dtype=np.bool_)
        self._generations: dict[int, int] = {}
        self.sampling = [SamplingSpec()] * num_seats
        self.last_tokens = torch.zeros(num_seats, dtype=torch.int64, device=device)

    def apply(self, step: StepInput) -> None:
        """Take over what `step` changes before it runs."""
        for new in step.new:
            self._seat(new)
        for growth in step.growth:
            start = self._num_blocks[growth.kind, growth.seat]
            stop = start + len(growth.block_ids)
            self._tables[growth.kind, growth.seat, start:stop] = growth.block_ids
            self._num_blocks[growth.kind, growth.seat] = stop
        for seat, token in step.set_tokens:
            self.last_tokens[seat] = token

    def batch(self, step: StepInput) -> Batch:
        """The tensors of `step`; afterwards every row counts its tokens as computed."""
        decode = np.asarray(step.decode, dtype=np.int64)
        starts = [row.start for row in step.prefill]
        lengths = [len(row.token_ids) for row in step.prefill]
        seats = np.concatenate(
            [np.repeat([row.seat for row in step.prefill], lengths).astype(np.int64), decode]
        )
        positions = np.concatenate(
            [
                *(np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)),
                self._num_tokens[decode],
            ]
        ).astype(np.int64)
        num_prefill = sum(lengths)
        token_ids = self._tensor(
            np.fromiter((t for row in step.prefill for t in row.token_ids), np.int64, num_prefill)
        )
        if len(decode):
            token_ids = torch.cat([token_ids, self.last_tokens[self._tensor(decode)]])
        logit_rows, sampled_seats, sampled_positions = self._wanted(step, lengths)
        batch = Batch(
            token_ids=token_ids,
            positions=self._tensor(positions),
            token_slots=tuple(
                self._tensor(
                    table[seats, positions // self._block_size] * self._block_size
                    + positions % self._block_size
                )
                for table in self._tables
            ),
            prefill=self._prefill(step.prefill, lengths) if step.prefill else None,
            decode=self._decode(decode) if len(decode) else None,
            logit_rows=self._tensor(np.asarray(logit_rows, dtype=np.int64)),
            sampled_seats=tuple(sampled_seats),
            sampled_positions=tuple(sampled_positions),
        )
        for row, length in zip(step.prefill, lengths, strict=True):
            self._num_tokens[row.seat] = row.start + length
        self._num_tokens[decode] += 1
        return batch

    def _seat(self, new: NewSequence) -> None:
        seat = new.seat
        served = self._generations.get(new.slot, 0)
        if new.slot != NULL_UNIT and new.generation <= served:
            raise ValueError(
                f"slot {new.slot} given to seat {seat} with generation {new.generation}, "
                f"but it has already served generation {served}"
            )
        self._generations[new.slot] = new.generation
        self._tables[:, seat] = NULL_UNIT
        self._num_blocks[:, seat] = 0
        self._num_tokens[seat] = 0
        self._slots[seat] = new.slot
        self._is_live[seat] = True
        self.sampling[seat] = new.sampling

    def _prefill(self, rows: tuple[PrefillRow, ...], lengths: list[int]) -> PrefillBatch:
        seats = np.asarray([row.seat for row in rows])
        starts = np.asarray([row.start for row in rows])
        ends = starts + np.asarray(lengths)
        return PrefillBatch(
            num_tokens=sum(lengths),
            cu_seqlens=self._tensor(np.cumsum([0, *lengths]).astype(np.int32)),
            context_lens=self._tensor(starts.astype(np.int32)),
            slots=self._tensor(self._slots[seats]),
            has_initial_state=self._tensor(starts > 0),
            block_tables=self._block_tables(seats, int(ends.max())),
        )

    def _decode(self, seats: IntArray) -> DecodeBatch:
        seq_lens = np.where(self._is_live[seats], self._num_tokens[seats] + 1, 0)
        return DecodeBatch(
            num_tokens=len(seats),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            slots=self._tensor(self._slots[seats]),
            block_tables=self._block_tables(seats, int(seq_lens.max())),
        )

    def _block_tables(self, seats: IntArray, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """The tables of `seats`, as wide as `num_tokens` tokens need."""
        width = -(-num_tokens // self._block_size)
        return tuple(self._tensor(table[seats, :width]) for table in self._tables)

    def _wanted(
        self, step: StepInput, lengths: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Which rows of the packed tokens give logits, and for which seat and position."""
        rows: list[int] = []
        seats: list[int] = []
        positions: list[int] = []
        end = 0
        for row, length in zip(step.prefill, lengths, strict=True):
            first = end if step.all_logits else end + length - 1
            end += length
            if row.sample or step.all_logits:
                rows += range(first, end)
                seats += [row.seat] * (end - first)
                positions += range(row.start + length - (end - first) + 1, row.start + length + 1)
        rows += range(end, end + len(step.decode))
        seats += step.decode
        positions += [int(self._num_tokens[seat]) + 1 for seat in step.decode]
        return rows, seats, positions

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
