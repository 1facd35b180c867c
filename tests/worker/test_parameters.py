from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.worker.architectures import load_spec
from plait.worker.parameters import rank_parameters, vocab_range
from plait.worker.spec import (
    Attention,
    GatedNorm,
    LayerSpec,
    Mamba2,
    Mlp,
    ModelSpec,
    Moe,
    Parallel,
    TensorPart,
    WeightNames,
)

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
FUSED = WeightNames(
    mlp_gate=TensorPart(name="mlp.input", index=0, count=2),
    mlp_up=TensorPart(name="mlp.input", index=1, count=2),
    mlp_down="mlp.output",
)


def model(*, heads=12, kv_heads=3, groups=3, vocab=29, ffn=None, bias=True, names=FUSED):
    mixer = Parallel(
        attention=Attention(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=2, scale=1.0, bias=bias
        ),
        mamba2=Mamba2(
            num_heads=heads,
            head_dim=3,
            state_dim=5,
            num_groups=groups,
            conv_width=4,
            conv_bias=bias,
            in_bias=bias,
            out_bias=bias,
            norm=GatedNorm(num_groups=1, eps=1e-5),
        ),
    )
    return ModelSpec(
        architecture="Test",
        vocab_size=vocab,
        hidden_dim=7,
        layers=(LayerSpec(mixer=mixer, ffn=ffn),),
        norm_eps=1e-5,
        max_model_len=64,
        names=names,
    )


def row_counts(spec, tp):
    """For each stored tensor, how many ranks' parameters hold each row of the sliced dimension."""
    counts, sizes = defaultdict(Counter), {}
    for rank in range(tp):
        for parameter in rank_parameters(spec, tp=tp, rank=rank):
            for part in parameter.slices:
                assert 0 <= part.start <= part.stop <= part.stored_shape[part.dim]
                assert sizes.setdefault(part.tensor, part.stored_shape) == part.stored_shape
                counts[part.tensor].update(range(part.start, part.stop))
                size = part.stored_shape[part.dim]
                counts[part.tensor].update(dict.fromkeys(range(size), 0))
    return {name: [rows[row] for row in sorted(rows)] for name, rows in counts.items()}


def group_readers(heads, groups, tp):
    """How many ranks have a head that reads each group, counted head by head."""
    readers = [set() for _ in range(groups)]
    for head in range(heads):
        readers[head * groups // heads].add(head // (heads // tp))
    return [len(ranks) for ranks in readers]


@settings(max_examples=60, deadline=None)
@given(
    tp=st.integers(1, 6),
    per_rank=st.integers(1, 4),
    kv_heads=st.integers(1, 24),
    groups=st.integers(1, 24),
    vocab=st.integers(1, 40),
    width=st.integers(1, 13),
    moe=st.booleans(),
)
def test_slices_of_all_ranks_tile_each_tensor_or_replicate_it(
    tp, per_rank, kv_heads, groups, vocab, width, moe
):
    heads = tp * per_rank
    kv_heads, groups = min(kv_heads, heads), min(groups, heads)
    mlp = Mlp(intermediate_dim=width, bias=True)
    ffn = (
        Moe(num_experts=3, experts_per_token=2, intermediate_dim=width, shared=mlp) if moe else mlp
    )
    spec = model(heads=heads, kv_heads=kv_heads, groups=groups, vocab=vocab, ffn=ffn)
    found = row_counts(spec, tp)
    kv = [count for count in group_readers(heads, kv_heads, tp) for _ in range(2)]
    bc = [count for count in group_readers(heads, groups, tp) for _ in range(5)] * 2
    inner = [1] * (heads * 3)
    expected = {
        "model.embed_tokens.weight": [1] * vocab,
        "lm_head.weight": [1] * vocab,
        "model.norm.weight": [tp] * 7,
    }
    layer = {
        "input_layernorm.weight": [tp] * 7,
        "post_attention_layernorm.weight": [tp] * 7,
        "self_attn.q_proj": [1] * (heads * 2),
        "self_attn.k_proj": kv,
        "self_attn.v_proj": kv,
        "self_attn.o_proj.weight": [1] * (heads * 2),
        "self_attn.o_proj.bias": [tp] * 7,
        "mamba.in_proj": inner * 2 + bc + [1] * heads,
        "mamba.conv1d": inner + bc,
        "mamba.A_log": [1] * heads,
        "mamba.D": [1] * heads,
        "mamba.dt_bias": [1] * heads,
        "mamba.norm.weight": inner,
        "mamba.out_proj.weight": inner,
        "mamba.out_proj.bias": [tp] * 7,
        "mlp.input": [1] * (2 * width),
        "mlp.output.weight": [1] * width,
        "mlp.output.bias": [tp] * 7,
    }
    if moe:
        layer |= {
            "block_sparse_moe.router.layer.weight": [tp] * 3,
            "block_sparse_moe.input_linear.weight": [1] * (2 * width),
            "block_sparse_moe.output_linear.weight": [1] * width,
        }
    for name, rows in layer.items():
        names = (
            [name]
            if name.endswith(("weight", "bias", "A_log", ".D"))
            else [
                f"{name}.weight",
                f"{name}.bias",
            ]
        )
        expected |= {f"model.layers.0.{full}": rows for full in names}
    assert found == expected


def test_irregular_groups_are_replicated_on_the_ranks_that_read_them():
    # 12 heads, 3 groups, 4 ranks: the middle two ranks read two groups each.
    rows = row_counts(model(), 4)["model.layers.0.self_attn.k_proj.weight"]
    assert rows == [2] * 6
    per_rank = [
        next(
            (part.start, part.stop)
            for parameter in rank_parameters(model(), tp=4, rank=rank)
            for part in parameter.slices
            if part.tensor.endswith("k_proj.weight")
        )
        for rank in range(4)
    ]
    assert per_rank == [(0, 2), (0, 4), (2, 6), (4, 6)]


def test_the_fused_projection_is_cut_section_by_section():
    parameter = next(
        p for p in rank_parameters(model(), tp=4, rank=1) if p.name == "layers.0.mamba2.in_proj"
    )
    # Sections: z 36, x 36, B 15, C 15, dt 12 rows; rank 1 has heads 3 to 5 and groups 0 and 1.
    assert [(s.start, s.stop) for s in parameter.slices] == [
        (9, 18),
        (36 + 9, 36 + 18),
        (72, 72 + 10),
        (87, 87 + 10),
        (102 + 3, 102 + 6),
    ]
    assert parameter.shape == (9 + 9 + 10 + 10 + 3, 7)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_shapes_are_those_of_the_joined_slices(tp):
    spec = model(ffn=Moe(num_experts=3, experts_per_token=2, intermediate_dim=10))
    for rank in range(tp):
        for parameter in rank_parameters(spec, tp=tp, rank=rank):
            first = parameter.slices[0]
            joined = list(first.stored_shape)
            joined[first.dim] = sum(part.stop - part.start for part in parameter.slices)
            if parameter.name.endswith("mamba2.conv"):
                joined.remove(1)
            assert parameter.shape == tuple(joined), parameter.name


def test_names_are_unique_and_float32_is_kept_for_the_recurrence_alone():
    parameters = rank_parameters(model(ffn=Mlp(intermediate_dim=4)), tp=1, rank=0)
    names = [parameter.name for parameter in parameters]
    assert len(set(names)) == len(names)
    kept = {p.name.removeprefix("layers.0.mamba2.") for p in parameters if p.dtype == "float32"}
    assert kept == {"A_log", "D", "dt_bias"}


def test_optional_parts_leave_no_parameter_behind():
    plain = model(bias=False, names=WeightNames())
    names = {parameter.name for parameter in rank_parameters(plain, tp=1, rank=0)}
    assert not {name for name in names if "bias" in name and not name.endswith("dt_bias")}
    assert not {name for name in names if "ffn_norm" in name}


def test_tied_embeddings_have_no_head():
    spec = load_spec(CONFIGS / "granite-4.0-h-micro.json")
    assert "head" not in {parameter.name for parameter in rank_parameters(spec, tp=1, rank=0)}


@given(vocab=st.integers(1, 200), tp=st.integers(1, 16))
def test_vocabulary_rows_tile_and_no_rank_holds_more_than_an_even_share(vocab, tp):
    ranges = [vocab_range(vocab, tp=tp, rank=rank) for rank in range(tp)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(vocab))
    assert max(stop - start for start, stop in ranges) == -(-vocab // tp)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_of_a_public_model_hold_all_of_it(tp):
    spec = load_spec(CONFIGS / "granite-4.0-h-small.json")
    ranges, sizes = defaultdict(set), {}
    for rank in range(tp):
        for parameter in rank_parameters(spec, tp=tp, rank=rank):
            for part in parameter.slices:
                ranges[part.tensor].add((part.start, part.stop))
                sizes[part.tensor] = part.stored_shape[part.dim]
    for name, parts in ranges.items():
        end = 0
        for start, stop in sorted(parts):
            assert start <= end, name
            end = max(end, stop)
        assert end == sizes[name], name
