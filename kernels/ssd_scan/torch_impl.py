"""ssd_scan as matrix products over chunks of each row; arguments as in op.py.

T packed tokens, R rows, L tokens of a chunk, H heads, G groups, P head dim, N state dim, S slots.
In a chunk y_i = sum_{j<=i} exp(decay_{j+1..i}) step_j (C_i . B_j) x_j + exp(decay_{1..i}) C_i h.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.heads import regular_head_map
from plait.kernels.rounding import StochasticRounding, store_state
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
    z: Tensor | None = None,
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    if group_of_head is None:
        group_of_head = regular_head_map(x.shape[1], B.shape[1], x.device)
    step = discretise_step(dt, dt_bias, dt_softplus, dt_limit, dtype)  # (T, H)
    log_decay = step * A.to(dtype)  # (T, H)
    checkpoints = _by_token(checkpoint_tokens, checkpoint_slots)
    out = x.new_zeros(x.shape)
    rows = live_rows(cu_seqlens, read_slots, write_slots, has_initial_state)
    indices: list[int] = write_slots.nonzero().flatten().tolist()
    for row_idx, row in zip(indices, rows, strict=True):
        h = x.new_zeros(state.shape[1:], dtype=dtype)  # (H, P, N)
        if row.read_slot != 0:
            h.copy_(state[row.read_slot])
        for chunk in _chunks(row.start, row.stop, chunk_size, checkpoints):
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
            if z is not None:
                y = y * F.silu(z[chunk].to(dtype))
            out[chunk] = y
            for slot in checkpoints.get(chunk.stop - 1, ()):
                offset = chunk.stop - 1 - row.start
                store_state(state[slot], h, rounding, row_idx, offset=offset)
        offset = row.stop - 1 - row.start
        store_state(state[row.write_slot], h, rounding, row_idx, offset=offset)
    return out


def _by_token(tokens: Tensor | None, slots: Tensor | None) -> dict[int, list[int]]:
    """The slots to store the state in, by the token that it is stored after."""
    checkpoints: dict[int, list[int]] = {}
    if tokens is not None and slots is not None:
        for token, slot in zip(tokens.tolist(), slots.tolist(), strict=True):
            if slot != 0:
                checkpoints.setdefault(token, []).append(slot)
    return checkpoints


def _chunks(start: int, stop: int, size: int, checkpoints: Iterable[int]) -> Iterator[slice]:
    """Runs of at most `size` tokens, the last of which only may be a checkpoint."""
    cuts = [token + 1 for token in checkpoints if start <= token < stop - 1]
    for first, last in pairwise([start, *cuts, stop]):
        for begin in range(first, last, size):
            yield slice(begin, min(begin + size, last))


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
