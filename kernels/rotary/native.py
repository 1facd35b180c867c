"""rotary in C; arguments as in op.py.

T packed tokens, H heads, D attention head dim, R2 half of the dims that turn.
"""

from pathlib import Path

import torch
from torch import Tensor

from plait.kernels.native import NativeLibrary, dtype_code
from plait.kernels.rotary import torch_impl

library = NativeLibrary(Path(__file__).with_name("native.c"), rotary="piiipipipiiii")


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return torch_impl.rotary(x, cos, sin)
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, sin = _floats(cos), _floats(sin)
    token_stride, head_stride, _ = x.stride()
    out = torch.empty(x.shape, dtype=x.dtype)
    library.load().rotary(
        x.data_ptr(),
        dtype_code(x.dtype),
        token_stride,
        head_stride,
        cos.data_ptr(),
        cos.stride(0),
        sin.data_ptr(),
        sin.stride(0),
        out.data_ptr(),
        *x.shape,
        cos.shape[1],
    )
    return out


def _floats(angles: Tensor) -> Tensor:
    """`angles`, whose tokens may be apart, as adjacent float32."""
    if angles.dtype != torch.float32:
        angles = angles.float()
    return angles if angles.stride(1) == 1 else angles.contiguous()
