"""rms_norm token by token; arguments as in op.py."""

import torch
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    out = torch.zeros_like(x)
    for token in range(len(x)):
        values = x[token].to(accumulate_dtype(x.dtype))
        normalised = values * torch.rsqrt(values.pow(2).mean() + eps)
        out[token] = weight * normalised.to(x.dtype)
    return out


def add_rms_norm(
    branch: Tensor, residual: Tensor, weight: Tensor, *, eps: float, scale: float = 1.0
) -> Tensor:
    dtype = accumulate_dtype(torch.promote_types(branch.dtype, residual.dtype))
    residual.copy_(residual.to(dtype) + scale * branch.to(dtype))
    return rms_norm(residual.to(branch.dtype), weight, eps=eps)
