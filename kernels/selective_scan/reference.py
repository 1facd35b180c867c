"""selective_scan token by token; arguments as in op.py."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.rounding import StochasticRounding, store_state


def selective_scan(
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
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    exports: dict[int, list[int]] = {}  # token -> slots
    if checkpoint_tokens is not None and checkpoint_slots is not None:
        for token, slot in zip(checkpoint_tokens.tolist(), checkpoint_slots.tolist(), strict=True):
            exports.setdefault(token, []).append(slot)
    out = torch.zeros_like(x)
    for row in range(len(write_slots)):
        if write_slots[row] == 0:
            continue
        h = torch.zeros(state.shape[1:], dtype=dtype, device=x.device)  # (C, N)
        if has_initial_state[row] and read_slots[row] != 0:
            h = state[read_slots[row]].to(dtype)
        start, stop = int(cu_seqlens[row]), int(cu_seqlens[row + 1])
        for t in range(start, stop):
            x_t = x[t].to(dtype)  # (C,)
            step = dt[t].to(dtype)  # (C,)
            if dt_bias is not None:
                step = step + dt_bias.to(dtype)
            if dt_softplus:
                step = F.softplus(step)
            step = step.clamp(min=dt_limit[0], max=dt_limit[1])
            decay = torch.exp(step[:, None] * A.to(dtype))  # (C, N)
            h = decay * h + torch.outer(step * x_t, B[t].to(dtype))
            y = h @ C[t].to(dtype)  # (C,)
            if D is not None:
                y = y + D.to(dtype) * x_t
            if z is not None:
                y = y * F.silu(z[t].to(dtype))
            out[t] = y.to(x.dtype)
            for slot in exports.get(t, ()):
                if slot != 0:
                    store_state(state[slot], h, rounding, row, offset=t - start)
        store_state(state[write_slots[row]], h, rounding, row, offset=stop - 1 - start)
    return out
