import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster.planner import plan_layout
from plait.worker.arena import Arena
from plait.worker.dtypes import DTYPE_BYTES, CacheDtypes
from plait.worker.plan import ALIGNMENT_BYTES, STATE, CachePlan
from plait.worker.spec import Attention, LayerSpec, Mamba2, ModelSpec, Parallel

CPU = torch.device("cpu")
MIXED = CacheDtypes(kv="bfloat16", conv="float16", ssm="float32")


def plan_of(*, tp=1, dtypes=MIXED, num_pages=3, head_dim=8, state_dim=5):
    attention = Attention(num_heads=12, num_kv_heads=3, head_dim=head_dim, scale=1.0)
    mamba2 = Mamba2(num_heads=12, head_dim=3, state_dim=state_dim, num_groups=3, conv_width=4)
    spec = ModelSpec(
        architecture="Test",
        vocab_size=29,
        hidden_dim=7,
        layers=tuple(
            LayerSpec(mixer=mixer)
            for mixer in (mamba2, attention, Parallel(attention=attention, mamba2=mamba2))
        ),
        norm_eps=1e-5,
        max_model_len=64,
    )
    return CachePlan(layout=plan_layout(spec, tp=tp, dtypes=dtypes), num_pages=num_pages)


def views_of(arena):
    """(kind, section, view) of every section."""
    return [
        (kind, section, arena.view(kind.name, section.layer, section.name))
        for kind in arena.plan.layout.kinds
        for section in kind.sections
    ]


@pytest.mark.parametrize("tp", [1, 4])
def test_views_have_the_shapes_and_dtypes_of_the_plan(tp):
    for rank in range(tp):
        arena = Arena(plan_of(tp=tp), rank, device=CPU)
        seen = set()
        for kind, section, view in views_of(arena):
            assert view.shape == (arena.plan.num_pages * kind.units_per_page, *section.shapes[rank])
            assert view[0].is_contiguous()
            seen.add((kind.name, section.name, view.dtype))
        assert seen == {
            ("kv", "k", torch.bfloat16),
            ("kv", "v", torch.bfloat16),
            (STATE, "conv", torch.float16),
            (STATE, "ssm", torch.float32),
        }


@settings(max_examples=25, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    dtypes=st.builds(
        CacheDtypes, **dict.fromkeys(("kv", "conv", "ssm"), st.sampled_from(sorted(DTYPE_BYTES)))
    ),
    num_pages=st.integers(1, 4),
    head_dim=st.integers(1, 20),
    state_dim=st.integers(1, 20),
)
def test_views_lie_where_the_plan_says_aligned_and_inside_the_buffer(
    tp, dtypes, num_pages, head_dim, state_dim
):
    plan = plan_of(
        tp=tp, dtypes=dtypes, num_pages=num_pages, head_dim=head_dim, state_dim=state_dim
    )
    arena = Arena(plan, tp - 1, device=CPU)
    base = min(view.data_ptr() - section.offset_bytes for _, section, view in views_of(arena))
    assert base % ALIGNMENT_BYTES == 0
    for kind, section, view in views_of(arena):
        assert view[0].data_ptr() == base + section.offset_bytes
        assert view.stride(0) * view.element_size() == kind.stride_bytes
        last = view[-1]
        end = last.data_ptr() + last.numel() * last.element_size()
        assert last.data_ptr() % ALIGNMENT_BYTES == 0
        assert end <= base + plan.arena_bytes


def test_views_of_one_kind_do_not_overlap():
    """Every element gets a number of its own, written through all views; all are read back."""
    arena = Arena(
        plan_of(dtypes=CacheDtypes(kv="float32", conv="float32", ssm="float32")), 0, device=CPU
    )
    for name in ("kv", STATE):
        views = [view for kind, _, view in views_of(arena) if kind.name == name]
        numbers, start = [], 0
        for view in views:
            number = torch.arange(start, start + view.numel(), dtype=view.dtype).view(view.shape)
            numbers.append(number)
            start += view.numel()
            view.copy_(number)
        assert start < 1 << 24  # exact in float32
        assert all(torch.equal(view, n) for view, n in zip(views, numbers, strict=True))


def test_kinds_share_one_buffer_page_by_page():
    """A write to the units of page 2 touches nothing of the other kind outside of page 2."""
    arena = Arena(plan_of(), 0, device=CPU)
    for _, _, view in views_of(arena):
        view.zero_()
    kv, state = arena.plan.layout.kv_kinds[0], arena.plan.layout.state_kind
    first = 2 * kv.units_per_page
    arena.poison_units("kv", tuple(range(first, first + kv.units_per_page)))
    for kind, _, view in views_of(arena):
        dirty = view.isnan().flatten(1).any(1)
        pages = dirty.nonzero().flatten() // kind.units_per_page
        assert set(pages.tolist()) == {2}
        if kind is state:
            assert dirty[2 * kind.units_per_page :].all()


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_poison_is_nan_in_every_dtype(dtype):
    plan = plan_of(dtypes=CacheDtypes(kv=dtype, conv=dtype, ssm=dtype))
    arena = Arena(plan, 0, device=CPU, poison=True)
    for _, _, view in views_of(arena):
        assert view.isnan().all()


def test_poisoned_units_are_nan_and_no_other_unit_of_their_kind_is():
    for name in ("kv", STATE):
        arena = Arena(plan_of(), 0, device=CPU)
        views = [view for kind, _, view in views_of(arena) if kind.name == name]
        for view in views:
            view.zero_()
        count = len(views[0])
        poisoned = (1, count - 1)
        arena.poison_units(name, poisoned)
        for view in views:
            assert view.isnan().flatten(1).all(1).nonzero().flatten().tolist() == list(poisoned)
            assert view.isnan().flatten(1).any(1).sum() == len(poisoned)


def test_the_sections_of_a_rank_are_its_own_even_where_ranks_differ():
    """12 heads in 3 groups over 4 ranks: ranks touch 1, 2, 2 and 1 groups."""
    plan = plan_of(tp=4)
    groups = [Arena(plan, rank, device=CPU).view("kv", 1, "k").shape[1] for rank in range(4)]
    assert groups == [1, 2, 2, 1]
    conv = [Arena(plan, rank, device=CPU).view(STATE, 0, "conv").shape[2] for rank in range(4)]
    assert conv == [9 + 2 * 5 * count for count in groups]
