from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.cluster import planner
from plait.cluster.pages import PageAllocator
from plait.cluster.planner import (
    DEFAULT_NUM_SEQS,
    Limits,
    PageShape,
    fit_limits,
    max_sequences,
    max_tokens,
    padded_rule,
    padded_rule_for,
    pages_for,
    pages_in_budget,
    plan_layout,
    search_page,
    units_for,
)
from plait.worker.architectures import load_spec
from plait.worker.dtypes import CacheDtypes
from plait.worker.errors import PlanError, ShardError
from plait.worker.plan import CachePlan, check_layout
from plait.worker.spec import (
    Attention,
    LayerSpec,
    Mamba2,
    ModelSpec,
    Parallel,
    valid_tp_sizes,
)

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
DTYPES = CacheDtypes(kv="bfloat16", conv="bfloat16", ssm="float32")

# Small enough that a slot is a few blocks: the demo model's sizes.
ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=32, scale=1.0)
MAMBA = Mamba2(num_heads=8, head_dim=32, state_dim=32, num_groups=1, conv_width=4)


def model(*mixers, max_model_len=8192):
    return ModelSpec(
        architecture="TestForCausalLM",
        vocab_size=32,
        hidden_dim=128,
        layers=tuple(LayerSpec(mixer=mixer) for mixer in mixers),
        norm_eps=1e-5,
        max_model_len=max_model_len,
    )


HYBRID = model(MAMBA, MAMBA, ATTENTION, MAMBA, MAMBA, ATTENTION)
WINDOWED = model(MAMBA, ATTENTION, replace(ATTENTION, window=100))
ATTENTION_ONLY = model(ATTENTION, ATTENTION)
WINDOW_ONLY = model(replace(ATTENTION, window=100), MAMBA)
RECURRENT_ONLY = model(MAMBA, MAMBA)
MODELS = {
    "hybrid": HYBRID,
    "parallel": model(Parallel(attention=ATTENTION, mamba2=MAMBA)),
    "windowed": WINDOWED,
    "attention-only": ATTENTION_ONLY,
    "window-only": WINDOW_ONLY,
    "recurrent-only": RECURRENT_ONLY,
}


def layout_of(spec, *, tp=1, block_size=16):
    return plan_layout(spec, tp=tp, dtypes=DTYPES, block_size=block_size)


def loses_at_most_one_percent(kind):
    return (kind.stride_bytes - kind.unit_bytes) * 100 <= kind.stride_bytes


# The search


def test_bamba_gets_627_blocks_or_one_slot_a_page():
    layout = layout_of(load_spec(CONFIGS / "bamba-9b.json"))
    counts = {kind.name: kind.units_per_page for kind in layout.kinds}
    assert counts == {"kv": 627, "state": 1}
    assert layout.page_bytes == 627 * 196_608
    assert max(kind.waste for kind in layout.kinds) == pytest.approx(0.0014, abs=5e-5)


@pytest.mark.parametrize(
    ("units", "page_bytes", "counts"),
    [
        pytest.param((196_608, 81_920), 960 * 1024, (5, 12), id="block-larger-than-slot"),
        pytest.param((81_920, 196_608), 960 * 1024, (12, 5), id="order-is-kept"),
        pytest.param((8_192, 139_264), 139_264, (17, 1), id="demo-model"),
        pytest.param((512, 512), 512, (1, 1), id="equal"),
        pytest.param((196_608,), 5 * 196_608, (5,), id="one-small-kind-fills-a-mebibyte"),
        pytest.param((3 << 20,), 3 << 20, (1,), id="one-large-kind-is-its-own-page"),
        pytest.param((768, 512, 1280), 7680, (10, 15, 6), id="three-kinds"),
    ],
)
def test_known_pages(units, page_bytes, counts):
    assert search_page(units) == PageShape(page_bytes=page_bytes, units_per_page=counts)


def test_the_demo_model_loses_nothing():
    layout = layout_of(HYBRID)
    assert {kind.name: kind.unit_bytes for kind in layout.kinds} == {"state": 139_264, "kv": 8_192}
    assert [kind.waste for kind in layout.kinds] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        *(("bamba-9b", tp) for tp in (1, 2, 4, 8)),
        *(("granite-4.0-h-small", tp) for tp in (1, 2, 4, 8)),
        *(("falcon-h1-7b", tp) for tp in (1, 2, 4)),
    ],
)
def test_public_models_lose_at_most_one_percent_per_kind(name, tp):
    layout = layout_of(load_spec(CONFIGS / f"{name}.json"), tp=tp)
    assert len(layout.kinds) == 2
    assert all(map(loses_at_most_one_percent, layout.kinds))


def test_every_public_config_is_planned_in_few_steps_at_every_tp_size(monkeypatch):
    """Steps of the search, of a microsecond each; mostly far fewer."""
    steps = Mock(side_effect=planner._shapes)
    monkeypatch.setattr(planner, "_shapes", steps)
    for file in sorted(CONFIGS.glob("*.json")):
        spec = load_spec(file)
        for tp in valid_tp_sizes(spec):
            steps.reset_mock()
            layout_of(spec, tp=tp)
            assert steps.call_count < 500, (file.name, tp)


units_lists = st.lists(
    st.one_of(st.integers(1, 40), st.integers(1, 5_000), st.integers(1, 500_000)),
    min_size=1,
    max_size=3,
).map(lambda quanta: tuple(256 * count for count in quanta))


@settings(max_examples=150, deadline=None)
@given(units=units_lists)
def test_pages_are_divided_exactly_and_aligned(units):
    shape = search_page(units)
    for unit, count in zip(units, shape.units_per_page, strict=True):
        stride, rest = divmod(shape.page_bytes, count)
        assert rest == 0
        assert stride % 256 == 0
        assert unit <= stride
        assert (stride - unit) * 4 < 3 * stride


def by_trying(units):
    """The accepted (page, counts) of two kinds, by trying every page of every count."""
    large, small = max(units), min(units)
    for count in range(1, 65):
        found = []
        for stride in range(large, large * 100 // 99 + 1):
            page = count * stride
            fits = [n for n in range(1, page // small + 1) if page % n == 0]
            lost = page - fits[-1] * small
            if lost * 100 <= page:
                found.append(((lost + page - count * large) / page, page, fits[-1]))
        if found:
            _, page, other = min(found)
            return page, count, other
    return None


@settings(max_examples=60, deadline=None)
@given(large=st.integers(20, 1_500), small=st.integers(20, 200))
def test_the_search_finds_what_trying_everything_finds(large, small):
    units = (large, small)
    expected = by_trying(units)
    assume(expected is not None)
    page, count, other = expected
    shape = search_page([unit * 256 for unit in units])
    counts = sorted(shape.units_per_page)
    assert (shape.page_bytes // 256, *counts) == (page, count, other)


def test_where_one_percent_is_out_of_reach_the_smallest_maximum_loss_decides():
    # At these sizes a page holds one large unit.
    mib = 1 << 20
    assert search_page((300 * mib, 250 * mib)) == PageShape(
        page_bytes=300 * mib, units_per_page=(1, 1)
    )
    # One small unit would lose 100 of 300 MiB, two make the large one lose 100 of 400.
    assert search_page((300 * mib, 200 * mib)) == PageShape(
        page_bytes=400 * mib, units_per_page=(1, 2)
    )


# The layout


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layouts_are_sound_and_pure_functions(name, tp):
    layout = layout_of(MODELS[name], tp=tp, block_size=32)
    check_layout(layout)
    assert layout.digest == layout_of(MODELS[name], tp=tp, block_size=32).digest
    assert (layout.tensor_parallel_size, layout.block_size) == (tp, 32)
    assert (layout.state_kind is not None) == MODELS[name].has_recurrent_state
    assert bool(layout.kv_kinds) == MODELS[name].has_attention


def test_the_digest_follows_every_input():
    inputs = [
        {},
        {"tp": 2},
        {"block_size": 32},
        {"dtypes": replace(DTYPES, kv="float16")},
        {"dtypes": replace(DTYPES, conv="float16")},
        {"dtypes": replace(DTYPES, ssm="float16")},
    ]
    base = {"tp": 1, "dtypes": DTYPES}
    digests = {plan_layout(HYBRID, **(base | values)).digest for values in inputs}
    assert len(digests | {layout_of(WINDOWED).digest}) == len(inputs) + 1


def test_windows_make_kinds_of_their_own():
    windows = {kind.name: kind.window for kind in layout_of(WINDOWED).kinds}
    assert windows == {"state": None, "kv": None, "kv_window_100": 100}


@pytest.mark.parametrize("block_size", [0, -16, 8, 17, 24])
def test_a_block_size_that_kernels_cannot_read_is_refused(block_size):
    with pytest.raises(PlanError, match=f"block_size={block_size} is not .* multiple of 16"):
        layout_of(HYBRID, block_size=block_size)


def test_a_tp_size_that_cannot_work_is_refused():
    with pytest.raises(ShardError, match=r"Sizes that work: 1, 2, 4\."):
        layout_of(HYBRID, tp=3)


# The padded rule


@pytest.mark.parametrize(
    ("state", "attention", "block", "waste"),
    [
        (2_146_304, 2_048, 1056, 0.0076),
        (536_576, 1_024, 528, 0.0076),
        (3_268_608, 2_048, 1600, 0.0025),
        (8_192, 2_048, 16, 3.0),
    ],
)
def test_padded_rule_gives_the_values_that_users_logged(state, attention, block, waste):
    rule = padded_rule(attention_bytes_per_token=attention, state_bytes=state)
    assert rule.block_size == block
    assert rule.page_bytes == block * attention
    assert rule.waste == pytest.approx(waste, abs=5e-5)


def test_padded_rule_keeps_to_multiples_of_the_kernel_block():
    rule = padded_rule(attention_bytes_per_token=1_000, state_bytes=64_001, min_block=64)
    assert (rule.block_size, rule.page_bytes) == (128, 128_000)


def test_padded_rule_of_a_model_takes_the_largest_state_and_the_smallest_attention():
    rule = padded_rule_for(load_spec(CONFIGS / "bamba-9b.json"), tp=1, dtypes=DTYPES)
    assert (rule.block_size, rule.page_bytes) == (1040, 1040 * 4096)
    mixed = model(MAMBA, replace(MAMBA, state_dim=64), ATTENTION, replace(ATTENTION, head_dim=16))
    state_bytes = 2 * 3 * (256 + 128) + 4 * 256 * 64
    assert padded_rule_for(mixed, tp=1, dtypes=DTYPES) == padded_rule(
        attention_bytes_per_token=2 * 2 * 16 * 2, state_bytes=state_bytes
    )
    # Over four ranks the two KV heads are replicated, the group too.
    assert padded_rule_for(mixed, tp=4, dtypes=DTYPES) == padded_rule(
        attention_bytes_per_token=2 * 16 * 2, state_bytes=2 * 3 * (64 + 128) + 256 * 64
    )


def test_padded_rule_needs_both_kinds():
    assert padded_rule_for(ATTENTION_ONLY, tp=1, dtypes=DTYPES) is None
    assert padded_rule_for(RECURRENT_ONLY, tp=1, dtypes=DTYPES) is None


# What fits


def test_a_window_holds_its_blocks_and_one_more():
    layout = layout_of(WINDOWED)
    window = next(kind for kind in layout.kinds if kind.window == 100)
    held = {tokens: units_for(layout, window, tokens) for tokens in (1, 16, 17, 112, 113, 10_000)}
    assert held == {1: 1, 16: 1, 17: 2, 112: 7, 113: 8, 10_000: 8}


def test_pages_are_counted_by_kind():
    layout = layout_of(HYBRID)  # 17 blocks or 1 slot
    assert pages_for(layout, 1, 1) == 1 + 1
    assert pages_for(layout, 1, 17 * 16) == 1 + 1
    assert pages_for(layout, 1, 17 * 16 + 1) == 1 + 2
    assert pages_for(layout, 17, 1) == 17 + 1
    assert pages_for(layout, 0, 1) == 0


def fill(layout, num_pages, num_seqs, tokens):
    """Whether an allocator gives that many sequences their units; checked after every step."""
    allocator = PageAllocator(CachePlan(layout=layout, num_pages=num_pages))
    for _ in range(num_seqs):
        blocks = [units_for(layout, kind, tokens) for kind in layout.kv_kinds]
        slots = 0 if layout.state_kind is None else 1
        able = allocator.can_allocate(blocks, slots)
        taken = [allocator.allocate_blocks(idx, count) for idx, count in enumerate(blocks)]
        if slots:
            taken.append(allocator.allocate_slot())
        assert (None not in taken) == able
        if None in taken:
            return False
    allocator.check_invariants()
    return True


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    num_pages=st.integers(1, 30),
    tokens=st.integers(1, 700),
    tp=st.sampled_from([1, 2, 4]),
)
def test_capacity_claimed_can_be_allocated_and_no_more(name, num_pages, tokens, tp):
    layout = layout_of(MODELS[name], tp=tp)
    count = max_sequences(layout, num_pages, tokens)
    assert fill(layout, num_pages, count, tokens)
    assert not fill(layout, num_pages, count + 1, tokens)


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(sorted(MODELS)), num_pages=st.integers(1, 60))
def test_the_longest_sequence_can_be_allocated_and_no_longer_one(name, num_pages):
    layout = layout_of(MODELS[name])
    tokens = max_tokens(layout, num_pages)
    if tokens is None:
        assert fill(layout, num_pages, 1, 1_000_000)
        return
    assert tokens == 0 or fill(layout, num_pages, 1, tokens)
    assert not fill(layout, num_pages, 1, tokens + 1)


def test_length_is_unlimited_only_where_it_takes_no_memory():
    assert max_tokens(layout_of(RECURRENT_ONLY), 2) is None
    assert max_tokens(layout_of(RECURRENT_ONLY), 1) == 0
    assert max_tokens(layout_of(WINDOW_ONLY), 100) is None
    assert (
        max_tokens(layout_of(ATTENTION_ONLY), 2)
        == layout_of(ATTENTION_ONLY).kinds[0].units_per_page * 16
    )


def test_a_budget_holds_whole_pages():
    layout = layout_of(HYBRID)
    assert pages_in_budget(layout, 10 * layout.page_bytes - 1) == 9
    assert pages_in_budget(layout, 10 * layout.page_bytes) == 10
    assert pages_in_budget(layout, -5) == 0


def test_limits_that_fit_are_kept_as_asked():
    layout = layout_of(HYBRID)
    limits = fit_limits(
        layout, 1000, model_max_len=8192, max_model_len=4096, max_num_seqs=10, strict=True
    )
    assert limits == Limits(num_pages=1000, max_model_len=4096, max_num_seqs=10)


def test_limits_default_to_the_model_and_256_sequences():
    limits = fit_limits(layout_of(HYBRID), 1000, model_max_len=8192)
    assert (limits.max_model_len, limits.max_num_seqs) == (8192, DEFAULT_NUM_SEQS)
    assert limits.notes == ()


def test_limits_that_do_not_fit_are_reduced_and_say_so():
    # 9 usable pages: a slot and 8 times 17 blocks of 16 tokens, or 8 slots and 17 blocks.
    limits = fit_limits(layout_of(HYBRID), 10, model_max_len=8192, max_num_seqs=20)
    assert (limits.max_model_len, limits.max_num_seqs) == (8 * 17 * 16, 8)
    length, seqs = limits.notes
    assert "max_model_len=8192 (the default) takes 33 pages" in length
    assert "there are 10: reduced to 2176" in length
    assert "max_num_seqs=20 takes 23 pages" in seqs
    assert "there are 10: reduced to 8" in seqs


def test_a_length_beyond_the_model_is_reduced_to_it():
    limits = fit_limits(layout_of(HYBRID), 1000, model_max_len=512, max_model_len=1024)
    assert limits.max_model_len == 512
    assert limits.notes == (
        "max_model_len=1024 is more than the 512 tokens that the model was made for: "
        "reduced to 512",
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 4096}, "max_model_len=4096 takes"),
        ({"max_num_seqs": 9, "max_model_len": 16}, "max_num_seqs=9 takes"),
        ({"max_num_seqs": 1}, r"max_model_len=8192 \(the default\)"),
    ],
)
def test_strict_limits_are_refused_instead_of_reduced(values, message):
    layout = layout_of(HYBRID)
    assert fit_limits(layout, 10, model_max_len=8192, **values).notes
    with pytest.raises(PlanError, match=f"may not be reduced: {message}"):
        fit_limits(layout, 10, model_max_len=8192, strict=True, **values)


def test_memory_for_less_than_one_sequence_is_refused_with_the_bytes_needed():
    layout = layout_of(HYBRID)
    assert fit_limits(layout, 3, model_max_len=8192).max_num_seqs == 1
    with pytest.raises(PlanError, match=r"at least 3 pages of 139,264 bytes .*\(417,792 bytes"):
        fit_limits(layout, 2, model_max_len=8192)
    with pytest.raises(PlanError, match=r"at least 2 pages .* and 0 fit"):
        fit_limits(layout_of(RECURRENT_ONLY), 0, model_max_len=8192)


@pytest.mark.parametrize("option", ["max_model_len", "max_num_seqs"])
def test_limits_below_one_are_refused(option):
    with pytest.raises(PlanError, match=f"{option}=0 is less than 1"):
        fit_limits(layout_of(HYBRID), 100, model_max_len=8192, **{option: 0})


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    num_pages=st.integers(4, 80),
    max_model_len=st.integers(1, 20_000),
    max_num_seqs=st.integers(1, 400),
)
def test_limits_can_always_be_allocated(name, num_pages, max_model_len, max_num_seqs):
    layout = layout_of(MODELS[name])
    limits = fit_limits(
        layout,
        num_pages,
        model_max_len=8192,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
    assert fill(layout, num_pages, 1, limits.max_model_len)
    assert fill(layout, num_pages, limits.max_num_seqs, 1)
    reduced = (limits.max_model_len, limits.max_num_seqs) != (max_model_len, max_num_seqs)
    assert bool(limits.notes) == reduced
