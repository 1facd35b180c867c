"""linear token by token; arguments as in op.py."""

import torch
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.linear.packed import PackedWeight
from plait.kernels.linear.torch_impl import pack_weight

__all__ = ["linear", "pack_weight"]


def linear(x: Tensor, weight: PackedWeight, *, out_dtype: torch.dtype) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    out = torch.zeros(len(x), weight.out_features, dtype=out_dtype, device=x.device)
    for token in range(len(x)):
        for row in range(weight.out_features):
            y = (x[token].to(dtype) * weight.data[row].to(dtype)).sum()
            if weight.scale is not None:
                y = y * weight.scale[row].to(dtype)
            if weight.bias is not None:
                y = y + weight.bias[row].to(dtype)
            out[token, row] = y.to(out_dtype)
    return out
