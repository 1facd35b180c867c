"""The controller's account of the arena: which page is of which kind, and which units are taken.

Every kind sees the arena as one grid: page p holds its units p * n to p * n + n - 1, with n the
units per page. A page belongs to one kind while a unit of it is taken, and to nobody otherwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.worker.plan import CachePlan, UnitKind


class OwnershipError(RuntimeError):
    """A unit was asked for or given back that its caller cannot own: a fault in our own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A state slot. `generation` grows each time this id is handed out, so old holders show."""

    id: int
    generation: int


class _Pages:
    """Which pages are free. A page that was never used costs no memory here."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.untouched = 1  # page 0 is reserved; pages from here on were never used
        self.returned: list[int] = []

    @property
    def num_free(self) -> int:
        return self.num_pages - self.untouched + len(self.returned)

    def take(self) -> int:
        if self.returned:
            return self.returned.pop()
        page, self.untouched = self.untouched, self.untouched + 1
        assert page < self.num_pages, "a page was taken without a check"
        return page


class _Pool:
    """The pages of one kind, and the free units in each as the bits of an integer."""

    def __init__(self, kind: UnitKind) -> None:
        self.name = kind.name
        self.units_per_page = kind.units_per_page
        self.free_bits: dict[int, int] = {}  # page -> bit u set: unit u of the page is free
        self.by_used: dict[int, dict[int, None]] = {}  # units in use -> partly used pages
        self.used_bits = 0  # bit n set: some partly used page has n units in use
        self.num_used = 0

    @property
    def num_spare(self) -> int:
        """Free units in the pages that this kind has already."""
        return len(self.free_bits) * self.units_per_page - self.num_used

    def pages_needed(self, count: int) -> int:
        """New pages without which `count` units cannot be taken."""
        return max(0, -(-(count - self.num_spare) // self.units_per_page))

    def take(self, pages: _Pages) -> int:
        """A unit of the fullest partly used page, else of a new one; room was checked before."""
        if self.used_bits:
            used = self.used_bits.bit_length() - 1
            page = next(iter(self.by_used[used]))
            self._forget(page, used)
        else:
            used, page = 0, pages.take()
            self.free_bits[page] = (1 << self.units_per_page) - 1
        bits = self.free_bits[page]
        lowest = bits & -bits
        self.free_bits[page] = bits ^ lowest
        self._file(page, used + 1)
        self.num_used += 1
        return page * self.units_per_page + lowest.bit_length() - 1

    def give_back(self, unit: int, pages: _Pages) -> None:
        page, index = divmod(unit, self.units_per_page)
        used = self._used_in(page)
        self._forget(page, used)
        self.free_bits[page] |= 1 << index
        self.num_used -= 1
        if used == 1:
            del self.free_bits[page]
            pages.returned.append(page)
        else:
            self._file(page, used - 1)

    def is_live(self, unit: int) -> bool:
        page, index = divmod(unit, self.units_per_page)
        return page in self.free_bits and not self.free_bits[page] >> index & 1

    def live_units(self) -> Iterator[int]:
        for page in self.free_bits:
            first = page * self.units_per_page
            yield from filter(self.is_live, range(first, first + self.units_per_page))

    def _used_in(self, page: int) -> int:
        return self.units_per_page - self.free_bits[page].bit_count()

    def _file(self, page: int, used: int) -> None:
        """List a page under its count; full pages have nothing to give and are not listed."""
        if used < self.units_per_page:
            self.by_used.setdefault(used, {})[page] = None
            self.used_bits |= 1 << used

    def _forget(self, page: int, used: int) -> None:
        if used < self.units_per_page:
            del self.by_used[used][page]
            if not self.by_used[used]:
                del self.by_used[used]
                self.used_bits ^= 1 << used

    def faults(self) -> Iterator[str]:
        """What is wrong in this pool on its own."""
        listed = {page: used for used, pages in self.by_used.items() for page in pages}
        for page, bits in self.free_bits.items():
            used = self._used_in(page)
            if not 0 <= bits < 1 << self.units_per_page:
                yield f"page {page} of {self.name} has bits outside of its units"
            if not 0 < used <= self.units_per_page:
                yield f"page {page} of {self.name} is held with {used} units in use"
            if listed.get(page, self.units_per_page) != used:
                yield f"page {page} of {self.name} with {used} units in use is listed wrongly"
        if listed.keys() - self.free_bits.keys():
            yield f"{self.name} lists pages that it does not hold"
        if sum(map(len, self.by_used.values())) != len(listed):
            yield f"{self.name} lists a page twice"
        if self.used_bits != sum(1 << used for used in self.by_used):
            yield f"{self.name} has lost track of its fullest page"
        if self.num_used != sum(map(self._used_in, self.free_bits)):
            yield f"{self.name} counts {self.num_used} units in use, its pages hold another number"


class PageAllocator:
    """Hands out KV blocks and state slots of one plan; all requests are all or nothing."""

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self._pages = _Pages(plan.num_pages)
        self._pools = {kind.name: _Pool(kind) for kind in plan.layout.kinds}
        self._kv = tuple(self._pools[kind.name] for kind in plan.layout.kv_kinds)
        state = plan.layout.state_kind
        self._state = None if state is None else self._pools[state.name]
        self._generations: dict[int, int] = {}  # slot id -> how often it was handed out

    @property
    def free_pages(self) -> int:
        """Pages of no kind, without the reserved one."""
        return self._pages.num_free

    def pages_by_kind(self) -> dict[str, int]:
        """Pages that each kind holds."""
        return {name: len(pool.free_bits) for name, pool in self._pools.items()}

    def used_units(self, name: str) -> int:
        """Units of the kind `name` that are handed out."""
        return self._pools[name].num_used

    def free_units(self, name: str) -> int:
        """Units of the kind `name` that could be had if it got every free page."""
        pool = self._pools[name]
        return pool.num_spare + self.free_pages * pool.units_per_page

    def can_allocate(self, blocks: Sequence[int], slots: int) -> bool:
        """Whether `blocks` of each kv kind and `slots` can all be had together, now."""
        if len(blocks) != len(self._kv):
            raise OwnershipError(f"{len(blocks)} block counts given for {len(self._kv)} kv kinds")
        needed = sum(pool.pages_needed(count) for pool, count in zip(self._kv, blocks, strict=True))
        if slots:
            needed += self._state_pool().pages_needed(slots)
        return needed <= self.free_pages

    def allocate_blocks(self, kind: int, count: int) -> list[int] | None:
        """`count` blocks of the kv kind at this index of the layout; None if there are fewer."""
        pool = self._kv_pool(kind)
        if pool.pages_needed(count) > self.free_pages:
            return None
        return [pool.take(self._pages) for _ in range(count)]

    def allocate_slot(self) -> Slot | None:
        """A state slot, not cleared; None if there is none."""
        pool = self._state_pool()
        if pool.pages_needed(1) > self.free_pages:
            return None
        unit = pool.take(self._pages)
        generation = self._generations.get(unit, 0) + 1
        self._generations[unit] = generation
        return Slot(id=unit, generation=generation)

    def free_blocks(self, kind: int, ids: Sequence[int]) -> None:
        """Give blocks back; nothing changes if one of them is not the caller's to give."""
        pool = self._kv_pool(kind)
        seen: set[int] = set()
        for unit in ids:
            if unit in seen:
                raise OwnershipError(f"{pool.name} block {unit} is freed twice in one call")
            seen.add(unit)
            self._check_live(pool, unit, f"{pool.name} block {unit}")
        for unit in ids:
            pool.give_back(unit, self._pages)

    def free_slot(self, slot: Slot) -> None:
        """Give a slot back; an earlier holder of the same id is refused."""
        pool = self._state_pool()
        self._check_live(pool, slot.id, f"state slot {slot.id}")
        current = self._generations[slot.id]
        if slot.generation != current:
            raise OwnershipError(
                f"state slot {slot.id} is freed by generation {slot.generation}, "
                f"but generation {current} holds it"
            )
        pool.give_back(slot.id, self._pages)

    def check_invariants(self) -> None:
        """Raise `OwnershipError` with every fault found; looks at all pages in use."""
        faults = [fault for pool in self._pools.values() for fault in pool.faults()]
        owners: dict[int, str] = {}
        held = [(page, name) for name, pool in self._pools.items() for page in pool.free_bits]
        for page, name in held + [(page, "free") for page in self._pages.returned]:
            if not 0 < page < self._pages.untouched:
                faults.append(f"page {page} is {name}, outside of the pages handed out")
            if page in owners:
                faults.append(f"page {page} is {name} and {owners[page]} at once")
            owners[page] = name
        if len(owners) != self._pages.untouched - 1:
            faults.append(f"{len(owners)} of {self._pages.untouched - 1} pages have an owner")
        if self.free_pages + len(held) != self.plan.usable_pages:
            faults.append("pages of all kinds and free pages do not add up to the plan")
        if self._state is not None:
            faults += [
                f"state slot {unit} is live without a generation"
                for unit in self._state.live_units()
                if unit not in self._generations
            ]
        if faults:
            raise OwnershipError("the page account is wrong: " + "; ".join(faults))

    def _kv_pool(self, kind: int) -> _Pool:
        if not 0 <= kind < len(self._kv):
            raise OwnershipError(f"kv kind {kind} of a model that has {len(self._kv)}")
        return self._kv[kind]

    def _state_pool(self) -> _Pool:
        if self._state is None:
            raise OwnershipError("a state slot of a model without recurrent layers")
        return self._state

    def _check_live(self, pool: _Pool, unit: int, label: str) -> None:
        if 0 <= unit < pool.units_per_page:
            raise OwnershipError(f"{label} is freed, which is a null unit of the reserved page")
        if not 0 <= unit < self.plan.num_pages * pool.units_per_page:
            raise OwnershipError(f"{label} is freed, which lies outside of the arena")
        if not pool.is_live(unit):
            raise OwnershipError(f"{label} is freed, but is not handed out")
