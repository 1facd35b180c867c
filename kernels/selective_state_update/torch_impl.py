"""selective_state_update on views of the slots; arguments as in op.py.

B decode batch, H heads, G groups, P head dim, N state dim, S slots.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.heads import regular_head_map
from plait.kernels.rounding import StochasticRounding, store_state
from plait.kernels.step_size import discretise_step


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
    if group_of_head is None:
        group_of_head = regular_head_map(x.shape[1], B.shape[1], x.device)
    step = discretise_step(dt, dt_bias, dt_softplus, dt_limit, dtype)  # (B, H)
    # (B, H, 1, 1), or with a rate of each state element (B, H, 1, N)
    decay = (step[:, :, None] * A.to(dtype).view(len(A), -1)).exp()[:, :, None, :]
    inputs = x.to(dtype)
    column = (inputs * step[:, :, None])[..., None]  # (B, H, P, 1)
    B_heads = B[:, group_of_head, None, :].to(dtype)  # (B, H, 1, N)
    C_heads = C[:, group_of_head, :, None].to(dtype)  # (B, H, N, 1)
    skip = torch.zeros_like(inputs) if D is None else D.to(dtype)[:, None] * inputs  # (B, H, P)
    out = x.new_zeros(x.shape)
    slots = zip(read_slots.tolist(), write_slots.tolist(), strict=True)
    # Row by row on views: a batch would copy the states, most of the bytes moved, twice more.
    for row, (read_slot, write_slot) in enumerate(slots):
        if write_slot == 0:
            continue
        target = state[write_slot]
        h = target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)
        if read_slot == 0:
            torch.mul(column[row], B_heads[row], out=h)
        else:
            torch.mul(state[read_slot], decay[row], out=h)
            h.addcmul_(column[row], B_heads[row])
        y = (h @ C_heads[row]).squeeze(-1) + skip[row]
        out[row] = y if z is None else y * F.silu(z[row].to(dtype))
        if h is not target:
            store_state(target, h, rounding, row)
    return out
