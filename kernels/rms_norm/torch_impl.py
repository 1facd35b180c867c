"""rms_norm over all tokens at once; arguments as in op.py.

T packed tokens, D model dim.
"""

import torch
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    values = x.to(accumulate_dtype(x.dtype))
    inverse_rms = (values.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt()  # (T, 1)
    return (weight * (values * inverse_rms).to(x.dtype)).to(x.dtype)


def add_rms_norm(
    branch: Tensor, residual: Tensor, weight: Tensor, *, eps: float, scale: float = 1.0
) -> Tensor:
    dtype = accumulate_dtype(torch.promote_types(branch.dtype, residual.dtype))
    total = residual.to(dtype).add_(branch, alpha=scale)  # the residual itself if it is wide
    if total is not residual:
        residual.copy_(total)
    return rms_norm(residual.to(branch.dtype), weight, eps=eps)
