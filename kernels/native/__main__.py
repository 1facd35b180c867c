"""Build the C kernels of every op ahead of time, for an image without a compiler.

    python -m plait.kernels.native [ISA ...]

Without names, all instruction sets that the compiler can target are built.
"""

import sys
from pathlib import Path

from plait.kernels.native.build import build, cache_folder
from plait.kernels.native.isa import ISAS


def main() -> None:
    names = sys.argv[1:] or list(ISAS)
    unknown = set(names) - set(ISAS)
    if unknown:
        sys.exit(f"expected some of {', '.join(ISAS)}, got {', '.join(sorted(unknown))}")
    kernels = Path(__file__).parents[1]
    sources = [*sorted(kernels.glob("*/native.c")), Path(__file__).with_name("probe.c")]
    for name in names:
        for source in sources:
            build(source, ISAS[name])
    print(f"{len(names) * len(sources)} libraries in {cache_folder()}")


if __name__ == "__main__":
    main()
