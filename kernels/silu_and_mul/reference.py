"""silu_and_mul token by token; arguments as in op.py."""

import torch
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def silu_and_mul(x: Tensor, *, gate_multiplier: float = 1.0) -> Tensor:
    half = x.shape[1] // 2
    out = torch.zeros_like(x[:, :half])
    for token in range(len(x)):
        values = x[token].to(accumulate_dtype(x.dtype))
        gate, up = gate_multiplier * values[:half], values[half:]
        out[token] = (gate * torch.sigmoid(gate) * up).to(x.dtype)
    return out
