"""silu_and_mul in C; arguments as in op.py.

T packed tokens, I intermediate dim.
"""

from pathlib import Path

import torch
from torch import Tensor

from plait.kernels.native import NativeLibrary, dtype_code
from plait.kernels.silu_and_mul import torch_impl

library = NativeLibrary(Path(__file__).with_name("native.c"), silu_and_mul="piifpii")


def silu_and_mul(x: Tensor, *, gate_multiplier: float = 1.0) -> Tensor:
    if x.dtype == torch.float64:
        return torch_impl.silu_and_mul(x, gate_multiplier=gate_multiplier)
    if x.stride(1) != 1:
        x = x.contiguous()
    num_tokens, double_dim = x.shape
    dim = double_dim // 2
    out = torch.empty_like(x[:, :dim], memory_format=torch.contiguous_format)
    library.load().silu_and_mul(
        x.data_ptr(),
        dtype_code(x.dtype),
        x.stride(0),
        gate_multiplier,
        out.data_ptr(),
        num_tokens,
        dim,
    )
    return out
