"""moe token by token; arguments as in op.py."""

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.moe.packed import PackedExperts
from plait.kernels.moe.torch_impl import expert, pack_experts

__all__ = ["moe", "pack_experts"]


def moe(x: Tensor, experts: PackedExperts, *, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    width = experts.intermediate_dim
    out = torch.zeros_like(x)
    for token in range(len(x)):
        total = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
        for index, weight in zip(expert_ids[token], expert_weights[token], strict=True):
            w_in, w_out = expert(experts, int(index))
            gate, up = w_in[:width] @ x[token], w_in[width:] @ x[token]
            y = w_out @ (F.silu(gate) * up)
            total = total + weight.to(dtype) * y.to(dtype)
        out[token] = total.to(x.dtype)
    return out
