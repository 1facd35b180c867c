"""moe in C for bfloat16 models; other dtypes go through torch. Arguments as in op.py."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from plait.kernels.linear.native import to_panels
from plait.kernels.linear.packed import Quantization
from plait.kernels.moe import torch_impl
from plait.kernels.moe.packed import PackedExperts
from plait.kernels.native import NativeLibrary, pointer

library = NativeLibrary(
    Path(__file__).with_name("native.c"),
    counting=("tile_columns",),
    tile_columns="",
    moe="piiiiiippppppipppppppp",
)

_FORMATS: Final = {torch.bfloat16: 0, torch.int8: 1}  # enum weight_format


def pack_experts(
    w_in: Tensor, w_out: Tensor, *, quantization: Quantization | None = None
) -> PackedExperts:
    packed = torch_impl.pack_experts(w_in, w_out, quantization=quantization)
    if packed.dtype != torch.bfloat16:
        return packed
    columns = library.load().tile_columns()

    def panels(weights: Tensor) -> Tensor:
        return torch.stack([to_panels(weight, columns) for weight in weights])

    return replace(packed, w_in=panels(packed.w_in), w_out=panels(packed.w_out))


def moe(x: Tensor, experts: PackedExperts, *, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    if experts.w_in.dim() == 3:
        return torch_impl.moe(x, experts, expert_ids=expert_ids, expert_weights=expert_weights)
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, dim = x.shape
    per_token, width = expert_ids.shape[1], experts.intermediate_dim
    ids, weights = expert_ids.contiguous(), expert_weights.float().contiguous()
    choices = tokens * per_token
    out = torch.empty((tokens, dim), dtype=x.dtype)
    both = torch.empty(choices * 2 * width)
    y = torch.empty(choices * dim)
    total = torch.empty(tokens * dim)
    hidden = torch.empty(choices * width, dtype=x.dtype)
    offsets = torch.empty(experts.num_experts + 1, dtype=torch.int64)
    order = torch.empty(2, choices, dtype=torch.int32)
    library.load().moe(
        x.data_ptr(),
        x.stride(0),
        tokens,
        dim,
        width,
        experts.num_experts,
        per_token,
        ids.data_ptr(),
        weights.data_ptr(),
        experts.w_in.data_ptr(),
        pointer(experts.in_scale),
        experts.w_out.data_ptr(),
        pointer(experts.out_scale),
        _FORMATS[experts.w_in.dtype],
        both.data_ptr(),
        y.data_ptr(),
        total.data_ptr(),
        hidden.data_ptr(),
        offsets.data_ptr(),
        order[0].data_ptr(),
        order[1].data_ptr(),
        out.data_ptr(),
    )
    return out
