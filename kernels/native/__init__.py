"""C code of the CPU kernels: built by gcc at first use, one library per op and instruction set."""

from plait.kernels.native.build import NativeBuildError, unavailable
from plait.kernels.native.isa import ISA_VARIABLE, ISAS, Isa, chosen_isa
from plait.kernels.native.library import NativeLibrary, dtype_code, pointer
from plait.kernels.native.recording import MemoryPool, Recording, record, recorded

__all__ = [
    "ISAS",
    "ISA_VARIABLE",
    "Isa",
    "MemoryPool",
    "NativeBuildError",
    "NativeLibrary",
    "Recording",
    "chosen_isa",
    "dtype_code",
    "pointer",
    "record",
    "recorded",
    "unavailable",
]
