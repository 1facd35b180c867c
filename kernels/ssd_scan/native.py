"""ssd_scan in C; arguments as in op.py. float64 goes through torch.

T packed tokens, H heads, G groups, P head dim, N state dim, S slots.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from plait.kernels.native import NativeLibrary, dtype_code, pointer
from plait.kernels.rounding import StochasticRounding
from plait.kernels.ssd_scan import torch_impl

library = NativeLibrary(
    Path(__file__).with_name("native.c"),
    ssd_scan="piii piip piii piii piii piip ppppi ppiff piiiii ppi ppii".replace(" ", ""),
)


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
    gate = x if z is None else z
    if torch.float64 in (x.dtype, dt.dtype, B.dtype, C.dtype, state.dtype, gate.dtype):
        return torch_impl.ssd_scan(
            x,
            dt,
            A,
            B,
            C,
            state,
            cu_seqlens=cu_seqlens,
            read_slots=read_slots,
            write_slots=write_slots,
            has_initial_state=has_initial_state,
            D=D,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            group_of_head=group_of_head,
            chunk_size=chunk_size,
            z=z,
            checkpoint_tokens=checkpoint_tokens,
            checkpoint_slots=checkpoint_slots,
            rounding=rounding,
        )
    x, dt, B, C, gate = _dense(x), _dense(dt), _dense(B), _dense(C), _dense(gate)
    # Small tensors keep their names until the call is over: some are copies.
    A, D, dt_bias = A.float().contiguous(), _floats(D), _floats(dt_bias)
    cu_seqlens, has_initial_state = cu_seqlens.contiguous(), has_initial_state.contiguous()
    read_slots, write_slots = read_slots.contiguous(), write_slots.contiguous()
    group_of_head = None if group_of_head is None else group_of_head.contiguous()
    num_checkpoints = 0
    if checkpoint_tokens is not None and checkpoint_slots is not None:
        num_checkpoints = len(checkpoint_tokens)
        checkpoint_tokens = checkpoint_tokens.contiguous()
        checkpoint_slots = checkpoint_slots.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    library.load().ssd_scan(
        x.data_ptr(),
        dtype_code(x.dtype),
        x.stride(0),
        x.stride(1),
        dt.data_ptr(),
        dtype_code(dt.dtype),
        dt.stride(0),
        A.data_ptr(),
        B.data_ptr(),
        dtype_code(B.dtype),
        B.stride(0),
        B.stride(1),
        C.data_ptr(),
        dtype_code(C.dtype),
        C.stride(0),
        C.stride(1),
        pointer(None if z is None else gate),
        dtype_code(gate.dtype),
        gate.stride(0),
        gate.stride(1),
        state.data_ptr(),
        dtype_code(state.dtype),
        state.stride(0),
        out.data_ptr(),
        cu_seqlens.data_ptr(),
        read_slots.data_ptr(),
        write_slots.data_ptr(),
        has_initial_state.data_ptr(),
        len(write_slots),
        pointer(D),
        pointer(dt_bias),
        dt_softplus,
        *dt_limit,
        pointer(group_of_head),
        *x.shape[:2],
        B.shape[1],
        x.shape[2],
        B.shape[2],
        pointer(checkpoint_tokens),
        pointer(checkpoint_slots),
        num_checkpoints,
        None if rounding is None else rounding.seeds.data_ptr(),
        None if rounding is None else rounding.positions.data_ptr(),
        0 if rounding is None else rounding.layer,
        0 if rounding is None else rounding.first_element,
    )
    return out


def _dense(tensor: Tensor) -> Tensor:
    """`tensor`, whose tokens and heads may be apart, with adjacent last elements."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _floats(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()
