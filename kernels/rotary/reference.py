"""rotary pair by pair; arguments as in op.py."""

from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    half = cos.shape[1]
    out = x.clone()
    for token in range(len(x)):
        for dim in range(half):
            first, second = x[token, :, dim].to(dtype), x[token, :, half + dim].to(dtype)  # (H,)
            c, s = cos[token, dim].to(dtype), sin[token, dim].to(dtype)
            out[token, :, dim] = first * c - second * s
            out[token, :, half + dim] = second * c + first * s
    return out
