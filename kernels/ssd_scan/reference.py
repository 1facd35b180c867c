"""ssd_scan token by token; arguments as in op.py."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.rounding import StochasticRounding, store_state


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial_state: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    group_of_head: Tensor | None = None,
    chunk_size: int = 64,
    z: Tensor | None = None,
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> Tensor:
    del chunk_size  # the recurrence has no chunks
    dtype = accumulate_dtype(x.dtype)
    num_heads, num_groups = x.shape[1], B.shape[1]
    group = [h // (num_heads // num_groups) for h in range(num_heads)]
    if group_of_head is not None:
        group = group_of_head.tolist()
    exports: dict[int, list[int]] = {}  # token -> slots
    if checkpoint_tokens is not None and checkpoint_slots is not None:
        for token, slot in zip(checkpoint_tokens.tolist(), checkpoint_slots.tolist(), strict=True):
            exports.setdefault(token, []).append(slot)
    out = torch.zeros_like(x)
    for row in range(len(write_slots)):
        if write_slots[row] == 0:
            continue
        h = torch.zeros(state.shape[1:], dtype=dtype, device=x.device)  # (H, P, N)
        if has_initial_state[row] and read_slots[row] != 0:
            h = state[read_slots[row]].to(dtype)
        for t in range(int(cu_seqlens[row]), int(cu_seqlens[row + 1])):
            x_t = x[t].to(dtype)  # (H, P)
            step = dt[t].to(dtype)  # (H,)
            if dt_bias is not None:
                step = step + dt_bias.to(dtype)
            if dt_softplus:
                step = F.softplus(step)
            step = step.clamp(min=dt_limit[0], max=dt_limit[1])
            decay = torch.exp(step * A.to(dtype))  # (H,)
            B_t, C_t = B[t, group].to(dtype), C[t, group].to(dtype)  # (H, N)
            update = (step[:, None] * x_t)[:, :, None] * B_t[:, None, :]  # (H, P, N)
            h = decay[:, None, None] * h + update
            y = (h * C_t[:, None, :]).sum(dim=-1)  # (H, P)
            if D is not None:
                y = y + D.to(dtype)[:, None] * x_t
            if z is not None:
                y = y * F.silu(z[t].to(dtype))
            out[t] = y.to(x.dtype)
            for slot in exports.get(t, ()):
                if slot != 0:
                    store_state(state[slot], h, rounding, row, offset=t - int(cu_seqlens[row]))
        last = int(cu_seqlens[row + 1]) - int(cu_seqlens[row]) - 1
        store_state(state[write_slots[row]], h, rounding, row, offset=last)
    return out
