"""rotary over all tokens and heads at once; arguments as in op.py.

T packed tokens, H heads, D attention head dim, R2 half of the dims that turn.
"""

import torch
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    half = cos.shape[1]
    cos, sin = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)  # (T, 1, R2)
    first, second = x[..., :half].to(dtype), x[..., half : 2 * half].to(dtype)  # (T, H, R2)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
