"""Checks and dispatch of linear.

T packed tokens, O output features, K input features.
"""

import torch
from torch import Tensor

from plait.kernels.arguments import Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS
from plait.kernels.errors import DtypeError, KernelError
from plait.kernels.linear.packed import PackedWeight, Quantization


def pack_weight(
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    quantization: Quantization | None = None,
) -> PackedWeight:
    """Bring a weight into the form that `linear` multiplies fastest on its device.

    Args:
        weight: (O, K), any float dtype; not needed afterwards.
        bias: (O,), any float dtype.
        scale: (O,), any float dtype, multiplies the product before the bias is added.
        quantization: "int8" keeps each row as 8-bit integers times one scale.
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    """
    args = Arguments(weight.device)
    args.check("weight", weight, "O K", FLOATS)
    for name, value in (("bias", bias), ("scale", scale)):
        if value is not None:
            args.check(name, value, "O", FLOATS)
    if quantization not in (None, "int8"):
        raise KernelError(f"quantization: expected 'int8' or None, got {quantization!r}")
    packed: PackedWeight = implementation("linear", weight.device).pack_weight(
        weight, bias=bias, scale=scale, quantization=quantization
    )
    return packed


def linear(x: Tensor, weight: PackedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """The product of every token with the weight: scale * (x @ weight.T) + bias.

    Args:
        x: (T, K) in the dtype of the weight.
        weight: made by `pack_weight` on the device of `x`.
        out_dtype: the dtype of `x` (default) or float32.
    Returns:
        (T, O); sums are kept in float32 (float64 for float64) and rounded once by C code, by torch
        also before they are scaled or widened. With an int8 weight a backend may round each row of
        `x` to integers, by no more than bfloat16 rounds the largest element of the row.
    Raises:
        ShapeError, DtypeError, BackendError: names the argument.
    """
    args = Arguments(weight.data.device)
    args.define("K", weight.in_features)
    args.check("x", x, "T K", (weight.dtype,))
    if out_dtype not in (None, x.dtype, torch.float32):
        raise DtypeError(f"out_dtype: expected {x.dtype} or torch.float32, got {out_dtype}")
    out: Tensor = implementation("linear", x.device).linear(
        x, weight, out_dtype=x.dtype if out_dtype is None else out_dtype
    )
    return out
