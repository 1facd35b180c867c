"""The search for a cache layout, and what fits into it: pure functions of their arguments.

Pages are of one kind at a time, so every kind gets its own number of units per page. `search_page`
looks for a page that all kinds divide with little loss; `plan_layout` makes the `CacheLayout` from
it; `fit_limits` works out what a number of pages can hold. `padded_rule` is the rule of vLLM,
which makes one page size of both kinds, and stands here for comparison only.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.worker.dtypes import DTYPE_BYTES, CacheDtypes
from plait.worker.errors import PlanError
from plait.worker.plan import (
    ALIGNMENT_BYTES,
    CacheLayout,
    Section,
    UnitKind,
    check_layout,
    kv_kind_name,
    pack_sections,
    rank_sections,
)
from plait.worker.spec import Attention, Mamba2, ModelSpec, check_tp_size

MIN_BLOCK = 16  # tokens: what the attention kernels tile
DEFAULT_NUM_SEQS = 256

_ACCEPTED_LOSS = 10  # in thousandths, of each kind
# Counts that are powers of two keep every loss under 75 %, so that the last step always succeeds.
_LOSS_STEPS = (_ACCEPTED_LOSS, 20, 40, 80, 160, 320, 640, 750)
_MAX_LARGEST_UNITS = 64  # units of the largest kind in a page
_MAX_PAGE_BYTES = 1 << 29  # of a page with more than one unit of the largest kind
_SINGLE_KIND_PAGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """Bytes of a page, and how many units of each kind fill it."""

    page_bytes: int
    units_per_page: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRule:
    """What a single page size for both kinds of cache comes to, per layer.

    `waste` is the padding of a state page in parts of the state's own bytes.
    """

    block_size: int
    page_bytes: int
    waste: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a number of pages is good for. `notes` says what was reduced, and why."""

    num_pages: int
    max_model_len: int
    max_num_seqs: int
    notes: tuple[str, ...] = ()


def search_page(unit_bytes: Sequence[int]) -> PageShape:
    """The page for units of these sizes, each a positive multiple of the alignment.

    Takes the fewest units of the largest kind with which every kind loses at most 1 % to rounding,
    and among those pages the smallest sum of losses, then the smallest page. Where no page within
    bounds does, the smallest maximum loss decides.
    """
    assert unit_bytes, "a page needs a kind"
    assert all(size > 0 and size % ALIGNMENT_BYTES == 0 for size in unit_bytes)
    if len(unit_bytes) == 1:
        count = max(1, _SINGLE_KIND_PAGE_BYTES // unit_bytes[0])
        return PageShape(page_bytes=count * unit_bytes[0], units_per_page=(count,))
    order = sorted(range(len(unit_bytes)), key=lambda idx: -unit_bytes[idx])
    units = tuple(unit_bytes[idx] // ALIGNMENT_BYTES for idx in order)
    page, counts = _search(units)
    by_kind = dict(zip(order, counts, strict=True))
    return PageShape(
        page_bytes=page * ALIGNMENT_BYTES,
        units_per_page=tuple(by_kind[idx] for idx in range(len(unit_bytes))),
    )


def _search(units: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Page and counts for `units`, the largest first, all in units of the alignment."""
    largest = units[0]
    most = min(_MAX_LARGEST_UNITS, max(1, _MAX_PAGE_BYTES // (largest * ALIGNMENT_BYTES)))

    def losses(shape: tuple[int, tuple[int, ...]]) -> tuple[float, float, int]:
        """The largest loss, the sum of losses, and the page: exact ties compare equal."""
        page, counts = shape
        used = [count * unit for count, unit in zip(counts, units, strict=True)]
        return (page - min(used)) / page, (page * len(used) - sum(used)) / page, page

    for loss in _LOSS_STEPS:
        shapes: list[tuple[int, tuple[int, ...]]] = []
        for count in range(1, most + 1):
            low = count * largest
            shapes += _shapes(units, loss, (count,), count, low, _highest(low, loss))
            if shapes and loss == _ACCEPTED_LOSS:
                return min(shapes, key=lambda shape: losses(shape)[1:])
        if shapes:
            return min(shapes, key=losses)
    raise AssertionError("powers of two always fit")


def _shapes(
    units: tuple[int, ...], loss: int, counts: tuple[int, ...], step: int, low: int, high: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every way to complete `counts` with no loss above `loss` thousandths, and its best page.

    The page is a multiple of `step`, the least common multiple of the counts, in [low, high]. All
    losses grow with the page, so the smallest one is the best for these counts.
    """
    page = -(-low // step) * step
    if page > high:
        return
    if len(counts) == len(units):
        yield page, counts
        return
    unit = units[len(counts)]
    fewest = max(1, -(-page * (1000 - loss) // (1000 * unit)))
    for count in range(fewest, high // unit + 1):
        used = count * unit
        yield from _shapes(
            units,
            loss,
            (*counts, count),
            math.lcm(step, count),
            max(page, used),
            min(high, _highest(used, loss)),
        )


def _highest(used: int, loss: int) -> int:
    """The largest page of which `used` leaves at most `loss` thousandths."""
    return used * 1000 // (1000 - loss)


def plan_layout(
    spec: ModelSpec, *, tp: int, dtypes: CacheDtypes, block_size: int = MIN_BLOCK
) -> CacheLayout:
    """The one cache layout of a model at a TP size; independent of memory.

    Raises:
        ShardError: the model cannot be split over `tp` ranks.
        PlanError: `block_size` is not a positive multiple of 16.
    """
    check_tp_size(spec, tp)
    if block_size < MIN_BLOCK or block_size % MIN_BLOCK:
        raise PlanError(
            f"block_size={block_size} is not a positive multiple of {MIN_BLOCK} tokens, "
            f"which the attention kernels read at a time: give {MIN_BLOCK} or a multiple of it"
        )
    packed = pack_sections(
        [
            rank_sections(spec, tp=tp, rank=rank, dtypes=dtypes, block_size=block_size)
            for rank in range(tp)
        ]
    )
    page_bytes, kinds = _kinds(spec, packed)
    layout = CacheLayout(
        architecture=spec.architecture,
        tensor_parallel_size=tp,
        block_size=block_size,
        dtypes=dtypes,
        page_bytes=page_bytes,
        kinds=kinds,
    )
    check_layout(layout)
    return layout


def _kinds(
    spec: ModelSpec, packed: Mapping[str, tuple[Section, ...]]
) -> tuple[int, tuple[UnitKind, ...]]:
    """Page bytes, and the kinds with their places in it."""
    unit_bytes = {
        name: sections[-1].offset_bytes + sections[-1].num_bytes
        for name, sections in packed.items()
    }
    shape = search_page(tuple(unit_bytes.values()))
    windows = {
        kv_kind_name(layer.attention.window): layer.attention.window
        for layer in spec.layers
        if layer.attention is not None
    }
    return shape.page_bytes, tuple(
        UnitKind(
            name=name,
            sections=sections,
            unit_bytes=unit_bytes[name],
            stride_bytes=shape.page_bytes // count,
            units_per_page=count,
            window=windows.get(name),
        )
        for (name, sections), count in zip(packed.items(), shape.units_per_page, strict=True)
    )


def padded_rule(
    *, attention_bytes_per_token: int, state_bytes: int, min_block: int = MIN_BLOCK
) -> PaddedRule:
    """vLLM's rule: grow the attention block until its page covers a layer's state, pad the state.

    Args:
        attention_bytes_per_token: of one layer on one rank.
        state_bytes: of one layer on one rank.
    """
    blocks = -(-state_bytes // (min_block * attention_bytes_per_token))
    block_size = min_block * blocks
    page_bytes = block_size * attention_bytes_per_token
    return PaddedRule(
        block_size=block_size, page_bytes=page_bytes, waste=page_bytes / state_bytes - 1.0
    )


def padded_rule_for(spec: ModelSpec, *, tp: int, dtypes: CacheDtypes) -> PaddedRule | None:
    """`padded_rule` for the largest state and the smallest attention layer; None without both."""

    def token_bytes(mixer: Attention) -> int:
        groups = max(mixer.shard(tp=tp, rank=rank).num_groups for rank in range(tp))
        return 2 * groups * mixer.head_dim * DTYPE_BYTES[dtypes.kv]

    def state_bytes(mixer: Mamba2) -> int:
        channels = max(mixer.shard(tp=tp, rank=rank).conv_dim for rank in range(tp))
        ssm = mixer.num_heads // tp * mixer.head_dim * mixer.state_dim
        conv = (mixer.conv_width - 1) * channels
        return conv * DTYPE_BYTES[dtypes.conv] + ssm * DTYPE_BYTES[dtypes.ssm]

    attention = {layer.attention for layer in spec.layers if layer.attention is not None}
    recurrent = {layer.mamba2 for layer in spec.layers if layer.mamba2 is not None}
    if not attention or not recurrent:
        return None
    return padded_rule(
        attention_bytes_per_token=min(map(token_bytes, attention)),
        state_bytes=max(map(state_bytes, recurrent)),
    )


def units_for(layout: CacheLayout, kind: UnitKind, tokens: int) -> int:
    """Units of `kind` that one sequence of `tokens` tokens holds."""
    if kind.is_state:
        return 1
    blocks = -(-tokens // layout.block_size)
    if kind.window is None:
        return blocks
    return min(blocks, -(-kind.window // layout.block_size) + 1)


def pages_for(layout: CacheLayout, num_seqs: int, tokens_each: int) -> int:
    """Pages, without the reserved one, that `num_seqs` sequences of `tokens_each` tokens take."""
    return sum(
        -(-num_seqs * units_for(layout, kind, tokens_each) // kind.units_per_page)
        for kind in layout.kinds
    )


def max_sequences(layout: CacheLayout, num_pages: int, tokens_each: int) -> int:
    """How many sequences of `tokens_each` >= 1 tokens fit at once; `num_pages` counts page 0."""
    usable = max(0, num_pages - 1)
    bound = min(
        usable * kind.units_per_page // units_for(layout, kind, tokens_each)
        for kind in layout.kinds
    )
    counts = range(bound + 1)
    fitting = bisect_right(counts, usable, key=lambda seqs: pages_for(layout, seqs, tokens_each))
    return fitting - 1


def max_tokens(layout: CacheLayout, num_pages: int) -> int | None:
    """Tokens of the longest single sequence that fits, 0 if none does.

    None where length takes no memory: no attention, or attention in windows only.
    """
    if max_sequences(layout, num_pages, 1) == 0:
        return 0
    growing = [kind for kind in layout.kv_kinds if kind.window is None]
    if not growing:
        windows = [kind.window for kind in layout.kv_kinds if kind.window is not None]
        longest = max(windows, default=0) + 2 * layout.block_size
        if pages_for(layout, 1, longest) <= num_pages - 1:
            return None
    else:
        longest = (num_pages - 1) * growing[0].units_per_page * layout.block_size
    lengths = range(0, longest + 1, layout.block_size)
    fitting = bisect_right(lengths, num_pages - 1, key=lambda tokens: pages_for(layout, 1, tokens))
    return lengths[fitting - 1]


def pages_in_budget(layout: CacheLayout, budget_bytes: int) -> int:
    """Pages, the reserved one included, that `budget_bytes` of one rank hold."""
    return max(0, budget_bytes) // layout.page_bytes


def fit_limits(
    layout: CacheLayout,
    num_pages: int,
    *,
    model_max_len: int,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    strict: bool = False,
) -> Limits:
    """The limits to serve with: what was asked for, or the defaults, reduced to what fits.

    Args:
        num_pages: of each rank, page 0 included (`pages_in_budget`).
        model_max_len: tokens that the model was made for, the default of `max_model_len`.
        max_num_seqs: sequences that run at once, one block of each kv group apiece.
        strict: raise where a limit, asked for or default, would be reduced.
    Raises:
        PlanError: not even one sequence of one block fits, or `strict` and something does not.
    """
    for option, value in (("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs)):
        if value is not None and value < 1:
            raise PlanError(f"{option}={value} is less than 1: give a positive number or none")
    needed = 1 + pages_for(layout, 1, 1)
    if num_pages < needed:
        raise PlanError(
            f"the cache needs at least {needed} pages of {layout.page_bytes:,} bytes on each rank "
            f"({needed * layout.page_bytes:,} bytes: the reserved page and one sequence of one "
            f"block), and {num_pages} fit: give it more memory, a smaller cache dtype or more ranks"
        )
    length, notes = _fit_length(layout, num_pages, max_model_len, model_max_len)
    seqs, seq_notes = _fit_seqs(layout, num_pages, max_num_seqs)
    notes += seq_notes
    if strict and notes:
        raise PlanError("the limits do not fit, and may not be reduced: " + "; ".join(notes))
    return Limits(num_pages=num_pages, max_model_len=length, max_num_seqs=seqs, notes=notes)


def _fit_length(
    layout: CacheLayout, num_pages: int, asked: int | None, model_max_len: int
) -> tuple[int, tuple[str, ...]]:
    """The longest sequence to serve, and a note for each reduction."""
    notes: tuple[str, ...] = ()
    length = model_max_len if asked is None else asked
    if length > model_max_len:
        notes += (
            f"max_model_len={length} is more than the {model_max_len} tokens that the model was "
            f"made for: reduced to {model_max_len}",
        )
        length = model_max_len
    fitting = max_tokens(layout, num_pages)
    if fitting is not None and length > fitting:
        notes += (
            f"max_model_len={length}{_default(asked)} takes {1 + pages_for(layout, 1, length)} "
            f"pages, page 0 included, and there are {num_pages}: reduced to {fitting}, the "
            "longest sequence that fits",
        )
        length = fitting
    return length, notes


def _fit_seqs(
    layout: CacheLayout, num_pages: int, asked: int | None
) -> tuple[int, tuple[str, ...]]:
    """How many sequences to run at once, and a note if that was reduced."""
    seqs = DEFAULT_NUM_SEQS if asked is None else asked
    fitting = max_sequences(layout, num_pages, 1)
    if seqs <= fitting:
        return seqs, ()
    note = (
        f"max_num_seqs={seqs}{_default(asked)} takes {1 + pages_for(layout, seqs, 1)} pages, "
        f"page 0 included, with one block each, and there are {num_pages}: reduced to {fitting}"
    )
    return fitting, (note,)


def _default(asked: int | None) -> str:
    return " (the default)" if asked is None else ""
