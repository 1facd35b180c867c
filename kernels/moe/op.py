"""Checks and dispatch of moe.

T packed tokens, D model dim, E experts, K experts of a token, I intermediate dim.
"""

from torch import Tensor

from plait.kernels.arguments import INT64, Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS


def moe(
    x: Tensor, w_in: Tensor, w_out: Tensor, *, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    """Sum the outputs of the experts of every token, each times its weight.

    Args:
        x: (T, D), any float dtype.
        w_in: (E, 2I, D) in the dtype of `x`, the I rows of the gate before those of the value.
        w_out: (E, D, I) in the dtype of `x`.
        expert_ids: (T, K) int64 from 0 to E - 1.
        expert_weights: (T, K), any float dtype.
    Returns:
        (T, D) in the dtype of `x`; experts compute in that dtype, the weighted sum over experts
        is kept in float32 (float64 for float64).
    Raises:
        ShapeError, DtypeError, BackendError: names the argument.
    """
    args = Arguments(x.device)
    args.check("x", x, "T D", FLOATS)
    args.check("w_out", w_out, "E D I", (x.dtype,))
    args.define("2I", 2 * args["I"])
    args.check("w_in", w_in, "E 2I D", (x.dtype,))
    args.check("expert_ids", expert_ids, "T K", INT64)
    args.check("expert_weights", expert_weights, "T K", FLOATS)
    out: Tensor = implementation("moe", x.device).moe(
        x, w_in, w_out, expert_ids=expert_ids, expert_weights=expert_weights
    )
    return out
