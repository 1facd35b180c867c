"""Brings a model up: one layout for all ranks before weights are read, one plan once they stand."""

import logging
from dataclasses import dataclass, replace

from plait.cluster.executors.base import Executor
from plait.cluster.planner import (
    DEFAULT_NUM_SEQS,
    Limits,
    fit_limits,
    pages_for,
    pages_in_budget,
    plan_layout,
)
from plait.cluster.settings import EngineSettings
from plait.worker import protocol
from plait.worker.architectures import load_spec
from plait.worker.dtypes import resolve_cache_dtypes, resolve_dtype
from plait.worker.errors import PlanError, PlanMismatch
from plait.worker.plan import CacheLayout, CachePlan, compare_sections, layout_sections
from plait.worker.spec import ModelSpec

logger = logging.getLogger(__name__)
DEFAULT_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedModel:
    """A model whose ranks are loaded, verified and warm."""

    spec: ModelSpec
    dtype: str
    plan: CachePlan
    limits: Limits
    max_num_batched_tokens: int
    weight_bytes: tuple[int, ...]  # by rank
    backends: dict[str, str]


def layout_for(spec: ModelSpec, settings: EngineSettings) -> tuple[str, CacheLayout]:
    """The dtype and the cache layout that these settings give a model; reads no weight."""
    dtype = resolve_dtype(settings.dtype, spec.dtype)
    dtypes = resolve_cache_dtypes(
        model_dtype=dtype,
        config_ssm_dtype=spec.ssm_dtype,
        kv=settings.kv_cache_dtype,
        mamba=settings.mamba_cache_dtype,
        ssm=settings.mamba_ssm_cache_dtype,
    )
    layout = plan_layout(
        spec, tp=settings.tensor_parallel_size, dtypes=dtypes, block_size=settings.block_size
    )
    return dtype, layout


def start_model(
    executor: Executor,
    model_path: str,
    settings: EngineSettings,
    *,
    device: str,
    decodable_vocab_size: int,
) -> StartedModel:
    """Load `model_path` on the ranks of `executor` and fix the cache plan.

    Raises:
        PlaitError: config, size, memory, weights or a rank that disagrees; says which and why.
    """
    spec = load_spec(model_path)
    dtype, layout = layout_for(spec, settings)
    estimate = _fit(spec, layout, settings, _budget(settings, device, []))
    loaded = executor.load(
        protocol.Load(
            model_path=model_path,
            layout=layout,
            dtype=dtype,
            decodable_vocab_size=decodable_vocab_size,
            max_num_seqs=estimate.max_num_seqs,
            max_model_len=estimate.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            debug_poison=settings.debug_poison,
            quantization=settings.quantization,
            rounding_seed=(settings.seed or 0)
            if settings.mamba_ssm_rounding == "stochastic"
            else None,
        )
    )
    _verify(layout, loaded)
    limits = _fit(spec, layout, settings, _budget(settings, device, loaded))
    limits = _at_most(limits, estimate)
    plan = CachePlan(layout=layout, num_pages=limits.num_pages)
    for rank, ready in enumerate(executor.allocate(protocol.Allocate(plan=plan))):
        if ready.plan_digest != plan.digest:
            raise PlanMismatch(
                f"rank {rank} acknowledged plan {ready.plan_digest[:12]}, not {plan.digest[:12]}"
            )
    for note in limits.notes:
        logger.warning("%s", note)
    return StartedModel(
        spec=spec,
        dtype=dtype,
        plan=plan,
        limits=limits,
        max_num_batched_tokens=max(settings.max_num_batched_tokens, limits.max_num_seqs),
        weight_bytes=tuple(reply.weight_bytes for reply in loaded),
        backends=loaded[0].backends,
    )


def _budget(settings: EngineSettings, device: str, loaded: list[protocol.Loaded]) -> int | None:
    """Bytes of cache for each rank; None while nothing is known about the device yet.

    Raises:
        PlanError: `cache_memory` is more than the ranks have free.
    """
    asked = settings.cache_memory
    if device == "cpu" and asked is None:
        asked = DEFAULT_CPU_CACHE_BYTES
    if not loaded:
        return asked
    if device == "cpu":  # its ranks share one memory
        free = min(reply.free_bytes for reply in loaded) // len(loaded)
    else:
        unused = 1.0 - settings.gpu_memory_utilization
        free = min(reply.free_bytes - int(unused * reply.total_bytes) for reply in loaded)
    if asked is None:
        return free
    if settings.cache_memory is not None and asked > free:
        raise PlanError(
            f"cache_memory={asked:,} bytes per rank, but the fullest of {len(loaded)} ranks has "
            f"{free:,} free: ask for less"
        )
    return min(asked, free)


def _fit(
    spec: ModelSpec, layout: CacheLayout, settings: EngineSettings, budget: int | None
) -> Limits:
    """The limits that `budget` bytes allow, with no more pages than those limits can use."""
    if budget is None:
        return Limits(
            num_pages=0,
            max_model_len=min(settings.max_model_len or spec.max_model_len, spec.max_model_len),
            max_num_seqs=settings.max_num_seqs or DEFAULT_NUM_SEQS,
        )
    limits = fit_limits(
        layout,
        pages_in_budget(layout, budget),
        model_max_len=spec.max_model_len,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        strict=settings.strict,
    )
    useful = 1 + pages_for(layout, limits.max_num_seqs, limits.max_model_len)
    return replace(limits, num_pages=min(limits.num_pages, useful))


def _at_most(limits: Limits, loaded_with: Limits) -> Limits:
    """`limits`, no larger than those which the ranks were told when they loaded."""
    return replace(
        limits,
        max_model_len=min(limits.max_model_len, loaded_with.max_model_len),
        max_num_seqs=min(limits.max_num_seqs, loaded_with.max_num_seqs),
    )


def _verify(layout: CacheLayout, loaded: list[protocol.Loaded]) -> None:
    """Compare what every rank reports with the layout, on this side too."""
    lines = []
    for rank, reply in enumerate(loaded):
        lines += [
            f"rank {rank}: {line}"
            for line in compare_sections(layout_sections(layout, rank=rank), reply.sections)
        ]
        if reply.layout_digest != layout.digest:
            lines.append(
                f"rank {rank}: holds layout {reply.layout_digest[:12]}, not {layout.digest[:12]}"
            )
    if lines:
        raise PlanMismatch("ranks do not agree with the plan:\n  " + "\n  ".join(lines))
