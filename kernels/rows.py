"""Packed rows as Python integers, for implementations that loop over rows."""

from typing import NamedTuple

from torch import Tensor


class Row(NamedTuple):
    """A live row: tokens `start` to `stop`; `read_slot` 0 means that its state starts from zero."""

    start: int
    stop: int
    read_slot: int
    write_slot: int


def live_rows(
    cu_seqlens: Tensor, read_slots: Tensor, write_slots: Tensor, has_initial_state: Tensor
) -> list[Row]:
    """The rows that are not null, in order."""
    bounds: list[int] = cu_seqlens.tolist()
    reads: list[int] = (read_slots * has_initial_state).tolist()
    writes: list[int] = write_slots.tolist()
    rows = map(Row, bounds[:-1], bounds[1:], reads, writes)
    return [row for row in rows if row.write_slot != 0]
