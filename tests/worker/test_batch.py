import pytest
import torch

from plait.worker.batch import SeatTable
from plait.worker.dtypes import CacheDtypes
from plait.worker.plan import CacheLayout, UnitKind
from plait.worker.protocol import Growth, NewSequence, PrefillRow, SamplingSpec, StepInput

CPU = torch.device("cpu")
BLOCK = 16


def layout_of(*kinds):
    return CacheLayout(
        architecture="Test",
        tensor_parallel_size=1,
        block_size=BLOCK,
        dtypes=CacheDtypes(kv="float32", conv="float32", ssm="float32"),
        page_bytes=256,
        kinds=tuple(
            UnitKind(name=name, sections=(), unit_bytes=256, stride_bytes=256, units_per_page=1)
            for name in kinds
        ),
    )


def table_of(*kinds, num_seats=4, max_model_len=100):
    layout = layout_of(*(kinds or ("kv", "state")))
    return SeatTable(layout, num_seats=num_seats, max_model_len=max_model_len, device=CPU)


def new(seat, slot, generation=1, **sampling):
    return NewSequence(
        seat=seat, slot=slot, generation=generation, sampling=SamplingSpec(**sampling)
    )


def grow(seat, *blocks, kind=0):
    return Growth(seat=seat, kind=kind, block_ids=blocks)


def row(seat, start, count, *, sample=True, first=100):
    tokens = tuple(range(first, first + count))
    return PrefillRow(seat=seat, start=start, token_ids=tokens, sample=sample)


def run(table, **fields):
    step = StepInput(step=1, **fields)
    table.apply(step)
    return table.batch(step)


def draw(table, batch, *tokens):
    """What a rank does with the tokens of a batch."""
    table.last_tokens[torch.tensor(batch.sampled_seats)] = torch.tensor(tokens)


# One batch


def test_prefill_and_decode_rows_are_packed_and_typed():
    table = table_of()
    batch = run(table, new=(new(2, 7),), growth=(grow(2, 5),), prefill=(row(2, 0, 3),))
    draw(table, batch, 42)
    batch = run(
        table,
        new=(new(0, 9),),
        growth=(grow(0, 8, 3),),
        prefill=(row(0, 0, 20),),
        decode=(2,),
    )
    assert batch.token_ids.tolist() == [*range(100, 120), 42]
    assert batch.positions.tolist() == [*range(20), 3]
    assert [slots.tolist() for slots in batch.token_slots] == [
        [*range(8 * BLOCK, 9 * BLOCK), *range(3 * BLOCK, 3 * BLOCK + 4), 5 * BLOCK + 3]
    ]
    prefill, decode = batch.prefill, batch.decode
    assert (prefill.num_tokens, decode.num_tokens) == (20, 1)
    assert prefill.cu_seqlens.tolist() == [0, 20]
    assert prefill.context_lens.tolist() == [0]
    assert prefill.slots.tolist() == [9]
    assert prefill.has_initial_state.tolist() == [False]
    assert prefill.block_tables[0].tolist() == [[8, 3]]
    assert decode.seq_lens.tolist() == [4]
    assert decode.slots.tolist() == [7]
    assert decode.block_tables[0].tolist() == [[5]]
    assert (batch.sampled_seats, batch.sampled_positions) == ((0, 2), (20, 4))
    assert batch.logit_rows.tolist() == [19, 20]


def test_dtypes_are_those_that_kernels_take():
    table = table_of()
    batch = run(table, new=(new(0, 1),), growth=(grow(0, 1),), prefill=(row(0, 0, 3),))
    assert batch.prefill.cu_seqlens.dtype == batch.prefill.context_lens.dtype == torch.int32
    assert batch.prefill.slots.dtype == batch.prefill.block_tables[0].dtype == torch.int64
    assert batch.prefill.has_initial_state.dtype == torch.bool
    assert batch.token_ids.dtype == batch.token_slots[0].dtype == torch.int64
    decode = run(table, decode=(0,)).decode
    assert decode.seq_lens.dtype == torch.int32


def test_pieces_go_on_where_the_last_one_ended():
    table = table_of()
    first = run(
        table, new=(new(1, 3),), growth=(grow(1, 4, 6),), prefill=(row(1, 0, 16, sample=False),)
    )
    assert first.sampled_seats == ()
    assert first.logit_rows.tolist() == []
    second = run(table, prefill=(row(1, 16, 5),))
    assert second.positions.tolist() == [16, 17, 18, 19, 20]
    assert second.prefill.context_lens.tolist() == [16]
    assert second.prefill.has_initial_state.tolist() == [True]
    assert second.token_slots[0].tolist() == list(range(6 * BLOCK, 6 * BLOCK + 5))
    assert second.sampled_positions == (21,)
    assert run(table, decode=(1,)).positions.tolist() == [21]


def test_a_short_prefill_row_stays_a_prefill_row():
    table = table_of()
    batch = run(table, new=(new(0, 1),), growth=(grow(0, 1),), prefill=(row(0, 0, 1),))
    assert batch.decode is None
    assert batch.prefill.num_tokens == 1


def test_every_kv_kind_has_its_own_table():
    table = table_of("kv", "kv_window_64", "state")
    batch = run(
        table,
        new=(new(0, 1),),
        growth=(grow(0, 2, 3, kind=0), grow(0, 9, kind=1), grow(0, 4, kind=1)),
        prefill=(row(0, 0, 17),),
    )
    assert [t.tolist() for t in batch.prefill.block_tables] == [[[2, 3]], [[9, 4]]]
    assert [slots[-1].item() for slots in batch.token_slots] == [3 * BLOCK, 4 * BLOCK]


def test_models_without_attention_or_without_state_work():
    batch = run(table_of("state"), new=(new(0, 1),), prefill=(row(0, 0, 40),))
    assert batch.token_slots == batch.prefill.block_tables == ()
    table = table_of("kv")
    batch = run(table, new=(new(0, 0, 0),), growth=(grow(0, 1),), prefill=(row(0, 0, 2),))
    assert batch.prefill.slots.tolist() == [0]
    again = run(table, new=(new(0, 0, 0),), growth=(grow(0, 1),), prefill=(row(0, 0, 2),))
    assert again.prefill.slots.tolist() == [0]


def test_all_logits_names_the_seat_and_position_after_every_token():
    table = table_of()
    batch = run(
        table,
        new=(new(0, 1), new(1, 2)),
        growth=(grow(0, 1), grow(1, 2)),
        prefill=(row(0, 0, 3, sample=False), row(1, 0, 2)),
        all_logits=True,
    )
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert batch.sampled_seats == (0, 0, 0, 1, 1)
    assert batch.sampled_positions == (1, 2, 3, 1, 2)


# Null rows


def test_a_seat_that_nobody_took_is_a_null_row():
    """Warm-up runs such rows: no length, the null slot, and the null block."""
    batch = run(table_of(), decode=(0, 3))
    assert batch.decode.seq_lens.tolist() == [0, 0]
    assert batch.decode.slots.tolist() == [0, 0]
    assert (batch.token_slots[0] < BLOCK).all()
    prefill = run(table_of(), prefill=(row(0, 0, 40),))
    assert prefill.prefill.slots.tolist() == [0]
    assert (prefill.token_slots[0] < BLOCK).all()


def test_null_rows_beside_live_ones():
    table = table_of()
    batch = run(table, new=(new(1, 5),), growth=(grow(1, 7),), prefill=(row(1, 0, 2),))
    draw(table, batch, 11)
    batch = run(table, decode=(0, 1))
    assert batch.decode.seq_lens.tolist() == [0, 3]
    assert batch.decode.slots.tolist() == [0, 5]
    assert batch.decode.block_tables[0].tolist() == [[0], [7]]


# Seats and slots change hands


def test_a_new_sequence_finds_nothing_of_the_seats_last_one():
    table = table_of()
    run(
        table,
        new=(new(0, 1, temperature=0.5),),
        growth=(grow(0, 1, 2, 3),),
        prefill=(row(0, 0, 40),),
    )
    batch = run(table, new=(new(0, 2, seed=9),), growth=(grow(0, 8),), prefill=(row(0, 0, 4),))
    assert batch.prefill.block_tables[0].tolist() == [[8]]
    assert batch.prefill.slots.tolist() == [2]
    assert batch.prefill.has_initial_state.tolist() == [False]
    assert table.sampling[0] == SamplingSpec(seed=9)
    wide = run(table, growth=(grow(0, 9),), prefill=(row(0, 4, 16),))
    assert wide.prefill.block_tables[0].tolist() == [[8, 9]]


@pytest.mark.parametrize("generation", [0, 1, 3])
def test_a_slot_with_a_stale_generation_is_refused(generation):
    table = table_of()
    run(table, new=(new(0, 6, 3),), growth=(grow(0, 1),), prefill=(row(0, 0, 1),))
    with pytest.raises(ValueError, match=rf"slot 6 .* seat 1 with generation {generation}.* 3$"):
        table.apply(StepInput(step=2, new=(new(1, 6, generation),)))
    table.apply(StepInput(step=3, new=(new(1, 6, 4),)))


def test_a_slot_without_a_generation_is_refused():
    with pytest.raises(ValueError, match="slot 6 given to seat 1 with generation 0"):
        table_of().apply(StepInput(step=1, new=(new(1, 6, 0),)))


def test_more_blocks_than_a_sequence_can_have_are_refused():
    table = table_of(max_model_len=32)
    with pytest.raises(ValueError, match="broadcast"):
        table.apply(StepInput(step=1, new=(new(0, 1),), growth=(grow(0, 1, 2, 3),)))


# Steps ahead of their tokens


def test_a_second_step_may_start_before_the_first_ones_tokens_are_known():
    """Depth 2: both batches are made from deltas alone; the token comes from the device."""
    table = table_of()
    first = run(table, new=(new(0, 1),), growth=(grow(0, 1),), prefill=(row(0, 0, 15),))
    draw(table, first, 70)
    second = run(table, decode=(0,))
    assert second.token_ids.tolist() == [70]
    draw(table, second, 71)
    third = run(table, growth=(grow(0, 4),), decode=(0,))
    assert third.token_ids.tolist() == [71]
    assert third.positions.tolist() == [16]
    assert third.token_slots[0].tolist() == [4 * BLOCK]
    assert third.decode.seq_lens.tolist() == [17]
    assert third.sampled_positions == (17,)


def test_last_tokens_are_kept_by_seat_in_any_order_of_rows():
    table = table_of()
    news = tuple(new(seat, seat + 1) for seat in range(3))
    growth = tuple(grow(seat, seat + 1) for seat in range(3))
    prefill = tuple(row(seat, 0, 2) for seat in (2, 0, 1))
    batch = run(table, new=news, growth=growth, prefill=prefill)
    draw(table, batch, 52, 50, 51)
    assert run(table, decode=(1, 2)).token_ids.tolist() == [51, 52]
    assert run(table, decode=(0,)).token_ids.tolist() == [50]


def test_set_tokens_override_what_was_drawn():
    table = table_of()
    batch = run(table, new=(new(0, 1),), growth=(grow(0, 1),), prefill=(row(0, 0, 2),))
    draw(table, batch, 50)
    assert run(table, set_tokens=((0, 77),), decode=(0,)).token_ids.tolist() == [77]


def test_a_batch_is_not_changed_by_the_next_step():
    table = table_of()
    first = run(table, new=(new(0, 1),), growth=(grow(0, 1),), prefill=(row(0, 0, 2),))
    tables, slots = first.prefill.block_tables[0].clone(), first.prefill.slots.clone()
    run(table, new=(new(0, 2),), growth=(grow(0, 9),), prefill=(row(0, 0, 2),))
    assert torch.equal(first.prefill.block_tables[0], tables)
    assert torch.equal(first.prefill.slots, slots)
