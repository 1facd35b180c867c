"""Checks and dispatch of rms_norm.

T packed tokens, D model dim.
"""

from torch import Tensor

from plait.kernels.arguments import Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise every token to a root mean square of 1, then scale its channels.

    Args:
        x: (T, D), any float dtype.
        weight: (D,), any float dtype.
        eps: added to the mean square.
    Returns:
        (T, D) in the dtype of `x`; statistics are in float32 (float64 for float64), and the
        normalised value is rounded to the dtype of `x` before it is scaled.
    Raises:
        ShapeError, DtypeError, BackendError: names the argument.
    Source: Zhang & Sennrich 2019; rounding as in the Llama model of transformers.
    """
    args = Arguments(x.device)
    args.check("x", x, "T D", FLOATS)
    args.check("weight", weight, "D", FLOATS)
    out: Tensor = implementation("rms_norm", x.device).rms_norm(x, weight, eps=eps)
    return out


def add_rms_norm(
    branch: Tensor, residual: Tensor, weight: Tensor, *, eps: float, scale: float = 1.0
) -> Tensor:
    """Add the output of a branch to the residual stream and normalise the sum.

    Args:
        branch: (T, D), any float dtype.
        residual: (T, D), any float dtype; scale * branch is added in place, rounded once.
        weight: (D,), any float dtype.
        eps: added to the mean square.
        scale: multiplies the branch.
    Returns:
        (T, D) in the dtype of `branch`: `rms_norm` of the new residual rounded to that dtype.
    Raises:
        ShapeError, DtypeError, BackendError: names the argument.
    """
    args = Arguments(branch.device)
    args.check("branch", branch, "T D", FLOATS)
    args.check("residual", residual, "T D", FLOATS)
    args.check("weight", weight, "D", FLOATS)
    out: Tensor = implementation("rms_norm", branch.device).add_rms_norm(
        branch, residual, weight, eps=eps, scale=scale
    )
    return out
