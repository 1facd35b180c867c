"""Checks and dispatch of silu_and_mul.

T packed tokens, I intermediate dim.
"""

from torch import Tensor

from plait.kernels.arguments import Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS
from plait.kernels.errors import ShapeError


def silu_and_mul(x: Tensor, *, gate_multiplier: float = 1.0) -> Tensor:
    """Gate every token: silu(gate_multiplier * gate) * up.

    Args:
        x: (T, 2I), any float dtype; the first I channels are the gate, the others are `up`.
        gate_multiplier: multiplies the gate before its silu.
    Returns:
        (T, I) in the dtype of `x`, computed in float32 (float64 for float64) and rounded once.
    Raises:
        ShapeError, DtypeError, BackendError: names the argument.
    Source: Shazeer 2020 (GLU variants), SwiGLU.
    """
    args = Arguments(x.device)
    args.check("x", x, "T 2I", FLOATS)
    if args["2I"] % 2:
        raise ShapeError(f"x: expected an even number of channels, got {tuple(x.shape)}")
    out: Tensor = implementation("silu_and_mul", x.device).silu_and_mul(
        x, gate_multiplier=gate_multiplier
    )
    return out
