from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.cluster.pages import OwnershipError, PageAllocator, Slot
from plait.cluster.planner import plan_layout
from plait.worker.dtypes import CacheDtypes
from plait.worker.plan import CacheLayout, CachePlan, UnitKind
from plait.worker.spec import Attention, LayerSpec, Mamba2, ModelSpec

DTYPES = CacheDtypes(kv="bfloat16", conv="bfloat16", ssm="float32")
PAGE_BYTES = 12 * 256


def layout_of(**units_per_page):
    """A layout whose kinds have these many units a page, each a little smaller than its stride."""
    return CacheLayout(
        architecture="Test",
        tensor_parallel_size=1,
        block_size=16,
        dtypes=DTYPES,
        page_bytes=PAGE_BYTES,
        kinds=tuple(
            UnitKind(
                name=name,
                sections=(),
                unit_bytes=PAGE_BYTES // count - 100,
                stride_bytes=PAGE_BYTES // count,
                units_per_page=count,
                window=64 if name.startswith("kv_window") else None,
            )
            for name, count in units_per_page.items()
        ),
    )


def allocator_of(num_pages=5, **units_per_page):
    kinds = units_per_page or {"kv": 4, "kv_window_64": 3, "state": 2}
    return PageAllocator(CachePlan(layout=layout_of(**kinds), num_pages=num_pages))


# One thing at a time


def test_unit_zero_and_the_rest_of_page_zero_are_never_given_out():
    allocator = allocator_of(num_pages=3)
    blocks = allocator.allocate_blocks(0, 8)
    assert sorted(blocks) == list(range(4, 12))
    assert allocator.free_pages == 0
    assert allocator.allocate_blocks(0, 1) is None


def test_allocation_is_all_or_nothing():
    allocator = allocator_of(num_pages=3)
    assert allocator.allocate_blocks(0, 9) is None
    assert (allocator.used_units("kv"), allocator.free_pages) == (0, 2)
    assert len(allocator.allocate_blocks(0, 8)) == 8
    assert allocator_of().allocate_blocks(0, 0) == []


def test_units_come_from_the_fullest_partly_used_page():
    allocator = allocator_of(num_pages=4)
    pages = [allocator.allocate_blocks(0, 4) for _ in range(3)]
    assert [{block // 4 for block in page} for page in pages] == [{1}, {2}, {3}]
    allocator.free_blocks(0, pages[0][:3])  # one left
    allocator.free_blocks(0, pages[1][:1])  # three left
    allocator.free_blocks(0, pages[2][:2])  # two left
    taken = allocator.allocate_blocks(0, 6)
    assert [block // 4 for block in taken] == [2, 3, 3, 1, 1, 1]


def test_a_page_is_free_again_when_its_last_unit_is():
    allocator = allocator_of(num_pages=2)
    blocks = allocator.allocate_blocks(0, 3)
    assert (allocator.free_pages, allocator.allocate_slot()) == (0, None)
    allocator.free_blocks(0, blocks[:2])
    assert allocator.allocate_slot() is None
    allocator.free_blocks(0, blocks[2:])
    assert allocator.free_pages == 1
    assert allocator.allocate_slot() == Slot(id=2, generation=1)


def test_the_generation_grows_every_time_a_slot_is_handed_out():
    allocator = allocator_of(num_pages=2)
    seen = []
    for _ in range(3):
        slot = allocator.allocate_slot()
        seen.append(slot)
        allocator.free_slot(slot)
    assert seen == [Slot(id=2, generation=generation) for generation in (1, 2, 3)]
    assert allocator.allocate_slot().generation == 4
    assert allocator.allocate_slot() == Slot(id=3, generation=1)


def test_metrics_count_pages_and_units():
    allocator = allocator_of(num_pages=6)
    allocator.allocate_blocks(0, 5)
    allocator.allocate_slot()
    assert allocator.pages_by_kind() == {"kv": 2, "kv_window_64": 0, "state": 1}
    assert (allocator.free_pages, allocator.used_units("kv"), allocator.used_units("state")) == (
        2,
        5,
        1,
    )
    assert allocator.free_units("kv") == 3 + 2 * 4
    assert allocator.free_units("kv_window_64") == 2 * 3
    assert allocator.free_units("state") == 1 + 2 * 2


def test_can_allocate_counts_the_pages_of_all_kinds_together():
    allocator = allocator_of(num_pages=4)
    assert allocator.can_allocate([4, 3], 2)
    assert not allocator.can_allocate([5, 3], 2)
    assert not allocator.can_allocate([4, 4], 2)
    assert not allocator.can_allocate([4, 3], 3)
    assert allocator.can_allocate([12, 0], 0)
    allocator.allocate_blocks(0, 1)
    assert allocator.can_allocate([3, 3], 2)
    assert not allocator.can_allocate([4, 3], 2)


def test_a_plan_of_any_number_of_pages_is_built_at_once():
    allocator = allocator_of(num_pages=10**15)
    assert allocator.free_pages == 10**15 - 1
    assert allocator.allocate_blocks(0, 1) == [4]
    allocator.check_invariants()


# Faults of the caller


def test_freeing_twice_is_refused_and_changes_nothing():
    allocator = allocator_of()
    first, second = allocator.allocate_blocks(0, 2)
    allocator.free_blocks(0, [first])
    with pytest.raises(OwnershipError, match=f"kv block {first} is freed, but is not handed out"):
        allocator.free_blocks(0, [second, first])
    with pytest.raises(OwnershipError, match=f"kv block {second} is freed twice in one call"):
        allocator.free_blocks(0, [second, second])
    assert allocator.used_units("kv") == 1
    allocator.check_invariants()


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        pytest.param(0, "null unit of the reserved page", id="null"),
        pytest.param(3, "null unit of the reserved page", id="last-of-page-zero"),
        pytest.param(4, "not handed out", id="never-allocated"),
        pytest.param(20, "outside of the arena", id="one-past-the-end"),
        pytest.param(-1, "outside of the arena", id="negative"),
    ],
)
def test_blocks_that_nobody_owns_are_refused(unit, message):
    with pytest.raises(OwnershipError, match=f"kv block {unit} is freed, .*{message}"):
        allocator_of().free_blocks(0, [unit])


def test_a_block_of_another_kind_is_refused():
    allocator = allocator_of()
    blocks = allocator.allocate_blocks(0, 1)
    with pytest.raises(OwnershipError, match="kv_window_64 block 4 is freed, but is not handed"):
        allocator.free_blocks(1, blocks)


def test_an_earlier_holder_of_a_slot_is_refused():
    allocator = allocator_of()
    old = allocator.allocate_slot()
    allocator.free_slot(old)
    with pytest.raises(OwnershipError, match="state slot 2 is freed, but is not handed out"):
        allocator.free_slot(old)
    new = allocator.allocate_slot()
    with pytest.raises(OwnershipError, match="by generation 1, but generation 2 holds it"):
        allocator.free_slot(old)
    with pytest.raises(OwnershipError, match="state slot 0 is freed, which is a null unit"):
        allocator.free_slot(Slot(id=0, generation=1))
    allocator.free_slot(new)
    allocator.check_invariants()


def test_models_without_a_kind_have_nothing_of_it():
    attention = allocator_of(kv=4)
    assert attention.can_allocate([4], 0)
    for ask in (
        attention.allocate_slot,
        lambda: attention.free_slot(Slot(id=2, generation=1)),
        lambda: attention.can_allocate([1], 1),
    ):
        with pytest.raises(OwnershipError, match="a model without recurrent layers"):
            ask()
    recurrent = allocator_of(state=2)
    assert recurrent.can_allocate([], 8)
    assert not recurrent.can_allocate([], 9)
    for ask in (lambda: recurrent.allocate_blocks(0, 1), lambda: recurrent.free_blocks(0, [])):
        with pytest.raises(OwnershipError, match="kv kind 0 of a model that has 0"):
            ask()
    with pytest.raises(OwnershipError, match="1 block counts given for 0 kv kinds"):
        recurrent.can_allocate([1], 0)
    with pytest.raises(OwnershipError, match="kv kind -1"):
        attention.allocate_blocks(-1, 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(
            lambda a: a._pages.returned.append(1), "page 1 is free and kv", id="two-owners"
        ),
        pytest.param(
            lambda a: a._pools["state"].free_bits.update({1: 2}),
            "page 1 is state and kv",
            id="kinds",
        ),
        pytest.param(lambda a: a._pools["kv"].free_bits.pop(1), "lists pages that", id="lost-page"),
        pytest.param(
            lambda a: a._pools["kv"].free_bits.update({1: 0b1111}), "held with 0", id="empty-page"
        ),
        pytest.param(
            lambda a: a._pools["kv"].free_bits.update({1: 0b1100}), "listed wrongly", id="bit-lost"
        ),
        pytest.param(
            lambda a: a._pools["kv"].free_bits.update({1: 0b11110}), "bits outside", id="bits"
        ),
        pytest.param(
            lambda a: setattr(a._pools["kv"], "num_used", 2), "counts 2 units", id="count"
        ),
        pytest.param(
            lambda a: setattr(a._pools["kv"], "used_bits", 4), "fullest page", id="fullest"
        ),
        pytest.param(
            lambda a: a._pools["kv"].by_used.update({2: {1: None}}),
            "lists a page twice",
            id="twice",
        ),
        pytest.param(lambda a: setattr(a._pages, "untouched", 4), "have an owner", id="leak"),
        pytest.param(lambda a: setattr(a._pages, "num_pages", 9), "do not add up", id="tiling"),
        pytest.param(lambda a: a._generations.clear(), "without a generation", id="generation"),
        pytest.param(lambda a: a._pages.returned.append(0), "page 0 is free, outside", id="page-0"),
    ],
)
def test_check_invariants_finds_damage(damage, message):
    allocator = allocator_of()
    allocator.allocate_blocks(0, 1)
    allocator.allocate_slot()
    allocator.check_invariants()
    damage(allocator)
    with pytest.raises(OwnershipError, match=message):
        allocator.check_invariants()


# Anything in any order, against a model that only knows sets


class Arena(RuleBasedStateMachine):
    """Compares the allocator with plain sets of live units after every operation."""

    units_per_page: ClassVar = {"kv": 4, "kv_window_64": 3, "state": 2}
    num_pages = 5

    def __init__(self):
        super().__init__()
        self.layout = layout_of(**self.units_per_page)
        self.plan = CachePlan(layout=self.layout, num_pages=self.num_pages)
        self.allocator = PageAllocator(self.plan)
        self.live = {name: set() for name in self.units_per_page}
        self.slots = []
        self.generations = {}

    def held_pages(self, name):
        return {unit // self.units_per_page[name] for unit in self.live[name]}

    def fits(self, **wanted):
        """Whether `wanted` units fit, by the rule that a page is of one kind."""
        held = sum(len(self.held_pages(name)) for name in self.live)
        free = self.num_pages - 1 - held
        for name, count in wanted.items():
            per_page = self.units_per_page[name]
            spare = len(self.held_pages(name)) * per_page - len(self.live[name])
            free -= max(0, -(-(count - spare) // per_page))
        return free >= 0

    def kv_names(self):
        return [name for name in self.units_per_page if name != "state"]

    @precondition(lambda self: self.kv_names())
    @rule(data=st.data(), count=st.integers(0, 9))
    def allocate_blocks(self, data, count):
        names = self.kv_names()
        name = data.draw(st.sampled_from(names))
        fits = self.fits(**{name: count})
        fullest = self.by_fullness(name)
        taken = self.allocator.allocate_blocks(names.index(name), count)
        assert (taken is not None) == fits
        for unit in taken or ():
            assert unit not in self.live[name]
            self.live[name].add(unit)
        if taken and fullest:
            assert taken[0] // self.units_per_page[name] in fullest

    @precondition(lambda self: "state" in self.live)
    @rule()
    def allocate_slot(self):
        fits, fullest = self.fits(state=1), self.by_fullness("state")
        slot = self.allocator.allocate_slot()
        assert (slot is not None) == fits
        if slot is None:
            return
        assert slot.id not in self.live["state"]
        assert not fullest or slot.id // self.units_per_page["state"] in fullest
        assert slot.generation > self.generations.get(slot.id, 0)
        self.generations[slot.id] = slot.generation
        self.live["state"].add(slot.id)
        self.slots.append(slot)

    @precondition(lambda self: any(self.live[name] for name in self.kv_names()))
    @rule(data=st.data())
    def free_blocks(self, data):
        names = self.kv_names()
        name = data.draw(st.sampled_from([name for name in names if self.live[name]]))
        order = data.draw(st.permutations(sorted(self.live[name])))
        freed = order[: data.draw(st.integers(1, len(order)))]
        self.allocator.free_blocks(names.index(name), freed)
        self.live[name] -= set(freed)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free_slot(self, data):
        slot = self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1)))
        self.allocator.free_slot(slot)
        self.live["state"].remove(slot.id)
        with pytest.raises(OwnershipError):
            self.allocator.free_slot(slot)

    @rule(counts=st.lists(st.integers(0, 9), min_size=2, max_size=2), slots=st.integers(0, 5))
    def ask(self, counts, slots):
        names = self.kv_names()
        wanted = dict(zip(names, counts[: len(names)], strict=True))
        if "state" in self.live:
            wanted["state"] = slots
        able = self.allocator.can_allocate(counts[: len(names)], wanted.get("state", 0))
        assert able == self.fits(**wanted)

    def by_fullness(self, name):
        """The partly used pages of a kind with most units in use."""
        used = {}
        for unit in self.live[name]:
            page = unit // self.units_per_page[name]
            used[page] = used.get(page, 0) + 1
        partly = {p: count for p, count in used.items() if count < self.units_per_page[name]}
        return {page for page, count in partly.items() if count == max(partly.values())}

    @invariant()
    def accounts_agree(self):
        self.allocator.check_invariants()
        for name in self.live:
            assert self.allocator.used_units(name) == len(self.live[name])
            assert self.allocator.pages_by_kind()[name] == len(self.held_pages(name))
        held = sum(self.allocator.pages_by_kind().values())
        assert held + self.allocator.free_pages == self.plan.usable_pages

    @invariant()
    def live_units_share_no_byte(self):
        check_bytes(self.plan, self.live)


class OnlyAttention(Arena):
    units_per_page: ClassVar = {"kv": 3, "kv_window_64": 4}


class OnlyState(Arena):
    units_per_page: ClassVar = {"state": 3}


def check_bytes(plan, live):
    """Live units are aligned, apart, inside the arena and outside of the reserved page."""
    ranges = sorted(
        (unit * kind.stride_bytes, unit * kind.stride_bytes + kind.unit_bytes)
        for kind in plan.layout.kinds
        for unit in live[kind.name]
    )
    assert all(start % 256 == 0 for start, _ in ranges)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
    if ranges:
        assert ranges[0][0] >= plan.layout.page_bytes
        assert ranges[-1][1] <= plan.arena_bytes


ARENA_SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)
for machine in (Arena, OnlyAttention, OnlyState):
    machine.TestCase.settings = ARENA_SETTINGS
TestArena = Arena.TestCase
TestOnlyAttention = OnlyAttention.TestCase
TestOnlyState = OnlyState.TestCase


@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from([4, 12]),
    groups=st.integers(1, 4),
    head_dim=st.integers(1, 40),
    state_dim=st.integers(1, 40),
    window=st.none() | st.integers(1, 200),
    tp=st.sampled_from([1, 2, 4]),
    num_pages=st.integers(2, 6),
    share=st.integers(1, 5),
)
def test_live_units_of_planned_layouts_share_no_byte(
    heads, groups, head_dim, state_dim, window, tp, num_pages, share
):
    attention = Attention(num_heads=heads, num_kv_heads=groups, head_dim=head_dim, scale=1.0)
    windowed = Attention(
        num_heads=heads, num_kv_heads=groups, head_dim=head_dim, scale=1.0, window=window
    )
    mamba = Mamba2(
        num_heads=heads, head_dim=head_dim, state_dim=state_dim, num_groups=groups, conv_width=4
    )
    spec = ModelSpec(
        architecture="Test",
        vocab_size=8,
        hidden_dim=8,
        layers=tuple(LayerSpec(mixer=mixer) for mixer in (mamba, attention, windowed)),
        norm_eps=1e-5,
        max_model_len=64,
    )
    layout = plan_layout(spec, tp=tp, dtypes=DTYPES)
    plan = CachePlan(layout=layout, num_pages=num_pages)
    allocator = PageAllocator(plan)
    live = {kind.name: set() for kind in layout.kinds}
    while True:
        before = sum(map(len, live.values()))
        for idx, kind in enumerate(layout.kv_kinds):
            live[kind.name].update(allocator.allocate_blocks(idx, share) or ())
        slot = allocator.allocate_slot()
        if slot is not None:
            live["state"].add(slot.id)
        if sum(map(len, live.values())) == before:
            break
    allocator.check_invariants()
    assert allocator.free_pages == 0
    check_bytes(plan, live)
