"""What `plait plan` says about a model on given devices: one frozen report, as JSON or as text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from plait.cluster.planner import (
    Limits,
    PaddedRule,
    max_sequences,
    max_tokens,
    padded_rule_for,
)
from plait.worker.cost import decode_step_cost, weight_bytes
from plait.worker.dtypes import DTYPE_BYTES, CacheDtypes
from plait.worker.errors import PlanError
from plait.worker.parameters import rank_parameters
from plait.worker.plan import CacheLayout, UnitKind
from plait.worker.spec import ModelSpec, valid_tp_sizes

CAPACITY_TOKENS = (12, 128, 1024, 8192, 32768)
DECODE_BATCHES = (1, 8, 64)
DECODE_CONTEXT = 1024

_STEP_TOKENS = 2048  # of a prefill step, for the estimate of activations
_STEP_LOGITS = 256  # rows of float32 logits in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory of one device. What is left for the cache is an estimate until warm-up."""

    device_bytes: int
    utilization: float
    weight_bytes: int  # of the rank that holds most
    activation_bytes: int
    cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    """One kind of cache unit. `padding_bytes` is what alignment and uniform sizes add inside a
    unit on the rank that needs least; `lost_*` is what rounding to the stride loses."""

    name: str
    sections: int
    unit_bytes: int
    padding_bytes: int
    stride_bytes: int
    units_per_page: int
    lost_bytes_per_unit: int
    lost_bytes_per_page: int
    lost_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many sequences of this length fit at once, and how many under the padded-page rule."""

    tokens: int
    sequences: int
    padded_sequences: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Necessary work of a decode step on the rank that has most of it."""

    batch: int
    context: int
    num_bytes: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything that follows from a model, a layout and a number of pages; sizes are per rank."""

    architecture: str
    tensor_parallel_size: int
    valid_tensor_parallel_sizes: tuple[int, ...]
    dtype: str
    quantization: str | None
    cache_dtypes: CacheDtypes
    layout_digest: str
    weight_bytes: tuple[int, ...]
    memory: MemoryBudget | None
    block_size: int
    page_bytes: int
    kinds: tuple[KindReport, ...]
    num_pages: int
    arena_bytes: int
    max_model_len: int
    max_num_seqs: int
    longest_sequence: int | None  # tokens that fit, None where length takes no memory
    capacity: tuple[Capacity, ...]
    decode: tuple[DecodeStep, ...]
    padded_rule: PaddedRule | None
    notes: tuple[str, ...]


def memory_budget(
    spec: ModelSpec,
    *,
    tp: int,
    dtype: str,
    device_bytes: int,
    utilization: float = 0.9,
    quantization: str | None = None,
) -> MemoryBudget:
    """Split the memory of a device into weights, activations and cache.

    Raises:
        PlanError: nothing is left for the cache, or `utilization` is not in (0, 1].
    """
    if not 0.0 < utilization <= 1.0:
        raise PlanError(
            f"gpu_memory_utilization={utilization} is not a share of the memory: "
            "give a number above 0 and up to 1"
        )
    weights = max(_weight_bytes(spec, tp, dtype, quantization))
    activations = activation_bytes(spec, tp=tp, dtype=dtype)
    cache = int(device_bytes * utilization) - weights - activations
    if cache <= 0:
        raise PlanError(
            f"{spec.architecture} over {tp} ranks needs {human_bytes(weights)} for weights and "
            f"{human_bytes(activations)} for activations on each, and {utilization:.0%} of "
            f"{human_bytes(device_bytes)} leaves nothing for the cache: use more ranks (sizes that "
            f"work: {_join(valid_tp_sizes(spec))}), or devices with more memory"
        )
    return MemoryBudget(
        device_bytes=device_bytes,
        utilization=utilization,
        weight_bytes=weights,
        activation_bytes=activations,
        cache_bytes=cache,
    )


def activation_bytes(spec: ModelSpec, *, tp: int, dtype: str) -> int:
    """A reserve for activations: two hidden and two of the widest rows per token, and logits."""
    parameters = rank_parameters(spec, tp=tp, rank=0)
    vocab_rows = parameters[0].shape[0]
    rows = [p.shape[-2] for p in parameters[1:] if len(p.shape) > 1 and p.name != "head"]
    per_token = 2 * (spec.hidden_dim + max(rows, default=0)) * DTYPE_BYTES[dtype]
    return _STEP_TOKENS * per_token + _STEP_LOGITS * vocab_rows * DTYPE_BYTES["float32"]


def build_report(
    spec: ModelSpec,
    layout: CacheLayout,
    limits: Limits,
    *,
    dtype: str,
    quantization: str | None = None,
    memory: MemoryBudget | None = None,
    batches: Sequence[int] = DECODE_BATCHES,
    context: int = DECODE_CONTEXT,
) -> PlanReport:
    """Work out the whole report; `dtype` is that of the weights."""
    tp = layout.tensor_parallel_size
    padded = padded_rule_for(spec, tp=tp, dtypes=layout.dtypes)
    lengths = [tokens for tokens in CAPACITY_TOKENS if tokens < limits.max_model_len]
    return PlanReport(
        architecture=spec.architecture,
        tensor_parallel_size=tp,
        valid_tensor_parallel_sizes=valid_tp_sizes(spec),
        dtype=dtype,
        cache_dtypes=layout.dtypes,
        layout_digest=layout.digest,
        quantization=quantization,
        weight_bytes=_weight_bytes(spec, tp, dtype, quantization),
        memory=memory,
        block_size=layout.block_size,
        page_bytes=layout.page_bytes,
        kinds=tuple(_kind(layout, kind) for kind in layout.kinds),
        num_pages=limits.num_pages,
        arena_bytes=limits.num_pages * layout.page_bytes,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        longest_sequence=max_tokens(layout, limits.num_pages),
        capacity=tuple(
            Capacity(
                tokens=tokens,
                sequences=max_sequences(layout, limits.num_pages, tokens),
                padded_sequences=None
                if padded is None
                else padded_sequences(spec, layout, padded, limits.num_pages, tokens),
            )
            for tokens in (*lengths, limits.max_model_len)
        ),
        decode=tuple(
            _decode(spec, layout, dtype, quantization, batch=batch, context=context)
            for batch in batches
        ),
        padded_rule=padded,
        notes=limits.notes,
    )


def padded_sequences(
    spec: ModelSpec, layout: CacheLayout, rule: PaddedRule, num_pages: int, tokens: int
) -> int:
    """Sequences that the same bytes hold under the padded rule.

    Every attention layer takes whole blocks, every recurrent layer one page. In its favour: pages
    are counted by layer, without the layers that it adds to make groups equal.
    """
    blocks = -(-tokens // rule.block_size)
    pages = 0
    for layer in spec.layers:
        if layer.attention is not None:
            window = layer.attention.window
            most = blocks if window is None else -(-window // rule.block_size) + 1
            pages += min(blocks, most)
        if layer.mamba2 is not None:
            pages += 1
    return num_pages * layout.page_bytes // rule.page_bytes // pages


def to_json(report: PlanReport) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report))


def _kind(layout: CacheLayout, kind: UnitKind) -> KindReport:
    payload = min(
        sum(
            math.prod(section.shapes[rank]) * DTYPE_BYTES[section.dtype]
            for section in kind.sections
        )
        for rank in range(layout.tensor_parallel_size)
    )
    lost = kind.stride_bytes - kind.unit_bytes
    return KindReport(
        name=kind.name,
        sections=len(kind.sections),
        unit_bytes=kind.unit_bytes,
        padding_bytes=kind.unit_bytes - payload,
        stride_bytes=kind.stride_bytes,
        units_per_page=kind.units_per_page,
        lost_bytes_per_unit=lost,
        lost_bytes_per_page=lost * kind.units_per_page,
        lost_share=kind.waste,
    )


def _weight_bytes(
    spec: ModelSpec, tp: int, dtype: str, quantization: str | None
) -> tuple[int, ...]:
    """Of every rank."""
    return tuple(
        weight_bytes(spec, tp=tp, rank=rank, dtype=dtype, quantization=quantization)
        for rank in range(tp)
    )


def _decode(
    spec: ModelSpec,
    layout: CacheLayout,
    dtype: str,
    quantization: str | None,
    *,
    batch: int,
    context: int,
) -> DecodeStep:
    tp = layout.tensor_parallel_size
    costs = [
        decode_step_cost(
            spec,
            tp=tp,
            rank=rank,
            dtype=dtype,
            dtypes=layout.dtypes,
            batch=batch,
            context=context,
            quantization=quantization,
        )
        for rank in range(tp)
    ]
    return DecodeStep(
        batch=batch,
        context=context,
        num_bytes=max(cost.bytes for cost in costs),
        flops=max(cost.flops for cost in costs),
    )


def render(report: PlanReport) -> str:
    """The report as text: short tables with human units."""
    parts = [
        _render_head(report),
        _render_kinds(report),
        _render_capacity(report),
        _render_decode(report),
    ]
    if report.padded_rule is not None:
        rule = report.padded_rule
        parts.append(
            f"One padded page size for both kinds (vLLM's rule) would make blocks of "
            f"{rule.block_size} tokens,\nlayer pages of {human_bytes(rule.page_bytes)} and pad "
            f"each state page by {rule.waste:.2%}."
        )
    parts += [f"note: {note}" for note in report.notes]
    return "\n\n".join(parts) + "\n"


def _render_head(report: PlanReport) -> str:
    dtypes, memory = report.cache_dtypes, report.memory
    least, most = map(human_bytes, (min(report.weight_bytes), max(report.weight_bytes)))
    rows = [
        ("model", report.architecture),
        (
            "tensor parallel",
            f"{report.tensor_parallel_size} (sizes that work: "
            f"{_join(report.valid_tensor_parallel_sizes)})",
        ),
        (
            "dtypes",
            f"weights {report.quantization or report.dtype}, kv {dtypes.kv}, conv {dtypes.conv}, "
            f"ssm {dtypes.ssm}",
        ),
        ("weights per rank", most if least == most else f"{least} to {most}"),
    ]
    if memory is not None:
        rows.append(
            (
                "memory per rank",
                f"{memory.utilization:.0%} of {human_bytes(memory.device_bytes)}: cache "
                f"{human_bytes(memory.cache_bytes)}, activations "
                f"{human_bytes(memory.activation_bytes)}",
            )
        )
    rows += [
        (
            "arena per rank",
            f"{report.num_pages} pages of {human_bytes(report.page_bytes)} = "
            f"{human_bytes(report.arena_bytes)} (page 0 is reserved)",
        ),
        ("limits", f"{report.max_model_len} tokens, {report.max_num_seqs} sequences at once"),
        ("longest sequence", _length(report.longest_sequence)),
        ("layout", report.layout_digest),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _render_kinds(report: PlanReport) -> str:
    header = ("unit", "bytes", "stride", "per page", "lost/unit", "lost/page", "lost", "padding")
    return _table(
        header,
        [
            (
                "state slot"
                if kind.name == "state"
                else f"{kind.name} block ({report.block_size})",
                human_bytes(kind.unit_bytes),
                human_bytes(kind.stride_bytes),
                str(kind.units_per_page),
                human_bytes(kind.lost_bytes_per_unit),
                human_bytes(kind.lost_bytes_per_page),
                f"{kind.lost_share:.2%}",
                human_bytes(kind.padding_bytes),
            )
            for kind in report.kinds
        ],
    )


def _render_capacity(report: PlanReport) -> str:
    return _table(
        ("tokens each", "sequences", "padded rule"),
        [
            (
                str(row.tokens),
                str(row.sequences),
                "-" if row.padded_sequences is None else str(row.padded_sequences),
            )
            for row in report.capacity
        ],
    )


def _render_decode(report: PlanReport) -> str:
    return _table(
        ("decode batch", "context", "bytes/step", "FLOPs/step"),
        [
            (
                str(step.batch),
                str(step.context),
                human_bytes(step.num_bytes),
                _scaled(step.flops, 1000, ("", " k", " M", " G", " T", " P")),
            )
            for step in report.decode
        ],
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if idx == 0 else f"{cell:>{width}}"
            for idx, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    )


def human_bytes(num_bytes: float) -> str:
    """Bytes in binary units with up to four digits: 1536 gives "1.5 KiB"."""
    return _scaled(num_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.4g}{units[power]}" if value < 1000 else f"{value:.0f}{units[power]}"


def _length(tokens: int | None) -> str:
    return "any: length takes no memory" if tokens is None else f"{tokens} tokens"


def _join(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
