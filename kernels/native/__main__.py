"""Build all C code of the package ahead of time, for an image without a compiler.

    python -m plait.kernels.native [ISA ...]

Without names, all instruction sets that the compiler can target are built.
"""

import platform
import sys
from pathlib import Path

from plait.kernels.native.build import NativeBuildError, build, cache_folder, is_writable
from plait.kernels.native.isa import ISAS, Isa


def main() -> None:
    names = sys.argv[1:] or [name for name, isa in ISAS.items() if _can_be_built(isa)]
    unknown = set(names) - set(ISAS)
    if unknown:
        sys.exit(f"expected some of {', '.join(ISAS)}, got {', '.join(sorted(unknown))}")
    if not is_writable(cache_folder()):
        sys.exit(f"{cache_folder()} cannot be written")
    package = Path(__file__).parents[2]  # ops of kernels, collectives of worker
    sources = [*sorted(package.glob("*/*/native.c")), Path(__file__).with_name("probe.c")]
    try:
        for name in names:
            for source in sources:
                build(source, ISAS[name])
    except NativeBuildError as exc:
        sys.exit(str(exc))
    print(f"{len(names) * len(sources)} libraries in {cache_folder()}")


def _can_be_built(isa: Isa) -> bool:
    """Whether compilers of this machine know `isa`, be it that of this CPU or of a better one."""
    return platform.machine() == "x86_64" or not isa.compiler_flags


if __name__ == "__main__":
    main()
