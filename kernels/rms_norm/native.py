"""rms_norm in C; arguments as in op.py.

T packed tokens, D model dim.
"""

from pathlib import Path

import torch
from torch import Tensor

from plait.kernels.native import NativeLibrary, dtype_code
from plait.kernels.rms_norm import torch_impl

library = NativeLibrary(
    Path(__file__).with_name("native.c"), rms_norm="piipipiif", add_rms_norm="piipiipipiiff"
)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    if not _has_code(x.dtype, weight.dtype):
        return torch_impl.rms_norm(x, weight, eps=eps)
    x, weight = _rows(x), weight.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    library.load().rms_norm(
        x.data_ptr(),
        dtype_code(x.dtype),
        x.stride(0),
        weight.data_ptr(),
        dtype_code(weight.dtype),
        out.data_ptr(),
        *x.shape,
        eps,
    )
    return out


def add_rms_norm(
    branch: Tensor, residual: Tensor, weight: Tensor, *, eps: float, scale: float = 1.0
) -> Tensor:
    has_code = _has_code(branch.dtype, weight.dtype) and _has_code(branch.dtype, residual.dtype)
    if not has_code or residual.stride(1) != 1:
        return torch_impl.add_rms_norm(branch, residual, weight, eps=eps, scale=scale)
    branch, weight = _rows(branch), weight.contiguous()
    out = torch.empty_like(branch, memory_format=torch.contiguous_format)
    library.load().add_rms_norm(
        branch.data_ptr(),
        dtype_code(branch.dtype),
        branch.stride(0),
        residual.data_ptr(),
        dtype_code(residual.dtype),
        residual.stride(0),
        weight.data_ptr(),
        dtype_code(weight.dtype),
        out.data_ptr(),
        *branch.shape,
        eps,
        scale,
    )
    return out


def _has_code(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether C takes activations of `dtype` with a weight or residual of dtype `other`."""
    return dtype != torch.float64 and other in (dtype, torch.float32)


def _rows(x: Tensor) -> Tensor:
    """`x`, whose rows may be apart, with adjacent channels."""
    return x if x.stride(1) == 1 else x.contiguous()
