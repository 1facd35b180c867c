"""linear in C with bfloat16 and int8 panels; other weights go through torch.

Arguments as in op.py. Layout of a packed weight: native/include/gemm.h.
"""

from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.linear import torch_impl
from plait.kernels.linear.packed import (
    PackedWeight,
    Quantization,
    merge_scales,
    quantize_int8,
)
from plait.kernels.native import NativeLibrary, dtype_code, pointer

library = NativeLibrary(
    Path(__file__).with_name("native.c"),
    counting=("tile_columns",),
    tile_columns="",
    linear="piiiipipppii",
)

_FORMATS: Final = {torch.bfloat16: 0, torch.int8: 1}  # enum weight_format


def pack_weight(
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    quantization: Quantization | None = None,
) -> PackedWeight:
    row_scale = None
    if quantization is not None and weight.dtype != torch.float64:
        data, row_scale = quantize_int8(weight)
    elif weight.dtype == torch.bfloat16:
        data = weight
    else:
        return torch_impl.pack_weight(weight, bias=bias, scale=scale, quantization=quantization)
    scale = merge_scales(row_scale, None if scale is None else scale.float())
    return PackedWeight(
        data=to_panels(data, library.load().tile_columns()),
        out_features=len(weight),
        in_features=weight.shape[1],
        dtype=weight.dtype,
        quantization=quantization,
        scale=None if scale is None else scale.contiguous(),
        bias=None if bias is None else bias.float().contiguous(),
    )


def to_panels(weight: Tensor, columns: int) -> Tensor:
    """(O, K) -> (panels, K / 2, columns, 2), filled up with zeros."""
    out_features, in_features = weight.shape
    padded = F.pad(weight, (0, in_features % 2, 0, -out_features % columns))
    return padded.view(-1, columns, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def linear(x: Tensor, weight: PackedWeight, *, out_dtype: torch.dtype) -> Tensor:
    data = weight.data
    if data.dim() == 2:
        return torch_impl.linear(x, weight, out_dtype=out_dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = len(x)
    out = torch.empty((rows, weight.out_features), dtype=out_dtype)
    library.load().linear(
        x.data_ptr(),
        dtype_code(x.dtype),
        rows,
        weight.in_features,
        x.stride(0),
        data.data_ptr(),
        _FORMATS[data.dtype],
        pointer(weight.scale),
        pointer(weight.bias),
        out.data_ptr(),
        dtype_code(out_dtype),
        weight.out_features,
    )
    return out
