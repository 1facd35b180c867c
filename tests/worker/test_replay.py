"""Decode steps that are replayed give the bits of the forward pass."""

import pytest
import torch

from plait.worker.batch import SeatTable
from plait.worker.dtypes import CacheDtypes
from plait.worker.plan import CacheLayout, UnitKind
from plait.worker.protocol import Growth, NewSequence, PrefillRow, SamplingSpec, StepInput
from plait.worker.replay import MOST_ROWS, ReplayedDecode

CPU = torch.device("cpu")
BLOCK = 16
SEATS = MOST_ROWS + 2
MAX_MODEL_LEN = 100


def seats() -> SeatTable:
    """Sequences of one token each, with a block and a slot of their own."""
    kinds = tuple(
        UnitKind(name=name, sections=(), unit_bytes=256, stride_bytes=256, units_per_page=1)
        for name in ("kv", "state")
    )
    layout = CacheLayout(
        architecture="Test",
        tensor_parallel_size=1,
        block_size=BLOCK,
        dtypes=CacheDtypes(kv="float32", conv="float32", ssm="float32"),
        page_bytes=256,
        kinds=kinds,
    )
    table = SeatTable(layout, num_seats=SEATS, max_model_len=MAX_MODEL_LEN, device=CPU)
    for seat in range(SEATS):
        new = NewSequence(seat=seat, slot=seat + 1, generation=1, sampling=SamplingSpec())
        growth = Growth(seat=seat, kind=0, block_ids=(seat + 1, seat + 101))
        row = PrefillRow(seat=seat, start=0, token_ids=(seat,) * 14, sample=True)
        step = StepInput(step=1, new=(new,), growth=(growth,), prefill=(row,))
        table.apply(step)
        table.batch(step)
        table.last_tokens[seat] = 7 * seat
    return table


class Model:
    """A forward pass that depends on every field that layers read."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        decode = batch.decode
        columns = [batch.token_ids, batch.positions, *batch.token_slots]
        if batch.prefill is None:
            columns += [decode.seq_lens, decode.slots, decode.block_tables[0][:, 0]]
        return torch.stack([column.float() for column in columns], dim=-1)


def replayed(model) -> ReplayedDecode:
    width = -(-MAX_MODEL_LEN // BLOCK)
    return ReplayedDecode(model, max_rows=SEATS, table_widths=(width,))


def decode(table, *rows):
    return table.batch(StepInput(step=2, decode=rows))


def test_every_field_reaches_a_replayed_step():
    table, plain, model = seats(), Model(), Model()
    forward = replayed(model)
    for rows in [(0, 1), (5,), (1, 0), (3, 9), (5,), (0, 1), (7,)]:
        batch = decode(table, *rows)
        assert torch.equal(forward(batch), plain(batch)), rows
    assert model.calls == 2  # once for two rows, once for one


def test_block_table_grows_while_replayed():
    table, forward = seats(), replayed(lambda batch: batch.decode.block_tables[0].float())
    rows = [forward(decode(table, 4)).tolist()[0] for _ in range(4)]
    assert [row[:2] for row in rows] == [[5.0, 0.0], [5.0, 0.0], [5.0, 105.0], [5.0, 105.0]]


@pytest.mark.parametrize("rows", [MOST_ROWS + 1, SEATS])
def test_many_rows_are_not_replayed(rows):
    table, model = seats(), Model()
    forward = replayed(model)
    for _ in range(2):
        forward(decode(table, *range(rows)))
    assert model.calls == 2


def test_prefill_is_not_replayed():
    table, model = seats(), Model()
    forward = replayed(model)
    row = PrefillRow(seat=0, start=14, token_ids=(1, 2), sample=True)
    for _ in range(2):
        forward(table.batch(StepInput(step=2, prefill=(row,), decode=(1,))))
    assert model.calls == 2


def test_model_that_decides_on_values_is_never_replayed(caplog):
    calls = []

    def forward(batch):
        calls.append(batch.token_ids.tolist())
        return batch.token_ids[:, None].float()

    table, model = seats(), replayed(forward)
    with caplog.at_level("INFO"):
        for seat in (0, 1, 2):
            assert model(decode(table, seat)).tolist() == [[7.0 * seat]]
    assert len(calls) == 3
    assert "cannot be replayed" in caplog.text
