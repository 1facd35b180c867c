"""causal_conv1d as one shifted multiply-add per tap; arguments as in op.py.

T packed tokens, R rows, B decode batch, L tokens of a row, C channels, W conv width, S slots,
E checkpoints.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.rows import live_rows


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial_state: Tensor,
    activation: Literal["silu"] | None = "silu",
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    checkpoints: list[tuple[int, int]] = []
    if checkpoint_tokens is not None and checkpoint_slots is not None:
        pairs = zip(checkpoint_tokens.tolist(), checkpoint_slots.tolist(), strict=True)
        checkpoints = [(token, slot) for token, slot in pairs if slot != 0]
    out = x.new_zeros(x.shape)
    for row in live_rows(cu_seqlens, read_slots, write_slots, has_initial_state):
        length = row.stop - row.start
        window = x.new_zeros((state.shape[1] + length, x.shape[1]), dtype=dtype)  # (W-1+L, C)
        if row.read_slot != 0:
            window[: state.shape[1]] = state[row.read_slot]
        window[state.shape[1] :] = x[row.start : row.stop]
        out[row.start : row.stop] = _convolve(window, weight, bias, activation)
        state[row.write_slot] = window[length:]
        for token, slot in checkpoints:
            if row.start <= token < row.stop:
                end = token - row.start + 1  # of the row if it ended there
                state[slot] = window[end : end + state.shape[1]]
    return out


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    read_slots: Tensor,
    write_slots: Tensor,
    activation: Literal["silu"] | None = "silu",
) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    out = x.new_zeros(x.shape)
    live = write_slots.nonzero().squeeze(1)
    sources = read_slots[live]
    history = state[sources].to(dtype).masked_fill((sources == 0)[:, None, None], 0)
    window = torch.cat([history, x[live].to(dtype).unsqueeze(1)], dim=1)  # (B, W, C)
    out[live] = _convolve(window, weight, bias, activation).squeeze(1).to(x.dtype)
    state[write_slots[live]] = window[:, 1:].to(state.dtype)
    return out


def _convolve(
    window: Tensor, weight: Tensor, bias: Tensor | None, activation: Literal["silu"] | None
) -> Tensor:
    """(..., L, C) from the inputs (..., W-1+L, C)."""
    taps = weight.to(window.dtype).t().contiguous()  # (W, C)
    length = window.shape[-2] - len(taps) + 1
    y = window[..., :length, :] * taps[0]
    for tap in range(1, len(taps)):
        y.addcmul_(window[..., tap : tap + length, :], taps[tap])
    if bias is not None:
        y += bias.to(y.dtype)
    return F.silu(y, inplace=True) if activation == "silu" else y
