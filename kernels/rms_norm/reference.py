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
