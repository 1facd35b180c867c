"""ssd_scan as matrix products over chunks of each row; arguments as in op.py.

T packed tokens, R rows, L tokens of a chunk, H heads, G groups, P head dim, N state dim, S slots.
In a chunk y_i = sum_{j<=i} exp(decay_{j+1..i}) step_j (C_i . B_j) x_j + exp(decay_{1..i}) C_i h.
"""

import math

import torch
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.heads import regular_head_map
from plait.kernels.rows import live_rows
from plait.kernels.step_size import discretise_step


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
) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    if group_of_head is None:
        group_of_head = regular_head_map(x.shape[1], B.shape[1], x.device)
    step = discretise_step(dt, dt_bias, dt_softplus, dt_limit, dtype)  # (T, H)
    log_decay = step * A.to(dtype)  # (T, H)
    out = x.new_zeros(x.shape)
    for row in live_rows(cu_seqlens, read_slots, write_slots, has_initial_state):
        h = x.new_zeros(state.shape[1:], dtype=dtype)  # (H, P, N)
        if row.read_slot != 0:
            h.copy_(state[row.read_slot])
        for start in range(row.start, row.stop, chunk_size):
            chunk = slice(start, min(start + chunk_size, row.stop))
            inputs = x[chunk].to(dtype)  # (L, H, P)
            y = _scan_chunk(
                (inputs * step[chunk, :, None]).transpose(0, 1),
                log_decay[chunk].t(),
                B[chunk].to(dtype).transpose(0, 1),
                C[chunk].to(dtype).transpose(0, 1),
                h,
                group_of_head,
            ).transpose(0, 1)
            if D is not None:
                y = y + D.to(dtype)[:, None] * inputs
            out[chunk] = y
        state[row.write_slot] = h
    return out


def _scan_chunk(
    x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, h: Tensor, group_of_head: Tensor
) -> Tensor:
    """The output of one chunk; advances `h` in place.

    Args:
        x: (H, L, P), times the step size.
        log_decay: (H, L).
        B, C: (G, L, N).
        h: (H, P, N).
        group_of_head: (H,).
    Returns:
        (H, L, P) without the term of D.
    """
    # Sums over a chunk reach hundreds while the differences that matter are near 0: subtracting
    # them in float32 would lose digits, and these tensors are small.
    total = log_decay.double().cumsum(dim=1)  # (H, L)
    between = (total[:, :, None] - total[:, None, :]).to(x.dtype)  # (H, L, L)
    ahead = torch.ones(between.shape[1:], dtype=torch.bool, device=x.device).triu(diagonal=1)
    # Masked before exp: ahead of the diagonal the difference is positive and may overflow.
    mix = between.masked_fill_(ahead, -math.inf).exp_()
    mix *= (C @ B.mT)[group_of_head]
    y = mix @ x  # (H, L, P)

    from_start = total.to(x.dtype).exp()  # (H, L)
    y += (C[group_of_head] @ h.mT) * from_start[:, :, None]

    to_end = (total[:, -1:] - total).to(x.dtype).exp()  # (H, L)
    h *= from_start[:, -1, None, None]
    h += (x * to_end[:, :, None]).mT @ B[group_of_head]
    return y
