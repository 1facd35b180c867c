"""causal_conv1d in C; arguments as in op.py.

T packed tokens, R rows, B decode batch, C channels, W conv width, S slots, E checkpoints.
"""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from plait.kernels.causal_conv1d import torch_impl
from plait.kernels.native import NativeLibrary, dtype_code, pointer

library = NativeLibrary(
    Path(__file__).with_name("native.c"),
    causal_conv1d_prefill="piiiipiipipiiippppippip",
    causal_conv1d_update="piiiipiipipiippip",
)


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
    if not _has_code(x, weight, bias, state):
        return torch_impl.causal_conv1d_prefill(
            x,
            weight,
            bias,
            state,
            cu_seqlens=cu_seqlens,
            read_slots=read_slots,
            write_slots=write_slots,
            has_initial_state=has_initial_state,
            activation=activation,
            checkpoint_tokens=checkpoint_tokens,
            checkpoint_slots=checkpoint_slots,
        )
    x, weight, bias = _operands(x, weight, bias)
    cu_seqlens, has_initial_state = cu_seqlens.contiguous(), has_initial_state.contiguous()
    read_slots, write_slots = read_slots.contiguous(), write_slots.contiguous()
    num_checkpoints = 0
    if checkpoint_tokens is not None and checkpoint_slots is not None:
        checkpoint_tokens = checkpoint_tokens.contiguous()
        checkpoint_slots = checkpoint_slots.contiguous()
        num_checkpoints = len(checkpoint_slots)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    library.load().causal_conv1d_prefill(
        x.data_ptr(),
        dtype_code(x.dtype),
        x.stride(0),
        *x.shape,
        weight.data_ptr(),
        dtype_code(weight.dtype),
        weight.shape[1],
        pointer(bias),
        0 if bias is None else dtype_code(bias.dtype),
        state.data_ptr(),
        dtype_code(state.dtype),
        state.stride(0),
        len(write_slots),
        cu_seqlens.data_ptr(),
        read_slots.data_ptr(),
        write_slots.data_ptr(),
        has_initial_state.data_ptr(),
        num_checkpoints,
        pointer(checkpoint_tokens),
        pointer(checkpoint_slots),
        activation == "silu",
        out.data_ptr(),
    )
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
    if not _has_code(x, weight, bias, state):
        return torch_impl.causal_conv1d_update(
            x,
            weight,
            bias,
            state,
            read_slots=read_slots,
            write_slots=write_slots,
            activation=activation,
        )
    x, weight, bias = _operands(x, weight, bias)
    read_slots, write_slots = read_slots.contiguous(), write_slots.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    library.load().causal_conv1d_update(
        x.data_ptr(),
        dtype_code(x.dtype),
        x.stride(0),
        *x.shape,
        weight.data_ptr(),
        dtype_code(weight.dtype),
        weight.shape[1],
        pointer(bias),
        0 if bias is None else dtype_code(bias.dtype),
        state.data_ptr(),
        dtype_code(state.dtype),
        state.stride(0),
        read_slots.data_ptr(),
        write_slots.data_ptr(),
        activation == "silu",
        out.data_ptr(),
    )
    return out


def _has_code(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> bool:
    """Whether C takes the dtypes: all but float64."""
    dtypes = (x.dtype, weight.dtype, state.dtype, None if bias is None else bias.dtype)
    return torch.float64 not in dtypes


def _operands(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same without gaps, but for those between the tokens of `x`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    return x, weight.contiguous(), None if bias is None else bias.contiguous()
