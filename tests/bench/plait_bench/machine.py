"""What this machine can do with so many threads, measured through torch.

- read: the sum, or the dot product with itself, of a buffer many times the size of any cache
- copy: one such buffer into another, bytes read plus bytes written
- vector: `x + y * z` in float32 over buffers that fit into the second-level cache, from the
  difference of two sizes, which takes the cost of a call out; threads multiply it
- gemm: `F.linear` over the matrix shapes of a model at each number of rows, in float32 and
  bfloat16: operations of all shapes over time of all; a weight stays in cache where it fits
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import torch.nn.functional as F

from plait_bench.roofline import Limits

_BUFFER_BYTES: Final = 512 << 20
_VECTOR_SIZES: Final = (2048, 16384)  # floats of each of three buffers
_VECTOR_CALLS: Final = 500
_DTYPES: Final = (torch.float32, torch.bfloat16)
_FEATURES: Final = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "sve", "bf16")
_MIN_RUNS: Final = 2
_MIN_SECONDS: Final = 0.3


def describe() -> dict[str, Any]:
    """Facts of the machine that numbers depend on, and nothing that names it."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    fields = dict(
        (part.strip() for part in line.split(":", 1)) for line in text.splitlines() if ":" in line
    )
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "processor": fields.get("model name") or platform.machine(),
        "features": [feature for feature in _FEATURES if feature in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@torch.inference_mode()
def measure(*, shapes: Mapping[tuple[int, int], int], rows: Iterable[int], threads: int) -> Limits:
    """Limits for a model with so many matrices of each (out, in) shape, at each number of rows."""
    torch.set_num_threads(threads)
    read_bytes, copy_bytes = _bandwidths()
    rows = sorted(set(rows))
    return Limits(
        read_bytes=read_bytes,
        copy_bytes=copy_bytes,
        vector_flops=_vector_flops() * threads,
        gemm_flops={
            str(dtype).removeprefix("torch."): {
                count: _gemm_flops(shapes, count, dtype) for count in rows
            }
            for dtype in _DTYPES
        },
    )


def best_seconds(run: Callable[[], object]) -> float:
    """The shortest of several runs after a warm-up: the one that was disturbed least."""
    run()
    times: list[float] = []
    while len(times) < _MIN_RUNS or sum(times) < _MIN_SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _bandwidths() -> tuple[float, float]:
    """Bytes per second of reading, and of copying (read plus written)."""
    source = torch.ones(_BUFFER_BYTES // 4)
    target = torch.empty_like(source)
    read_s = min(best_seconds(source.sum), best_seconds(lambda: torch.dot(source, source)))
    copy_s = best_seconds(lambda: target.copy_(source))
    return _BUFFER_BYTES / read_s, 2 * _BUFFER_BYTES / copy_s


def _vector_flops() -> float:
    small, large = (_vector_seconds(size) for size in _VECTOR_SIZES)
    if large <= small:  # so noisy that the difference says nothing
        return 2 * _VECTOR_SIZES[1] / large
    return 2 * (_VECTOR_SIZES[1] - _VECTOR_SIZES[0]) / (large - small)


def _vector_seconds(size: int) -> float:
    x, y, z = (torch.zeros(size) for _ in range(3))

    def calls() -> None:
        for _ in range(_VECTOR_CALLS):
            x.addcmul_(y, z)

    return best_seconds(calls) / _VECTOR_CALLS


def _gemm_flops(shapes: Mapping[tuple[int, int], int], rows: int, dtype: torch.dtype) -> float:
    flops, seconds = 0.0, 0.0
    for (out_dim, in_dim), count in shapes.items():
        x = torch.randn(rows, in_dim).to(dtype)
        weight = torch.randn(out_dim, in_dim).to(dtype)
        flops += 2.0 * rows * out_dim * in_dim * count
        seconds += best_seconds(lambda x=x, weight=weight: F.linear(x, weight)) * count
    return flops / seconds
