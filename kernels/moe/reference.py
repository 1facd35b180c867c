"""moe token by token; arguments as in op.py."""

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def moe(
    x: Tensor, w_in: Tensor, w_out: Tensor, *, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    width = w_out.shape[2]
    out = torch.zeros_like(x)
    for token in range(len(x)):
        total = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
        for expert, weight in zip(expert_ids[token], expert_weights[token], strict=True):
            gate = w_in[expert, :width] @ x[token]
            up = w_in[expert, width:] @ x[token]
            y = w_out[expert] @ (F.silu(gate) * up)
            total = total + weight.to(dtype) * y.to(dtype)
        out[token] = total.to(x.dtype)
    return out
