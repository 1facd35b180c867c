"""A rank in pure Python whose tokens come from what its cache really holds.

It keeps the tokens of KV blocks and a digest as recurrent state in simulated pages, where writing
one kind of unit destroys what another kind left in that page. The next token is a function of the
seed and of all tokens so far as read back from the cache, so a block or a slot that is lost,
shared, stale or given away too early changes the output or fails a check.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.worker.dtypes import CacheDtypes
from plait.worker.plan import CacheLayout, CachePlan, UnitKind
from plait.worker.protocol import NewSequence, SamplingSpec, StepInput, StepOutput

VOCAB_SIZE = 23
_MASK = (1 << 64) - 1
_PAGE_BYTES = 12 * 256


def fake_plan(units_per_page: dict[str, int], *, num_pages: int, block_size: int) -> CachePlan:
    """A plan with these kinds of units; their bytes mean nothing."""
    layout = CacheLayout(
        architecture="Fake",
        tensor_parallel_size=1,
        block_size=block_size,
        dtypes=CacheDtypes(kv="float32", conv="float32", ssm="float32"),
        page_bytes=_PAGE_BYTES,
        kinds=tuple(
            UnitKind(
                name=name,
                sections=(),
                unit_bytes=_PAGE_BYTES // count,
                stride_bytes=_PAGE_BYTES // count,
                units_per_page=count,
            )
            for name, count in units_per_page.items()
        ),
    )
    return CachePlan(layout=layout, num_pages=num_pages)


def continuation(
    prompt: Sequence[int], *, seed: int, count: int, stop: Sequence[int] = (), min_tokens: int = 0
) -> list[int]:
    """What the fake rank draws after `prompt`, up to and without a stop token."""
    state = 0
    for token in prompt:
        state = _advance(state, token)
    sampling = SamplingSpec(
        seed=seed, banned_token_ids=tuple(stop), banned_until=len(prompt) + min_tokens
    )
    drawn: list[int] = []
    while len(drawn) < count:
        token = _draw(state, sampling, len(prompt) + len(drawn))
        if token in stop:
            break
        drawn.append(token)
        state = _advance(state, token)
    return drawn


def _advance(state: int, token: int) -> int:
    return (state * 0x5851F42D4C957F2D + token + 1) & _MASK


def _draw(state: int, sampling: SamplingSpec, position: int) -> int:
    token = (_advance(state, sampling.seed) >> 32) % VOCAB_SIZE
    banned = sampling.banned_token_ids if position < sampling.banned_until else ()
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


@dataclass
class _Seat:
    new: NewSequence
    tables: list[list[int]]
    num_tokens: int = 0
    last_token: int | None = None  # None until a prefill row has sampled


@dataclass
class _Page:
    kind: str
    units: dict[int, dict[int, object]] = field(default_factory=dict)  # unit -> place -> content


class FakeRank:
    """Runs steps, and raises `AssertionError` where a scheduler breaks the protocol.

    `broken_seeds` are those of sequences whose logits are not finite.
    """

    def __init__(self, plan: CachePlan, *, num_seats: int) -> None:
        self._plan = plan
        self._kinds = {kind.name: kind for kind in plan.layout.kinds}
        self._kv = [kind.name for kind in plan.layout.kv_kinds]
        self._state = plan.layout.state_kind
        self._block_size = plan.layout.block_size
        self._num_seats = num_seats
        self._pages: dict[int, _Page] = {}
        self._generations: dict[int, int] = {}
        self._seats: dict[int, _Seat] = {}
        self.broken_seeds: set[int] = set()

    def step(self, step: StepInput) -> StepOutput:
        for kind, units in step.poison.items():
            for unit in units:
                self._unit(kind, unit, write=True).clear()
        for new in step.new:
            self._take_seat(new)
        for growth in step.growth:
            self._seats[growth.seat].tables[growth.kind] += growth.block_ids
        seats = self.row_seats(step)
        assert len(set(seats)) == len(seats), f"a seat has two rows: {seats}"
        assert {new.seat for new in step.new} <= set(seats), "a new sequence has no row"
        sampled = []
        for row in step.prefill:
            seat = self._seats[row.seat]
            assert row.token_ids, "a prefill row is empty"
            assert row.start == seat.num_tokens, f"{row} starts elsewhere than {seat}"
            seat.last_token = None
            state = self._compute(seat, row.token_ids)
            if row.sample:
                sampled.append((seat, state))
        for number in step.decode:
            seat = self._seats[number]
            assert seat.last_token is not None, f"seat {number} decodes before its prompt is done"
            sampled.append((seat, self._compute(seat, (seat.last_token,))))
        for seat, state in sampled:
            seat.last_token = _draw(state, seat.new.sampling, seat.num_tokens)
        return StepOutput(
            step=step.step,
            token_ids=tuple(seat.last_token for seat, _ in sampled),
            finite=tuple(seat.new.sampling.seed not in self.broken_seeds for seat, _ in sampled),
        )

    def row_seats(self, step: StepInput) -> list[int]:
        return [row.seat for row in step.prefill] + list(step.decode)

    def units_of(self, seats: Sequence[int]) -> set[tuple[str, int]]:
        """Every unit that the sequences on `seats` hold, by kind."""
        units = set()
        for number in seats:
            seat = self._seats[number]
            if self._state is not None:
                units.add((self._state.name, seat.new.slot))
            for kind, table in zip(self._kv, seat.tables, strict=True):
                units |= {(kind, block) for block in table}
        return units

    def granted(self, step: StepInput) -> set[tuple[str, int]]:
        """Every unit that `step` hands out."""
        units = {(self._kv[g.kind], block) for g in step.growth for block in g.block_ids}
        if self._state is not None:
            units |= {(self._state.name, new.slot) for new in step.new}
        return units

    def _take_seat(self, new: NewSequence) -> None:
        assert 0 <= new.seat < self._num_seats
        if self._state is None:
            assert new.slot == 0, "a model without recurrent layers has no slot"
        else:
            assert new.slot >= self._state.units_per_page, "a slot in the null page"
            assert new.generation > self._generations.get(new.slot, 0), "a stale slot"
            self._generations[new.slot] = new.generation
        self._seats[new.seat] = _Seat(new, [[] for _ in self._kv])

    def _compute(self, seat: _Seat, tokens: Sequence[int]) -> int:
        """Write `tokens` behind those of `seat`; the digest of all of them, read from the cache."""
        start, seat.num_tokens = seat.num_tokens, seat.num_tokens + len(tokens)
        digests = []
        if self._state is not None:
            digests.append(self._scan(seat, tokens, is_first=start == 0))
        for kind, table in zip(self._kv, seat.tables, strict=True):
            digests.append(self._attend(kind, table, start, tokens))
        assert len(set(digests)) == 1, f"the layers of {seat} saw different tokens"
        return digests[0]

    def _scan(self, seat: _Seat, tokens: Sequence[int], *, is_first: bool) -> int:
        unit = self._unit(self._state.name, seat.new.slot, write=True)
        state = 0 if is_first else unit.get(0)
        assert isinstance(state, int), f"slot {seat.new.slot} of {seat} has lost its state"
        for token in tokens:
            state = _advance(state, token)
        unit[0] = state
        return state

    def _attend(self, kind: str, table: list[int], start: int, tokens: Sequence[int]) -> int:
        for position, token in enumerate(tokens, start):
            block, offset = divmod(position, self._block_size)
            assert block < len(table), f"position {position} has no {kind} block"
            self._unit(kind, table[block], write=True)[offset] = position, token
        state = 0
        for position in range(start + len(tokens)):
            block, offset = divmod(position, self._block_size)
            unit = self._unit(kind, table[block], write=False)
            found = unit.get(offset)
            assert found is not None, f"{kind} block {table[block]} has lost position {position}"
            assert found[0] == position, f"{kind} block {table[block]} holds another position"
            state = _advance(state, found[1])
        return state

    def _unit(self, kind: str, unit: int, *, write: bool) -> dict[int, object]:
        page = unit // self._kinds[kind].units_per_page
        assert 0 < page < self._plan.num_pages, f"{kind} unit {unit} is not in the arena"
        found = self._pages.setdefault(page, _Page(kind))
        if found.kind != kind:
            assert write, f"page {page} holds {found.kind}, read as {kind}"
            found = self._pages[page] = _Page(kind)
        return found.units.setdefault(unit, {})
