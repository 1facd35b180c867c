"""selective_state_update row by row and head by head; arguments as in op.py."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.rounding import StochasticRounding, store_state


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    read_slots: Tensor,
    write_slots: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    group_of_head: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    num_heads, num_groups = x.shape[1], B.shape[1]
    out = torch.zeros_like(x)
    for row in range(len(write_slots)):
        if write_slots[row] == 0:
            continue
        new = torch.empty(state.shape[1:], dtype=dtype, device=x.device)  # (H, P, N)
        for head in range(num_heads):
            group = head // (num_heads // num_groups) if group_of_head is None else 0
            if group_of_head is not None:
                group = int(group_of_head[head])
            step = dt[row, head].to(dtype)
            if dt_bias is not None:
                step = step + dt_bias[head].to(dtype)
            if dt_softplus:
                step = F.softplus(step)
            step = step.clamp(min=dt_limit[0], max=dt_limit[1])
            h = torch.zeros(state.shape[2:], dtype=dtype, device=x.device)  # (P, N)
            if read_slots[row] != 0:
                h = state[read_slots[row], head].to(dtype)
            x_t = x[row, head].to(dtype)  # (P,)
            h = torch.exp(step * A[head].to(dtype)) * h
            h = h + torch.outer(step * x_t, B[row, group].to(dtype))
            y = h @ C[row, group].to(dtype)  # (P,)
            if D is not None:
                y = y + D[head].to(dtype) * x_t
            if z is not None:
                y = y * F.silu(z[row, head].to(dtype))
            out[row, head] = y.to(x.dtype)
            new[head] = h
        store_state(state[write_slots[row]], new, rounding, row)
    return out
