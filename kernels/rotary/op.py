"""Checks and dispatch of rotary.

T packed tokens, H heads, D attention head dim, R2 half of the dims that turn.
"""

from torch import Tensor

from plait.kernels.arguments import Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS
from plait.kernels.errors import ShapeError


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2 * R2 dims of every head: dim i together with dim R2 + i.

    Args:
        x: (T, H, D), any float dtype.
        cos, sin: (T, R2), any float dtype, of the angles of every token.
    Returns:
        (T, H, D) in the dtype of `x`, computed in float32 (float64 for float64); dims from
        2 * R2 on are those of `x`.
    Raises:
        ShapeError, DtypeError, BackendError: names the argument.
    Source: Su et al. 2021 (RoFormer); the halves form, as in the Llama model of transformers.
    """
    args = Arguments(x.device)
    args.check("x", x, "T H D", FLOATS)
    args.check("cos", cos, "T R2", FLOATS)
    args.check("sin", sin, "T R2", FLOATS)
    if 2 * args["R2"] > args["D"]:
        raise ShapeError(
            f"cos: expected 2 * R2 of at most D={args['D']}, got shape {tuple(cos.shape)}"
        )
    out: Tensor = implementation("rotary", x.device).rotary(x, cos, sin)
    return out
