"""causal_conv1d token by token; arguments as in op.py."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


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
    checkpoints = {}
    if checkpoint_tokens is not None and checkpoint_slots is not None:
        checkpoints = dict(zip(checkpoint_tokens.tolist(), checkpoint_slots.tolist(), strict=True))
    out = torch.zeros_like(x)
    for row in range(len(write_slots)):
        if write_slots[row] == 0:
            continue
        inputs = torch.zeros(state.shape[1:], dtype=dtype, device=x.device)  # (W-1, C)
        if has_initial_state[row] and read_slots[row] != 0:
            inputs = state[read_slots[row]].to(dtype)
        for token in range(int(cu_seqlens[row]), int(cu_seqlens[row + 1])):
            window = torch.cat([inputs, x[token : token + 1].to(dtype)])  # (W, C)
            out[token] = _filter(window, weight.to(dtype), bias, activation)
            inputs = window[1:]
            if checkpoints.get(token, 0) != 0:
                state[checkpoints[token]] = inputs.to(state.dtype)
        state[write_slots[row]] = inputs.to(state.dtype)
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
    return causal_conv1d_prefill(
        x,
        weight,
        bias,
        state,
        cu_seqlens=torch.arange(len(x) + 1, dtype=torch.int32),
        read_slots=read_slots,
        write_slots=write_slots,
        has_initial_state=torch.ones_like(write_slots, dtype=torch.bool),
        activation=activation,
    )


def _filter(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    y = (window * weight.t()).sum(dim=0)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return F.silu(y) if activation == "silu" else y
