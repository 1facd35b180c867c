import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.worker.errors import ShardError
from plait.worker.spec import (
    Attention,
    LayerSpec,
    Mamba2,
    ModelSpec,
    Parallel,
    check_tp_size,
    shard_heads,
    split_range,
    valid_tp_sizes,
)


def attention(num_heads=12, num_kv_heads=3):
    return Attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8, scale=1.0)


def mamba2(num_heads=24, num_groups=1):
    return Mamba2(
        num_heads=num_heads, head_dim=8, state_dim=16, num_groups=num_groups, conv_width=4
    )


def model(*mixers):
    return ModelSpec(
        architecture="FalconH1ForCausalLM",
        vocab_size=32,
        hidden_dim=16,
        layers=tuple(LayerSpec(mixer=mixer) for mixer in mixers),
        norm_eps=1e-5,
        max_model_len=128,
    )


def test_shards_of_twelve_heads_and_three_groups_touch_one_two_two_and_one_groups():
    shards = [shard_heads(12, 3, tp=4, rank=rank) for rank in range(4)]
    assert [shard.num_groups for shard in shards] == [1, 2, 2, 1]
    assert [(shard.start, shard.stop) for shard in shards] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert [shard.group_of_head for shard in shards] == [(0, 0, 0), (0, 1, 1), (0, 0, 1), (0, 0, 0)]


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "rank", "regular"),
    [
        pytest.param(12, 3, 1, 0, True, id="whole"),
        pytest.param(12, 3, 3, 1, True, id="one-group-each"),
        pytest.param(12, 3, 4, 0, True, id="one-group-of-several"),
        pytest.param(12, 3, 4, 1, False, id="groups-of-unequal-size"),
        pytest.param(8, 2, 4, 3, True, id="replicated"),
        pytest.param(16, 6, 2, 0, False, id="heads-not-a-multiple-of-groups"),
        pytest.param(24, 4, 2, 1, True, id="two-groups-each"),
        pytest.param(8, 4, 1, 0, True, id="pairs"),
    ],
)
def test_a_shard_is_regular_when_its_groups_have_equally_many_heads(
    heads, groups, tp, rank, regular
):
    assert shard_heads(heads, groups, tp=tp, rank=rank).is_regular is regular


@given(
    tp=st.integers(1, 8),
    per_rank=st.integers(1, 8),
    num_groups=st.integers(1, 16),
)
def test_shards_split_heads_evenly_and_cover_every_group(tp, per_rank, num_groups):
    num_heads = tp * per_rank
    num_groups = min(num_groups, num_heads)
    shards = [shard_heads(num_heads, num_groups, tp=tp, rank=rank) for rank in range(tp)]
    owned = [head for shard in shards for head in range(shard.start, shard.stop)]
    assert owned == list(range(num_heads))
    touched = {g for shard in shards for g in range(shard.group_start, shard.group_stop)}
    assert touched == set(range(num_groups))
    for shard in shards:
        assert shard.num_heads == len(shard.group_of_head) == per_rank
        assert set(shard.group_of_head) == set(range(shard.num_groups))
        for local, group in enumerate(shard.group_of_head):
            head = shard.start + local
            assert shard.group_start + group == head * num_groups // num_heads


@given(size=st.integers(0, 1000), tp=st.integers(1, 16))
def test_split_range_tiles_with_sizes_that_differ_by_one_at_most(size, tp):
    ranges = [split_range(size, tp=tp, rank=rank) for rank in range(tp)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(size))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_mamba2_shard_gives_the_rows_of_every_section():
    shard = mamba2(num_heads=12, num_groups=3).shard(tp=4, rank=1)
    assert shard.inner_range == (24, 48)
    assert shard.group_range == (0, 32)
    assert shard.in_dims == (24, 24, 32, 32, 3)
    assert shard.conv_dim == 24 + 2 * 32


def test_valid_tp_sizes_divide_the_heads_of_every_mixer():
    spec = model(Parallel(attention=attention(12, 2), mamba2=mamba2(24)))
    assert valid_tp_sizes(spec) == (1, 2, 3, 4, 6, 12)
    assert valid_tp_sizes(model(attention(16, 4), mamba2(24))) == (1, 2, 4, 8)
    assert valid_tp_sizes(model(attention(128, 4)), limit=32) == (1, 2, 4, 8, 16, 32)


def test_a_tp_size_that_cannot_work_is_refused_with_the_sizes_that_do():
    spec = model(Parallel(attention=attention(12, 2), mamba2=mamba2(24)))
    with pytest.raises(ShardError, match=r"tensor_parallel_size=8 .*: 1, 2, 3, 4, 6, 12\.$"):
        check_tp_size(spec, 8)
    with pytest.raises(ShardError, match="tensor_parallel_size=0"):
        check_tp_size(spec, 0)
    check_tp_size(spec, 12)
    check_tp_size(model(attention(128, 4)), 128)


def test_layers_say_what_they_hold():
    both = LayerSpec(mixer=Parallel(attention=attention(), mamba2=mamba2()))
    assert (both.attention, both.mamba2) == (attention(), mamba2())
    assert (LayerSpec(mixer=mamba2()).attention, LayerSpec(mixer=attention()).mamba2) == (None,) * 2
    assert model(mamba2()).has_recurrent_state
    assert not model(mamba2()).has_attention
    assert model(attention()).has_attention
    assert not model(attention()).has_recurrent_state
    assert (model(attention()).chunk_size, model(attention(), mamba2()).chunk_size) == (1, 256)
