"""The cache layout and the cache plan: two frozen values that every rank is given and verifies.

A `CacheLayout` says how one arena of pages holds KV blocks and state slots; it does not depend on
memory and never changes after the controller has sent it. A `CachePlan` adds the number of pages.
The search for strides and page size lives in `plait.cluster.planner`.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from plait.worker.dtypes import DTYPE_BYTES, CacheDtypes
from plait.worker.errors import PlanError
from plait.worker.spec import ModelSpec

ALIGNMENT_BYTES = 256  # of sections, strides and pages
NULL_UNIT = 0  # unit 0 of every kind lies in the reserved page 0 and is never live
STATE = "state"


def align(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment of the arena."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionShape:
    """What one layer of one rank keeps in a unit: derived from the spec, or from built layers."""

    kind: str
    layer: int
    name: str  # "k", "v", "conv" or "ssm"
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a unit. `shapes` has one entry per rank; `num_bytes` is the largest, aligned."""

    layer: int
    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    """A kind of cache unit: the KV block of one group, or the state slot of a sequence.

    Unit u starts at byte u * stride_bytes of the arena. `unit_bytes` is what the sections take,
    the rest of the stride is lost to rounding.
    """

    name: str  # "kv", "kv_window_<tokens>" or "state"
    sections: tuple[Section, ...]
    unit_bytes: int
    stride_bytes: int
    units_per_page: int
    window: int | None = None

    @property
    def is_state(self) -> bool:
        return self.name == STATE

    @property
    def waste(self) -> float:
        """Share of the arena's bytes that this kind loses to rounding."""
        return 1.0 - self.unit_bytes / self.stride_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """How pages hold units, for a model, a TP size, cache dtypes and a block size in tokens."""

    architecture: str
    tensor_parallel_size: int
    block_size: int
    dtypes: CacheDtypes
    page_bytes: int
    kinds: tuple[UnitKind, ...]

    @property
    def kv_kinds(self) -> tuple[UnitKind, ...]:
        """The kv groups, in the order in which block tables are sent."""
        return tuple(kind for kind in self.kinds if not kind.is_state)

    @property
    def state_kind(self) -> UnitKind | None:
        """The state slot, None for a model without recurrent layers."""
        return next((kind for kind in self.kinds if kind.is_state), None)

    @property
    def digest(self) -> str:
        return digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """A layout and how many pages each rank holds, the reserved page 0 included."""

    layout: CacheLayout
    num_pages: int

    @property
    def arena_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def digest(self) -> str:
        return digest(self)


def encode(value: CacheLayout | CachePlan) -> bytes:
    """Canonical JSON: sorted keys, no spaces."""
    return msgspec.json.encode(value, order="sorted")


def digest(value: CacheLayout | CachePlan) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal."""
    return hashlib.sha256(encode(value)).hexdigest()


def decode_layout(data: bytes) -> CacheLayout:
    """The layout in `data`, as `encode` wrote it."""
    return msgspec.json.decode(data, type=CacheLayout)


def kv_kind_name(window: int | None) -> str:
    """The kv group of attention layers with this window; layers of one group share a lifetime."""
    return "kv" if window is None else f"kv_window_{window}"


def rank_sections(
    spec: ModelSpec, *, tp: int, rank: int, dtypes: CacheDtypes, block_size: int
) -> tuple[SectionShape, ...]:
    """The sections that the layers of one rank need, in layer order, attention before state."""
    sections: list[SectionShape] = []
    for index, layer in enumerate(spec.layers):
        if layer.attention is not None:
            shard = layer.attention.shard(tp=tp, rank=rank)
            shape = (shard.num_groups, block_size, layer.attention.head_dim)
            kind = kv_kind_name(layer.attention.window)
            sections += (
                SectionShape(kind=kind, layer=index, name=name, dtype=dtypes.kv, shape=shape)
                for name in ("k", "v")
            )
        if layer.mamba2 is not None:
            mixer, ranked = layer.mamba2, layer.mamba2.shard(tp=tp, rank=rank)
            state: tuple[tuple[str, str, tuple[int, ...]], ...] = (
                ("conv", dtypes.conv, (mixer.conv_width - 1, ranked.conv_dim)),
                ("ssm", dtypes.ssm, (ranked.heads.num_heads, mixer.head_dim, mixer.state_dim)),
            )
            sections += (
                SectionShape(kind=STATE, layer=index, name=name, dtype=dtype, shape=shape)
                for name, dtype, shape in state
            )
    return tuple(sections)


def pack_sections(ranks: Sequence[tuple[SectionShape, ...]]) -> dict[str, tuple[Section, ...]]:
    """Place the sections of all ranks at common offsets, by kind.

    A section takes the bytes of its largest rank, so that one offset fits every rank.
    """
    packed: dict[str, list[Section]] = {}
    for per_rank in zip(*ranks, strict=True):
        first = per_rank[0]
        sections = packed.setdefault(first.kind, [])
        end = sections[-1].offset_bytes + sections[-1].num_bytes if sections else 0
        sections.append(
            Section(
                layer=first.layer,
                name=first.name,
                dtype=first.dtype,
                shapes=tuple(section.shape for section in per_rank),
                offset_bytes=end,
                num_bytes=align(
                    max(math.prod(section.shape) for section in per_rank) * DTYPE_BYTES[first.dtype]
                ),
            )
        )
    return {kind: tuple(sections) for kind, sections in packed.items()}


def layout_sections(layout: CacheLayout, *, rank: int) -> tuple[SectionShape, ...]:
    """What `layout` says that `rank` holds, in the form in which layers report themselves."""
    return tuple(
        SectionShape(
            kind=kind.name,
            layer=section.layer,
            name=section.name,
            dtype=section.dtype,
            shape=section.shapes[rank],
        )
        for kind in layout.kinds
        for section in kind.sections
    )


def compare_sections(
    planned: Iterable[SectionShape], built: Iterable[SectionShape]
) -> tuple[str, ...]:
    """Every difference between plan and built layers, a readable line each; empty if none."""
    wanted = {(s.kind, s.layer, s.name): s for s in planned}
    found = {(s.kind, s.layer, s.name): s for s in built}
    lines = []
    for key in sorted(wanted.keys() | found.keys(), key=lambda key: (key[1], key[0], key[2])):
        kind, layer, name = key
        label = f"layer {layer} {kind}.{name}"
        plan, real = wanted.get(key), found.get(key)
        if plan is None:
            lines.append(f"{label}: built, but not in the plan")
        elif real is None:
            lines.append(f"{label}: in the plan, but not built")
        else:
            lines += [
                f"{label}: {field} is {getattr(plan, field)} in the plan, "
                f"{getattr(real, field)} in the built layer"
                for field in ("dtype", "shape")
                if getattr(plan, field) != getattr(real, field)
            ]
    return tuple(lines)


def check_layout(layout: CacheLayout) -> None:
    """Raise `PlanError` unless the units of every kind lie inside the page grid, aligned."""
    problems = []
    if layout.page_bytes % ALIGNMENT_BYTES:
        problems.append(f"page_bytes={layout.page_bytes} is not a multiple of {ALIGNMENT_BYTES}")
    for kind in layout.kinds:
        end = max((s.offset_bytes + s.num_bytes for s in kind.sections), default=0)
        if kind.stride_bytes * kind.units_per_page != layout.page_bytes:
            problems.append(f"{kind.name}: units do not fill a page exactly")
        if kind.stride_bytes % ALIGNMENT_BYTES:
            problems.append(f"{kind.name}: stride is not a multiple of {ALIGNMENT_BYTES}")
        if not end == kind.unit_bytes <= kind.stride_bytes:
            problems.append(f"{kind.name}: sections of {end} bytes in a stride of less")
        if any(s.offset_bytes % ALIGNMENT_BYTES for s in kind.sections):
            problems.append(f"{kind.name}: a section is not aligned")
    if problems:
        raise PlanError("the cache layout is not sound: " + "; ".join(problems))
