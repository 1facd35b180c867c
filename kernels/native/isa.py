"""The instruction sets that the C kernels are built for, and the best one of this CPU."""

import logging
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from plait.kernels.errors import BackendError

ISA_VARIABLE: Final = "PLAIT_NATIVE_ISA"

logger = logging.getLogger(__name__)

_AVX512: Final = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_AVX2: Final = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Isa:
    """Compiler flags of one variant, and the flags of /proc/cpuinfo that it needs."""

    name: str
    compiler_flags: tuple[str, ...] = ()
    cpu_flags: frozenset[str] = frozenset()

    @property
    def runs_here(self) -> bool:
        return self.cpu_flags <= _cpu_flags()


# Best first. `avx512` is split, for the first CPUs that had it lack its products of 16-bit floats.
ISAS: Final = {
    isa.name: isa
    for isa in (
        Isa(
            name="avx512_bf16",
            compiler_flags=(
                "-march=x86-64-v4",
                "-mavx512bf16",
                "-mavx512vnni",
                "-mprefer-vector-width=512",
            ),
            cpu_flags=_AVX2 | _AVX512 | {"avx512_bf16", "avx512_vnni"},
        ),
        Isa(
            name="avx512",
            compiler_flags=("-march=x86-64-v4", "-mprefer-vector-width=512"),
            cpu_flags=_AVX2 | _AVX512,
        ),
        Isa(name="avx2", compiler_flags=("-march=x86-64-v3",), cpu_flags=_AVX2),
        Isa(name="portable"),
    )
}


@cache
def chosen_isa() -> Isa:
    """The best instruction set of this CPU, or the one that PLAIT_NATIVE_ISA names.

    Raises:
        BackendError: the variable names no instruction set, or one that this CPU lacks.
    """
    runnable = {isa.name: isa for isa in ISAS.values() if isa.runs_here}
    name = os.environ.get(ISA_VARIABLE) or next(iter(runnable))
    if name not in runnable:
        names = ", ".join(runnable)
        raise BackendError(f"{ISA_VARIABLE}: expected one of {names} on this CPU, got {name!r}")
    logger.info("C kernels use the instruction set %s", name)
    return runnable[name]


@cache
def _cpu_flags() -> frozenset[str]:
    """Features of the first CPU; empty where the kernel tells none (then `portable` is left)."""
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
