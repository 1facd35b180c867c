"""Checks and dispatch of moe.

T packed tokens, D model dim, E experts, K experts of a token, I intermediate dim.
"""

from torch import Tensor

from plait.kernels.arguments import INT64, Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS
from plait.kernels.errors import KernelError
from plait.kernels.linear.packed import Quantization
from plait.kernels.moe.packed import PackedExperts


def pack_experts(
    w_in: Tensor, w_out: Tensor, *, quantization: Quantization | None = None
) -> PackedExperts:
    """Bring the weights of all experts into the form that `moe` multiplies fastest.

    Args:
        w_in: (E, 2I, D), any float dtype, the I rows of the gate before those of the value.
        w_out: (E, D, I) in the dtype of `w_in`.
        quantization: "int8" keeps each row as 8-bit integers times one scale.
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    """
    args = Arguments(w_in.device)
    args.check("w_out", w_out, "E D I", FLOATS)
    args.define("2I", 2 * args["I"])
    args.check("w_in", w_in, "E 2I D", (w_out.dtype,))
    if quantization not in (None, "int8"):
        raise KernelError(f"quantization: expected 'int8' or None, got {quantization!r}")
    packed: PackedExperts = implementation("moe", w_in.device).pack_experts(
        w_in, w_out, quantization=quantization
    )
    return packed


def moe(x: Tensor, experts: PackedExperts, *, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """Sum the outputs of the experts of every token, each times its weight.

    Args:
        x: (T, D) in the dtype of the experts.
        experts: made by `pack_experts` on the device of `x`.
        expert_ids: (T, K) int64 from 0 to E - 1.
        expert_weights: (T, K), any float dtype.
    Returns:
        (T, D) in the dtype of `x`; an expert rounds what lies between its two products to that
        dtype, the weighted sum over experts is kept in float32 (float64 for float64).
    Raises:
        ShapeError, DtypeError, BackendError: names the argument.
    """
    args = Arguments(experts.w_in.device)
    args.define("D", experts.model_dim)
    args.check("x", x, "T D", (experts.dtype,))
    args.check("expert_ids", expert_ids, "T K", INT64)
    args.check("expert_weights", expert_weights, "T K", FLOATS)
    out: Tensor = implementation("moe", x.device).moe(
        x, experts, expert_ids=expert_ids, expert_weights=expert_weights
    )
    return out
