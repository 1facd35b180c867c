"""What `plait plan` prints."""

from plait.cluster.controller import DEFAULT_CPU_CACHE_BYTES, layout_for
from plait.cluster.plan_report import build_report, memory_budget, render, to_json
from plait.cluster.planner import fit_limits, pages_in_budget
from plait.cluster.settings import EngineSettings
from plait.worker.architectures import load_spec


def plan_text(
    model: str, settings: EngineSettings, *, device_memory: int | None, as_json: bool
) -> str:
    """The plan of a checkpoint folder or config.json, as tables or as JSON.

    The cache gets `cache_memory` if that is set, else what a device of `device_memory` bytes has
    left beside the weights, else the default of a CPU.

    Raises:
        PlaitError: the config cannot be served, or nothing fits.
    """
    spec = load_spec(model)
    dtype, layout = layout_for(spec, settings)
    memory = None
    cache_bytes = settings.cache_memory
    if device_memory is not None:
        memory = memory_budget(
            spec,
            tp=settings.tensor_parallel_size,
            dtype=dtype,
            device_bytes=device_memory,
            utilization=settings.gpu_memory_utilization,
            quantization=settings.quantization,
        )
        cache_bytes = memory.cache_bytes if cache_bytes is None else cache_bytes
    if cache_bytes is None:
        cache_bytes = DEFAULT_CPU_CACHE_BYTES
    limits = fit_limits(
        layout,
        pages_in_budget(layout, cache_bytes),
        model_max_len=spec.max_model_len,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        strict=settings.strict,
    )
    report = build_report(
        spec, layout, limits, dtype=dtype, quantization=settings.quantization, memory=memory
    )
    return to_json(report).decode() if as_json else render(report)
