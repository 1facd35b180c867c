"""Decode steps recorded once per number of rows and replayed: no Python per layer.

The counterpart of a CUDA graph for kernels on the CPU.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from plait.kernels.native import MemoryPool, Recording, record
from plait.worker.batch import Batch, DecodeBatch

logger = logging.getLogger(__name__)

# Beyond, a step takes so long that the time of the host does not count.
MOST_ROWS: Final = 32


class ReplayedDecode:
    """The forward pass, with decode steps of few rows replayed.

    Recordings read their inputs from one set of tensors and share their memory, so the logits of a
    step are valid until the next one.
    """

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        *,
        max_rows: int,
        table_widths: tuple[int, ...],
    ) -> None:
        self._forward = forward
        rows = min(max_rows, MOST_ROWS)
        self._inputs = _null_rows(rows, table_widths)
        self._pool = MemoryPool()
        self._recordings: dict[int, tuple[Recording, torch.Tensor]] = {}
        self._most_rows = rows

    def __call__(self, batch: Batch) -> torch.Tensor:
        """As `Decoder.forward`."""
        rows = len(batch.token_ids)
        if batch.prefill is not None or rows > self._most_rows:
            return self._forward(batch)
        inputs = _first_rows(self._inputs, rows)
        _fill(inputs, batch)
        if (found := self._recordings.get(rows)) is not None:
            recording, logits = found
            recording.replay()
            return logits
        with record(self._pool) as recording:
            logits = self._forward(inputs)
        if recording.obstacle is None:
            self._recordings[rows] = recording, logits
        else:
            logger.info("decode steps cannot be replayed: %s", recording.obstacle)
            self._most_rows = 0
        return logits


def _null_rows(rows: int, table_widths: tuple[int, ...]) -> Batch:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return Batch(
        token_ids=zeros(rows),
        positions=zeros(rows),
        token_slots=tuple(zeros(rows) for _ in table_widths),
        prefill=None,
        decode=DecodeBatch(
            num_tokens=rows,
            seq_lens=zeros(rows, dtype=torch.int32),
            slots=zeros(rows),
            block_tables=tuple(zeros(rows, width) for width in table_widths),
        ),
        logit_rows=torch.arange(rows),
        sampled_seats=(),
        sampled_positions=(),
    )


def _first_rows(batch: Batch, rows: int) -> Batch:
    """Views of the first rows."""
    decode = batch.decode
    assert decode is not None
    return replace(
        batch,
        token_ids=batch.token_ids[:rows],
        positions=batch.positions[:rows],
        token_slots=tuple(slots[:rows] for slots in batch.token_slots),
        decode=DecodeBatch(
            num_tokens=rows,
            seq_lens=decode.seq_lens[:rows],
            slots=decode.slots[:rows],
            block_tables=tuple(table[:rows] for table in decode.block_tables),
        ),
        logit_rows=batch.logit_rows[:rows],
    )


def _fill(target: Batch, source: Batch) -> None:
    """Copy a decode batch; block tables keep their width, and only what is used is copied."""
    assert target.decode is not None
    assert source.decode is not None
    target.token_ids.copy_(source.token_ids)
    target.positions.copy_(source.positions)
    target.decode.seq_lens.copy_(source.decode.seq_lens)
    target.decode.slots.copy_(source.decode.slots)
    for old, new in zip(target.token_slots, source.token_slots, strict=True):
        old.copy_(new)
    for old, new in zip(target.decode.block_tables, source.decode.block_tables, strict=True):
        old[:, : new.shape[1]].copy_(new)
