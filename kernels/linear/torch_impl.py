"""linear through torch; the weight stays as it is. Arguments as in op.py."""

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.linear.packed import (
    PackedWeight,
    Quantization,
    merge_scales,
    quantize_int8,
)


def pack_weight(
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    quantization: Quantization | None = None,
) -> PackedWeight:
    wide = accumulate_dtype(weight.dtype)
    data, row_scale = (weight, None) if quantization is None else quantize_int8(weight)
    return PackedWeight(
        data=data,
        out_features=len(weight),
        in_features=weight.shape[1],
        dtype=weight.dtype,
        quantization=quantization,
        scale=merge_scales(row_scale, None if scale is None else scale.to(wide)),
        bias=None if bias is None else bias.to(wide),
    )


def linear(x: Tensor, weight: PackedWeight, *, out_dtype: torch.dtype) -> Tensor:
    data, bias = weight.data, weight.bias
    if weight.quantization is None and weight.scale is None and out_dtype == x.dtype:
        return F.linear(x, data, None if bias is None else bias.to(x.dtype))
    wide = accumulate_dtype(x.dtype)
    y = F.linear(x, data.to(x.dtype)).to(wide)
    if weight.scale is not None:
        y = y * weight.scale
    if bias is not None:
        y = y + bias
    return y.to(out_dtype)
