"""selective_state_update in C; float64 goes through torch. Arguments as in op.py."""

import math
from pathlib import Path

import torch
from torch import Tensor

from plait.kernels.native import NativeLibrary, dtype_code, pointer
from plait.kernels.rounding import StochasticRounding
from plait.kernels.selective_state_update import torch_impl

library = NativeLibrary(
    Path(__file__).with_name("native.c"),
    selective_state_update="pipipipipipippp" + "ippp" + "iiiiiiff" + "piippii",
)


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
    out_dtype = dtype = x.dtype
    if torch.float64 in (dtype, A.dtype, state.dtype):
        return torch_impl.selective_state_update(
            x,
            dt,
            A,
            B,
            C,
            state,
            read_slots=read_slots,
            write_slots=write_slots,
            D=D,
            z=z,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            group_of_head=group_of_head,
            rounding=rounding,
        )
    if not dtype == dt.dtype == B.dtype == C.dtype or (z is not None and z.dtype != dtype):
        dtype = torch.float32  # rare: all in the widest
    # Tensors keep their names until the call is over: some are copies.
    x, dt, B, C = _rows(x, dtype), _rows(dt, dtype), _rows(B, dtype), _rows(C, dtype)
    z = None if z is None else _rows(z, dtype)
    A, D, dt_bias = A.contiguous(), _floats(D), _floats(dt_bias)
    read_slots, write_slots = read_slots.contiguous(), write_slots.contiguous()
    group_of_head = None if group_of_head is None else group_of_head.contiguous()
    seeds = None if rounding is None else rounding.seeds.contiguous()
    positions = None if rounding is None else rounding.positions.contiguous()
    batch, heads, head_dim = x.shape
    out = torch.empty((batch, heads, head_dim), dtype=dtype)
    library.load().selective_state_update(
        x.data_ptr(),
        x.stride(0),
        dt.data_ptr(),
        dt.stride(0),
        A.data_ptr(),
        A.dim() == 2,
        B.data_ptr(),
        B.stride(0),
        C.data_ptr(),
        C.stride(0),
        pointer(z),
        0 if z is None else z.stride(0),
        pointer(D),
        pointer(dt_bias),
        state.data_ptr(),
        state.stride(0),
        read_slots.data_ptr(),
        write_slots.data_ptr(),
        pointer(group_of_head),
        batch,
        heads,
        B.shape[1],
        head_dim,
        B.shape[2],
        dt_softplus,
        dt_limit[0],
        dt_limit[1],
        out.data_ptr(),
        dtype_code(dtype),
        dtype_code(state.dtype),
        pointer(seeds),
        pointer(positions),
        0 if rounding is None else rounding.layer,
        0 if rounding is None else rounding.first_element,
    )
    return out if dtype == out_dtype else out.to(out_dtype)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype` with any stride between its rows, contiguous inside each."""
    if x.dtype != dtype:
        x = x.to(dtype)
    strides = x.stride()
    if strides[-1] == 1 and (len(strides) == 2 or strides[1] == x.shape[2]):
        return x
    return x.contiguous()


def _floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()
